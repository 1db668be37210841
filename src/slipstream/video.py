"""`slipstream watch`: a trained policy at play, as a video or in a window."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import gymnasium
from numpy.typing import NDArray

from slipstream import build, config, film, stage
from slipstream.build import Role
from slipstream.envs import gym
from slipstream.errors import ConfigError, Interrupted, RunFailed
from slipstream.evaluate import Policy, load

Array = NDArray[Any]


@dataclass(frozen=True)
class Video:
    """Episodes that were played to be looked at.

    Attributes:
        file: the video; None if a window was shown instead.
        seeds: what the environment was reset with, for each episode.
        cut: episodes that did not end within the limit of steps and count as they stood.
        frames: one for the beginning of each episode and one for each step.
    """

    file: str | None
    checkpoint: str
    steps: int
    episodes: int
    returns: list[float]
    lengths: list[int]
    seeds: list[int]
    cut: int
    frames: int
    fps: float
    deterministic: bool

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def record_video(
    run: str | os.PathLike[str], episodes: int = 3, *, out: str | os.PathLike[str] | None = None,
    fps: float | None = None, deterministic: bool = True, seed: int | None = None, max_steps: int = 100_000,
    live: bool = False, env: Callable[..., Any] | None = None, torso: Callable[..., Any] | None = None,
) -> Video:  # fmt: skip
    """Play episodes with a run's newest policy and write a video of them.

    Args:
        run: a run directory, a checkpoint in it, or the result of `train`.
        episodes: whole episodes to play.
        out: the file, `.mp4` or `.gif`; default `videos/<env>-step<steps>.mp4` in the run directory.
        fps: frames a second; default: what the environment asks for, else 30. A GIF has at most 50.
        deterministic: the most likely actions, else sampled ones.
        seed: of the episodes; default: the run's.
        max_steps: an episode is cut after so many.
        live: show a window instead of writing a file.
        env: the environment's maker, for a run trained with a callable. It is given `render_mode`, unless what it
            makes renders as it is.
        torso: the torso's maker, for a run trained with a callable.

    Raises:
        ConfigError: no policy there, the environment does not render, or an extra is missing.
        Interrupted: Ctrl-C or SIGTERM; the video has what was played until then.
    """
    for name, value in (("episodes", episodes), ("max_steps", max_steps)):
        if value < 1:
            raise ConfigError(f"{name}: {value} is too small, the least is 1")
    if fps is not None and not 0 < fps <= 1000:
        raise ConfigError(f"fps: {fps:g} is not above 0 and at most 1000")
    _check_window(live, out, fps)
    if not live:
        film.check(Path(out or "video.mp4"))
    policy = load(run, env=env, torso=torso)
    options = policy.run if seed is None else config.from_dict({"seed": seed}, policy.run)
    sequence = build.seeds(options, Role.EVALUATION, 1)
    rows, asked = stage.build(policy, env, "human" if live else "rgb_array", sequence)
    file = None if live else Path(out) if out else _default(Path(run), policy)
    fps = fps or float(asked or 30)
    play = _Play(policy, rows, deterministic, max_steps)
    if file is None:
        with _signals() as stopped:
            play.episodes(episodes, _check_shown, stopped)
    else:
        fps = min(fps, film.FASTEST_GIF) if file.suffix.lower() == ".gif" else fps
        with _signals() as stopped, film.written(file, fps) as strip:
            play.episodes(episodes, lambda: strip.add(stage.picture(rows.envs[0], policy.run.env)), stopped)
    rows.close()
    policy.env.close()  # type: ignore[attr-defined]
    if stopped:
        kept = f"; {file} has the {play.frames:,} frames until then" if file and play.frames else ""
        raise Interrupted(f"stopped by {stopped[0]}{kept}")
    return Video(
        str(file) if file else None, policy.checkpoint.name, policy.steps, episodes, play.returns, play.lengths,
        play.seeds, play.cut, play.frames, fps, deterministic,
    )  # fmt: skip


def _default(run: Path, policy: Policy) -> Path:
    if (run / "state.json").exists() and run.resolve().parent.name == "checkpoints":  # a checkpoint in its run
        run = run.parents[1] if len(run.parts) > 2 else run.resolve().parents[1]
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", policy.run.env.split(":")[-1])
    return run / "videos" / f"{name}-step{policy.steps}.mp4"


def _check_window(live: bool, out: object, fps: object) -> None:
    display = sys.platform != "linux" or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    if not live and not display:
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # pygame would look for a display, and complain
    if live and (out is not None or fps is not None):
        raise ConfigError("live: a window is shown instead of a file; out and fps are for files")
    if live and not display:
        raise ConfigError("live: there is no display here (DISPLAY is not set); without --live a file is written")


def _check_shown() -> None:
    """Where it cannot reach the display, SDL goes on without a window and says nothing."""
    pygame = sys.modules.get("pygame")
    hidden = pygame is not None and pygame.display.get_init() and pygame.display.get_driver() == "offscreen"
    if hidden and "SDL_VIDEODRIVER" not in os.environ:
        raise ConfigError(f"live: no window can be opened on the display {os.environ.get('DISPLAY')!r}")


class _Play:
    """Episodes of a policy on one copy, and what came of them."""

    def __init__(self, policy: Policy, rows: gym.Copies, deterministic: bool, limit: int) -> None:
        self.policy, self.rows, self.deterministic, self.limit = policy, rows, deterministic, limit
        self.returns: list[float] = []
        self.lengths: list[int] = []
        self.seeds: list[int] = []
        self.cut = self.frames = 0

    def episodes(self, count: int, show: Callable[[], None], stopped: list[str]) -> None:
        """Play until `count` episodes have ended or a signal came; every state they pass through is shown."""
        total, length = 0.0, 0
        self.policy.reset()
        obs, mask = self._begin()
        while not stopped:
            show()
            self.frames += 1
            if len(self.returns) == count:
                return
            step = self.rows.step(self.policy.choose(obs, self.deterministic, mask))
            obs, mask = step.obs, step.mask
            if step.starts[0]:  # in this step the copy was reset
                self.policy.reset(0)
                total, length = 0.0, 0
                continue
            total, length = total + float(step.reward[0]), length + 1
            ended = bool(step.terminated[0] or step.truncated[0])
            if ended or length >= self.limit:
                self.returns.append(total)
                self.lengths.append(length)
                self.seeds.append(self.rows.seeds[0])
                self.cut += not ended
                self.rows.replace(0)

    def _begin(self) -> tuple[Array, Array | None]:
        name = self.policy.run.env
        try:
            return self.rows.reset()
        except RunFailed as e:  # where a window is opened by the first reset
            cause = e.__cause__
            if isinstance(cause, gymnasium.error.DependencyNotInstalled):
                raise stage.lacking(name, cause) from None
            if type(cause).__module__.startswith("pygame"):
                raise ConfigError(f"live: {name} cannot open its window: {cause}") from None
            raise


@contextmanager
def _signals() -> Iterator[list[str]]:
    """Names of the signals that came: after the first the frame at hand is finished, the second ends at once."""
    came: list[str] = []
    if threading.current_thread() is not threading.main_thread():
        yield came
        return

    def handler(number: int, frame: Any) -> None:
        came.append(signal.Signals(number).name)
        if len(came) > 1:
            raise KeyboardInterrupt(came[0])

    old = {s: signal.signal(s, handler) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield came
    finally:
        for s, h in old.items():
            signal.signal(s, h)
