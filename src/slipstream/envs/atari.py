"""Atari games: ale-py's own vector form with the classic preprocessing, or Gymnasium's wrappers.

`AtariVectorEnv` steps the rows in threads outside the interpreter. Single frames are taken from it and
stacked here, because its own stack begins an episode with black frames. Two of its options are not used:
`episodic_life` starts the whole game again at each lost life, and `reward_clipping` hides the score.
An error inside its threads is never reported, `recv` waits for ever; what could cause one, an action out
of range, is refused before.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from slipstream.envs.gym import Copies, Native, find
from slipstream.envs.spaces import observations
from slipstream.errors import ConfigError, nearest
from slipstream.rollout import Step

Array = NDArray[Any]
IDS = re.compile(r"(ale_py:)?(ALE/\w+-v5|\w+NoFrameskip-v4)")
OTHER_NAMES = {  # what an option is called in ale-py and Gymnasium
    "repeat_action_probability": "sticky", "terminal_on_life_loss": "episodic_life", "screen_size": "size",
    "img_height": "size", "img_width": "size", "grayscale_obs": "grayscale", "stack_num": "stack",
    "use_fire_reset": "fire_reset", "reward_clipping": "reward_clip", "num_threads": "threads",
    "max_num_frames_per_episode": "max_frames",
}  # fmt: skip


@dataclass(frozen=True)
class Options:
    """What `env_kwargs` may say; see docs/environments.md."""

    frame_skip: int = 4
    size: int = 84
    grayscale: bool = True
    stack: int = 4
    noop_max: int = 30
    episodic_life: bool = False
    sticky: float = 0.0  # the id's own probability where not given
    full_action_space: bool = False
    fire_reset: bool = False
    reward_clip: bool = True
    max_frames: int = 108_000
    threads: int = 1
    wrappers: bool = False
    mode: int = -1  # of the game; -1 is its first
    difficulty: int = -1
    render_mode: str = ""


WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a word"}
BOUNDS = {
    "frame_skip": (1, 1000), "size": (8, 1000), "stack": (1, 100), "noop_max": (0, 10_000), "sticky": (0, 1),
    "max_frames": (1, 2**31 - 1), "threads": (1, 1000),
}  # fmt: skip
ONLY_NATIVE = ("episodic_life", "threads")
ONLY_WRAPPERS = ("mode", "difficulty", "render_mode")


def owns(env: Any) -> bool:
    """Whether an environment is given by an id that is made here."""
    return isinstance(env, str) and IDS.fullmatch(env) is not None


def drawn(kwargs: dict[str, Any], render_mode: str) -> dict[str, Any]:
    """`env_kwargs` of the same game with pictures, as in `render_mode` of Gymnasium."""
    kept = {k: v for k, v in kwargs.items() if k not in ONLY_NATIVE}
    return {**kept, "wrappers": True, "render_mode": render_mode}


def options(env_id: str, kwargs: dict[str, Any], sticky: float) -> Options:
    """The options given over the defaults; raises ConfigError where they make no sense."""
    kinds = {f.name: type(f.default) for f in dataclasses.fields(Options)}
    for name, value in kwargs.items():
        if name not in kinds:
            near = [OTHER_NAMES[name]] if name in OTHER_NAMES else nearest(name, kinds)
            hint = f"Did you mean {' or '.join(near)}?" if near else f"There are: {', '.join(kinds)}."
            raise ConfigError(f"env_kwargs: {env_id} has no option {name!r}. {hint}")
        kind: Any = (int, float) if kinds[name] is float else kinds[name]
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise ConfigError(f"env_kwargs.{name}: must be {WORDS[kinds[name]]}, not {value!r}")
        low, high = BOUNDS.get(name, (-1, 2**31 - 1))
        if kind is not str and not low <= value <= high:
            raise ConfigError(f"env_kwargs.{name}: {value} is not between {low} and {high}")
    made = Options(**{"sticky": sticky, **kwargs})
    for name in ONLY_NATIVE if made.wrappers else ONLY_WRAPPERS:
        if getattr(made, name) != getattr(Options, name):
            raise ConfigError(f"env_kwargs.{name}: works only with wrappers={not made.wrappers}".lower())
    return made


def make(
    env_id: str, copies: int, seeds: np.random.SeedSequence, kwargs: dict[str, Any], failures: int
) -> Atari | Wrapped:
    """`copies` rows of a game; raises ConfigError where ale-py, the game or an option does not exist."""
    spec = find(env_id)
    o = options(env_id, kwargs, float(spec.kwargs["repeat_action_probability"]))
    try:
        if o.wrappers:
            return Wrapped(o, lambda: _wrapped(spec, o), copies, seeds, failures)
        return Atari(o, lambda: _vector(spec.kwargs["game"], copies, o), copies, seeds, failures)
    except ImportError as e:
        raise ConfigError(f"env: {env_id}: ale-py is too old or incomplete ({e})") from None
    except gym.error.DependencyNotInstalled:
        raise ConfigError("env_kwargs.wrappers: needs OpenCV: pip install opencv-python-headless") from None
    except RuntimeError as e:  # a mode or a difficulty the game does not have
        raise ConfigError(f"env_kwargs: {env_id}: {e}") from None


def _vector(game: str, copies: int, o: Options) -> Any:
    from ale_py.vector_env import AtariVectorEnv

    return AtariVectorEnv(
        game, copies, num_threads=o.threads, autoreset_mode=AutoresetMode.NEXT_STEP, stack_num=1,
        max_num_frames_per_episode=o.max_frames, repeat_action_probability=o.sticky,
        full_action_space=o.full_action_space, img_height=o.size, img_width=o.size, grayscale=o.grayscale,
        frameskip=o.frame_skip, noop_max=o.noop_max, use_fire_reset=o.fire_reset, reward_clipping=False,
    )  # fmt: skip


def _wrapped(spec: Any, o: Options) -> Any:
    """One game behind Gymnasium's wrappers, with the same observations."""
    variant = {k: getattr(o, k) for k in ONLY_WRAPPERS if getattr(o, k) not in (-1, "")}
    env: Any = gym.make(
        spec, disable_env_checker=True, frameskip=1, repeat_action_probability=o.sticky,
        full_action_space=o.full_action_space, max_num_frames_per_episode=o.max_frames, **variant,
    )  # fmt: skip
    env = gym.wrappers.AtariPreprocessing(
        env, noop_max=o.noop_max, frame_skip=o.frame_skip, screen_size=o.size, grayscale_obs=o.grayscale
    )
    if o.fire_reset and env.unwrapped.get_action_meanings()[1] == "FIRE":
        env = Fire(env)
    if not o.grayscale:
        box = gym.spaces.Box(0, 255, (3, o.size, o.size), np.uint8)
        env = gym.wrappers.TransformObservation(env, lambda frame: frame.transpose(2, 0, 1), box)
    env = gym.wrappers.FrameStackObservation(env, o.stack, padding_type="reset")
    return gym.wrappers.ReshapeObservation(env, _shape(o))


class Fire(gym.Wrapper[Any, Any, Any, Any]):
    """Presses FIRE where a game begins."""

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        """Begin a game."""
        self.env.reset(**kwargs)
        obs, *_, info = self.env.step(1)
        return obs, info


def _shape(o: Options) -> tuple[int, int, int]:
    return (o.stack * (1 if o.grayscale else 3), o.size, o.size)


class Stack:
    """The last `frames` frames of every row, in a longer strip, so that a new one is written and none moves."""

    SLACK = 12

    def __init__(self, rows: int, frames: int, shape: tuple[int, ...]) -> None:
        self.frames, self.at, self.strip = frames, 0, np.zeros((rows, frames + self.SLACK, *shape), np.uint8)

    def push(self, frame: Array, starts: Array) -> Array:
        """Add a frame `[rows, *shape]`; rows that start have no other. Returns a copy `[rows, frames, *shape]`."""
        if self.at == self.SLACK:  # the end of the strip: go on at its beginning
            self.strip[:, : self.frames] = self.strip[:, self.at :]
            self.at = 0
        self.at += 1
        last = self.at + self.frames
        self.strip[:, last - 1] = frame
        if starts.any():
            self.strip[starts, self.at : last] = frame[starts, None]
        return self.strip[:, self.at : last].copy()


class Atari(Native):
    """Rows of a game in ale-py's vector form.

    Observations are `[stack, size, size]` bytes, the newest frame last (in colour: three channels a frame):
    the one before, one frame on; where an episode starts, its first frame `stack` times.

    Attributes:
        stack: frames of an observation.
        reward_clip: whether to learn from rewards clipped to [-1, 1]; `Step.reward` is always the score.
    """

    def __init__(
        self, o: Options, build: Callable[[], Any], copies: int, seeds: np.random.SeedSequence, failures: int
    ) -> None:
        super().__init__(build, copies, seeds, failures)
        self.options, self.stack, self.reward_clip = o, o.stack, o.reward_clip
        self.encoder = observations(gym.spaces.Box(0, 255, _shape(o), np.uint8))
        self.shape = self.encoder.shape
        self.frames = Stack(copies, o.stack, (self.shape[0] // o.stack, o.size, o.size))
        self.again = np.zeros(copies, bool)
        self.lives = np.zeros(copies, np.int32)
        self.sent = False
        self.error: Exception | None = None

    def reset(self) -> tuple[Array, Array | None]:
        """Begin an episode in every copy."""
        if self.sent and self.error is None:
            self.env.recv()
        self.sent = False
        frame, info = self.env.reset(seed=self.rng.integers(2**31, size=self.copies))
        no, yes = np.zeros(self.copies, bool), np.ones(self.copies, bool)
        self.ended, self.again, self.lives = no, no.copy(), info["lives"]
        return self._stacked(frame, yes), None

    def step(self, action: Array) -> Step:
        """Step every copy; where the environment raises, all copies are made anew."""
        self.send(action)
        return self.recv()

    def send(self, action: Array) -> None:
        """Begin a step and return at once; `recv` waits for it."""
        if self.sent:
            raise RuntimeError("an action was sent before the last one's step was received")
        self.error, self.sent = None, True
        try:
            if action.min() < 0 or action.max() >= self.head.outputs:
                raise ValueError(f"an action is not in 0 … {self.head.outputs - 1}: {action}")
            self.env.send(np.asarray(action, np.int64))
        except Exception as e:
            self.error = e

    def recv(self) -> Step:
        """The step that the last `send` began."""
        if not self.sent:
            raise RuntimeError("a step was received with no action sent")
        self.sent = False
        try:
            if self.error is None:
                return self._received()
        except Exception as e:
            self.error = e
        return self._failed(self.error)

    def _received(self) -> Step:
        frame, reward, terminated, truncated, info = self.env.recv()
        self.steps += 1
        lives, starts, valid = info["lives"], self.ended, ~self.ended
        if self.again.any():
            frame, lives, starts, valid = self._replaced(frame, lives)
            reward[~valid], terminated[~valid], truncated[~valid] = 0, False, False
        self.ended = terminated | truncated
        lost = None
        if self.options.episodic_life:
            died = (lives < self.lives) & (lives > 0) & valid  # Q*bert has none left long before its end
            lost = died & ~self.ended
            terminated, starts = terminated | died, starts | lost
        self.lives = lives
        stacked = self._stacked(frame, starts)
        return Step(stacked, reward.astype(np.float32), terminated, truncated, valid, starts, lost=lost)

    def _replaced(self, frame: Array, lives: Array) -> tuple[Array, Array, Array, Array]:
        """Frames, lives, starts and valid with the rows in `again` reset, whatever their step gave."""
        rows, self.again = self.again, np.zeros(self.copies, bool)
        anew, info = self.env.reset(options={"reset_mask": rows})
        frame[rows], lives[rows] = anew[rows], info["lives"][rows]
        return frame, lives, self.ended | rows, ~(self.ended | rows)

    def _stacked(self, frame: Array, starts: Array) -> Array:
        frame = frame if self.options.grayscale else frame[:, 0].transpose(0, 3, 1, 2)
        return self.frames.push(frame, starts).reshape(self.copies, *self.shape)

    def replace(self, row: int) -> None:
        """Begin a new game in one copy at its next step."""
        self.again[row] = True

    def save(self) -> None:
        """None: a vector form does not give the state of its emulators; resumed runs begin new games."""

    def restore(self, values: dict[str, Any], arrays: dict[str, Array]) -> None:
        """Impossible, see `save`."""
        raise ValueError("the state of Atari's vector form cannot be restored")

    def close(self) -> None:
        """End the threads."""
        self.env = None  # they end with the object


class Wrapped(Copies):
    """Rows of a game behind Gymnasium's wrappers: slower, but with modes, difficulties, and a state to save."""

    def __init__(
        self, o: Options, build: Callable[[], Any], copies: int, seeds: np.random.SeedSequence, failures: int
    ) -> None:
        super().__init__(build, copies, seeds, failures)
        self.options, self.stack, self.reward_clip = o, o.stack, o.reward_clip
