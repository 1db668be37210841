"""`slipstream watch`: what the videos hold, that a broken one is never left, and refusals."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from harness import command, finish, start, until

import slipstream as ss
from slipstream import cli, film, stage

imageio_ffmpeg = pytest.importorskip("imageio_ffmpeg")
Image = pytest.importorskip("PIL.Image")
pytest.importorskip("pygame")


class Odd(gym.Env[Any, Any]):
    """Episodes of nine steps; a picture of an odd size, redder with each step."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 7}  # noqa: RUF012

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode = render_mode
        self.observation_space = gym.spaces.Box(0, 1, (1,), np.float32)
        self.action_space = gym.spaces.Discrete(2)
        self.t = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.t = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.t += 1
        return np.ones(1, np.float32), 1.0, self.t >= 9, False, {}

    def render(self) -> Any:
        return np.full((33, 41, 3), (20 * self.t, 0, 0), np.uint8)


class Dark(Odd):
    """Renders nothing but text."""

    metadata = {"render_modes": ["ansi"]}  # noqa: RUF012


class Narrow(Odd):
    """Its maker takes no options."""

    def __init__(self) -> None:
        super().__init__()


def drawing() -> Odd:
    return Odd("rgb_array")


class Growing(Odd):
    """Its pictures grow."""

    def render(self) -> Any:
        return np.zeros((20 + self.t, 20, 3), np.uint8)


class Breaks(Odd):
    """Raises in the fourth step when it is looked at."""

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if self.t == 3 and self.render_mode:
            raise RuntimeError("broken on purpose")
        return super().step(action)


def tiny(directory: Path, env: Any, steps: int = 60, **more: Any) -> Path:
    settings = {"workers": 1, "copies": 2, "backend": "thread", "show": "none", "record": False, **more}
    ss.train(env, run=directory, total_steps=steps, **settings)
    return directory


@pytest.fixture(scope="module")
def cartpole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("cartpole") / "r", "CartPole-v1", 3000, normalize_observations=True)


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("odd") / "r", Odd)


def do(*arguments: object) -> int:
    try:
        return cli.run([str(a) for a in arguments])
    except SystemExit as e:
        return int(e.code or 0)


def mp4(path: str | Path) -> tuple[dict[str, Any], list[Any]]:
    """What a player finds: (about the video, its frames)."""
    frames: Iterator[Any] = imageio_ffmpeg.read_frames(str(path))
    about = next(frames)
    width, height = about["size"]
    return about, [np.frombuffer(f, np.uint8).reshape(height, width, 3) for f in frames]


def gif(path: str | Path) -> tuple[list[int], list[Any]]:
    """(delays in ms, frames)."""
    delays, frames = [], []
    with Image.open(path) as image:
        for i in range(image.n_frames):
            image.seek(i)
            frames.append(np.asarray(image.convert("RGB")))
            delays.append(image.info["duration"])
    return delays, frames


def played(run: Path, video: ss.Video, make: Callable[[], Any]) -> list[tuple[float, int]]:
    """(return, length) of the episodes of a video, played once more without rendering."""
    policy, env, out = ss.load(run), make(), []
    for seed in video.seeds:
        policy.reset()
        obs, _ = env.reset(seed=seed)
        total, length, over = 0.0, 0, False
        while not over:
            obs, reward, terminated, truncated, _ = env.step(policy.act(obs))
            total, length, over = total + float(reward), length + 1, terminated or truncated
        out.append((total, length))
    return out


# -- what a video holds --------------------------------------------------------------------------------


def test_video_has_the_episodes(cartpole: Path) -> None:
    """One frame for each step and one before the first; the episodes are those of the same seeds unseen."""
    video = ss.record_video(cartpole)
    (file,) = (cartpole / "videos").iterdir()
    assert video.file == str(file)
    assert file.name == f"CartPole-v1-step{video.steps}.mp4"
    assert len(video.returns) == len(video.lengths) == len(set(video.seeds)) == video.episodes == 3
    assert video.frames == sum(video.lengths) + 3
    about, frames = mp4(file)
    assert len(frames) == video.frames
    assert about["size"] == (600, 400)
    assert about["fps"] == video.fps == 50  # what CartPole asks for
    assert played(cartpole, video, lambda: gym.make("CartPole-v1")) == [*zip(video.returns, video.lengths, strict=True)]


def test_gif(cartpole: Path, tmp_path: Path) -> None:
    """In up to 256 colours nothing of CartPole is lost, though a frame holds only what has changed."""
    video = ss.record_video(cartpole, 2, out=tmp_path / "new" / "a.GIF", fps=30, max_steps=20)
    delays, frames = gif(tmp_path / "new" / "a.GIF")
    assert len(frames) == video.frames == sum(video.lengths) + 2
    assert sum(delays) == pytest.approx(1000 * video.frames / 30, abs=10)
    policy, env = ss.load(cartpole), gym.make("CartPole-v1", render_mode="rgb_array")
    obs, _ = env.reset(seed=video.seeds[0])
    for i in range(video.lengths[0]):
        assert np.abs(frames[i].astype(int) - env.render()).max() <= 8
        obs, *_ = env.step(policy.act(obs))
    assert ss.record_video(cartpole, 1, out=tmp_path / "b.gif", fps=100).fps == 50  # browsers show no faster one


def test_options_change_the_episodes(cartpole: Path, tmp_path: Path) -> None:
    def watch(**options: Any) -> ss.Video:
        return ss.record_video(cartpole, 2, out=tmp_path / "a.gif", max_steps=15, **options)

    first = watch()
    assert watch() == first
    assert all(length <= 15 for length in first.lengths)
    assert first.cut == sum(length == 15 for length in first.lengths)
    assert watch(seed=9).seeds != first.seeds
    assert watch(deterministic=False).deterministic is False


def test_memory_is_used_as_in_acting(tmp_path: Path) -> None:
    """A recurrent policy on an environment of ours, from a checkpoint."""
    run = tiny(tmp_path / "r", "slipstream/CartPoleHidden-v1", 400, net={"core": "lstm", "core_size": 8})
    (checkpoint,) = (run / "checkpoints").iterdir()
    video = ss.record_video(checkpoint)
    assert Path(str(video.file)).parent == run / "videos"
    assert len(mp4(str(video.file))[1]) == video.frames
    expected = played(run, video, lambda: gym.make("slipstream/CartPoleHidden-v1"))
    assert [*zip(video.returns, video.lengths, strict=True)] == expected


def test_odd_sizes_are_not_stretched(odd: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    video = ss.record_video(odd, 1, env=Odd)
    about, frames = mp4(str(video.file))
    assert about["size"] == (42, 34)
    assert len(frames) == 10
    assert about["fps"] == 7
    ss.record_video(odd, 1, env=Odd, out=tmp_path / "a.gif")
    _, exact = gif(tmp_path / "a.gif")
    assert [f.shape for f in exact] == [(33, 41, 3)] * 10
    assert [tuple(f[5, 5]) for f in exact] == [(20 * t, 0, 0) for t in range(10)]
    for seen, drawn in zip(frames, exact, strict=True):
        assert np.abs(seen[:33, :41].astype(int) - drawn).max() < 12
    assert capfd.readouterr() == ("", "")


def test_maker_that_renders_as_it_is(odd: Path) -> None:
    assert ss.record_video(odd, 1, env=drawing).frames == 10


def test_atari_is_seen_in_colour(tmp_path: Path) -> None:
    """The game as it is on the screen, not the grey squares that the policy sees."""
    pytest.importorskip("ale_py")
    pytest.importorskip("cv2")
    run = tiny(tmp_path / "r", "ALE/Breakout-v5", 40, env_kwargs={"fire_reset": True})
    video = ss.record_video(run, 1, max_steps=20)
    about, frames = mp4(str(video.file))
    assert about["size"] == (160, 210)
    assert video.fps == 15
    assert len(frames) == video.frames == 21
    assert np.ptp(frames[0].astype(int), axis=2).max() > 50


# -- the command ---------------------------------------------------------------------------------------


def test_command(cartpole: Path, tmp_path: Path) -> None:
    done = command("watch", cartpole, "--episodes", 2, "--out", "a.mp4", "--json", cwd=tmp_path)
    assert done.code == 0, done
    assert done.err == ""
    found = done.json
    assert found["file"] == "a.mp4"
    assert found["frames"] == sum(found["lengths"]) + 2 == len(mp4(tmp_path / "a.mp4")[1])
    assert os.listdir(tmp_path) == ["a.mp4"]


def test_plain_output(cartpole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "a.gif"
    assert do("watch", cartpole, "--episodes", 2, "--out", file, "--max-steps", 3, "--stochastic") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("2 episodes, sampled actions, checkpoint ")
    assert lines[1:] == [
        "episode 1  return 3.00  length 3",
        "episode 2  return 3.00  length 3",
        "2 episodes did not end within the limit of steps",
        f"8 frames, 50 a second: {file}",
    ]


def test_interrupted_video_is_whole(cartpole: Path, tmp_path: Path) -> None:
    """Ctrl-C, which a terminal sends to ffmpeg too, leaves what was played until then."""
    process = start("watch", cartpole, "--episodes", 100_000, "--out", "a.mp4", cwd=tmp_path)
    until(lambda: os.listdir(tmp_path), 60, what="a file")
    time.sleep(0.5)  # some frames
    os.killpg(process.pid, signal.SIGINT)
    done = finish(process)
    assert done.code == 130, done
    (frames,) = re.findall(r"stopped by SIGINT; a\.mp4 has the ([\d,]+) frames until then", done.err)
    assert os.listdir(tmp_path) == ["a.mp4"]
    assert len(mp4(tmp_path / "a.mp4")[1]) == int(frames.replace(",", ""))


@pytest.mark.parametrize("kind", [Growing, Breaks])
@pytest.mark.parametrize("name", ["a.mp4", "a.gif"])
def test_nothing_is_left_of_a_failure(kind: type[Odd], name: str, odd: Path, tmp_path: Path) -> None:
    (tmp_path / name).write_text("an older one")
    with pytest.raises(ss.RunFailed, match=r"changed their size|broken on purpose"):
        ss.record_video(odd, 1, env=kind, out=tmp_path / name)
    assert (tmp_path / name).read_text() == "an older one"
    assert os.listdir(tmp_path) == [name]


def test_encoder_that_fails(odd: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "ffmpeg"
    program.write_text("#!/bin/sh\ncat >/dev/null\necho no room >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setattr(imageio_ffmpeg, "get_ffmpeg_exe", lambda: str(program))
    with pytest.raises(ss.RunFailed, match="no room"):
        ss.record_video(odd, 1, env=Odd, out=tmp_path / "a.mp4")
    assert os.listdir(tmp_path) == ["ffmpeg"]


# -- windows -------------------------------------------------------------------------------------------


def test_window(cartpole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISPLAY", ":0")
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    video = ss.record_video(cartpole, 1, live=True, max_steps=10)
    assert video.file is None
    assert video.lengths[0] <= 10


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere there is always a display")
def test_no_window_without_a_display(cartpole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ss.ConfigError, match="no display"):
        ss.record_video(cartpole, live=True)
    with pytest.raises(ss.ConfigError, match="instead of a file"):
        ss.record_video(cartpole, live=True, out="a.mp4")


# -- refusals ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["RUN", "--out", "a.avi"], ["a.avi", ".mp4", ".gif"]),
        (["RUN", "--out", "film"], ["film", ".mp4"]),
        (["RUN", "--out", "here.mp4"], ["here.mp4", "directory"]),
        (["RUN", "--out", "file/a.gif"], ["file"]),
        (["RUN", "--episodes", "0"], ["episodes"]),
        (["RUN", "--fps", "0"], ["fps"]),
        (["RUN", "--max-steps", "0"], ["max_steps"]),
        (["nowhere"], ["nowhere", "no such run"]),
    ],
)
def test_refused(
    arguments: list[str], words: list[str], cartpole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    Path("here.mp4").mkdir()
    Path("file").write_text("")
    assert do("watch", *[str(cartpole) if a == "RUN" else a for a in arguments]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("slipstream: ")
    assert err.count("\n") == 1
    for word in words:
        assert word in err
    assert sorted(os.listdir()) == ["file", "here.mp4"]


def test_environment_that_does_not_render(tmp_path: Path) -> None:
    run = tiny(tmp_path / "r", Dark)
    with pytest.raises(ss.ConfigError, match=r"Dark does not render pictures .*\['ansi'\]"):
        ss.record_video(run, env=Dark)
    assert not (run / "videos").exists()


def test_maker_without_render_mode(odd: Path) -> None:
    with pytest.raises(ss.ConfigError, match="render_mode"):
        ss.record_video(odd, env=Narrow)


@pytest.mark.parametrize("name", ["a.mp4", "a.gif"])
def test_missing_extra(
    name: str, odd: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    assert do("watch", odd, "--out", name) == 2
    assert "pip install 'slipstream-rl[video]'" in capfd.readouterr().err


def test_missing_pygame_names_the_extra(cartpole: Path, tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['pygame'] = None\n"
        "from slipstream import cli\n"
        "sys.exit(cli.run(['watch', sys.argv[1], '--out', 'a.gif']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(cartpole)], capture_output=True, text=True, cwd=tmp_path, timeout=90
    )
    assert done.returncode == 2, done.stderr
    assert "slipstream-rl[classic]" in done.stderr
    assert not os.listdir(tmp_path)


# -- pictures ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(6, 5), (6, 5, 1), (6, 5, 3), (6, 5, 4)])
def test_pictures_of_every_kind(shape: tuple[int, ...]) -> None:
    class Env:
        def render(self) -> Any:
            return np.full(shape, 7, np.uint8)

    assert np.array_equal(stage.picture(Env(), "x"), np.full((6, 5, 3), 7))


@pytest.mark.parametrize("drawn", [None, "text", np.zeros((4, 4, 3)), []])
def test_what_is_no_picture(drawn: Any) -> None:
    class Env:
        def render(self) -> Any:
            return drawn

    with pytest.raises(ss.ConfigError, match="not a picture"):
        stage.picture(Env(), "x")


@pytest.mark.parametrize("suffix", ["mp4", "gif"])
def test_frames_are_written_as_they_come(suffix: str, tmp_path: Path) -> None:
    """The file grows while a video is made; it has another name until the end."""
    rng, name = np.random.default_rng(0), f"a.{suffix}"
    deadline = time.monotonic() + 60
    with film.written(tmp_path / name, 25) as strip:
        while not any(file.stat().st_size for file in tmp_path.iterdir()):
            strip.add(rng.integers(0, 256, (200, 200, 3), dtype=np.uint8))
            assert time.monotonic() < deadline
        assert name not in os.listdir(tmp_path)
    assert os.listdir(tmp_path) == [name]
