"""CartPole with its velocities hidden: an environment that needs memory.

`slipstream/CartPoleHidden-v1` shows cart position and pole angle only; what moves how fast has to be
remembered. Both the plain and the vector form are registered.
"""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.envs.classic_control.cartpole import CartPoleEnv, CartPoleVectorEnv
from numpy.typing import NDArray

SEEN = [0, 2]  # cart position, pole angle


def _visible(space: Any) -> Any:
    return gym.spaces.Box(space.low[..., SEEN], space.high[..., SEEN], dtype=np.float32)


class HiddenCartPole(gym.ObservationWrapper[NDArray[np.float32], Any, NDArray[np.float32]]):
    """CartPole without the two velocities."""

    def __init__(self, render_mode: str | None = None) -> None:
        super().__init__(CartPoleEnv(render_mode=render_mode))
        self.observation_space = _visible(self.env.observation_space)

    def observation(self, observation: NDArray[np.float32]) -> NDArray[np.float32]:
        """Positions of an observation."""
        return observation[SEEN]


class HiddenCartPoleVector(CartPoleVectorEnv):
    """The vector form of the same."""

    def __init__(self, num_envs: int = 1, max_episode_steps: int = 500, render_mode: str | None = None) -> None:
        super().__init__(num_envs, max_episode_steps, render_mode)
        self.single_observation_space = _visible(self.single_observation_space)
        self.observation_space = gym.vector.utils.batch_space(self.single_observation_space, num_envs)

    def step(self, action: Any) -> Any:
        """One step of every copy."""
        obs, *rest = super().step(action)
        return obs[:, SEEN], *rest

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """Begin an episode in every copy."""
        obs, info = super().reset(seed=seed, options=options)
        return obs[:, SEEN], info


if "slipstream/CartPoleHidden-v1" not in gym.registry:
    gym.register(
        "slipstream/CartPoleHidden-v1",
        entry_point="slipstream.envs.hidden:HiddenCartPole",
        vector_entry_point="slipstream.envs.hidden:HiddenCartPoleVector",
        max_episode_steps=500,
        reward_threshold=475.0,
    )
