"""The state of a vector environment written in Python and NumPy, without pickle.

Its attributes are walked: numbers, texts, arrays and random generators are taken, spaces and specs are
known not to change, and anything else means that the state cannot be had this way.
"""

from __future__ import annotations

from enum import Enum
from typing import Any, cast

import gymnasium as gym
import numpy as np
from gymnasium.envs.registration import EnvSpec
from numpy.typing import NDArray

Arrays = dict[str, NDArray[Any]]
CONSTANT = (gym.Space, EnvSpec, Enum)


class Unsupported(Exception):
    """The environment holds something whose state cannot be read."""


def capture(env: Any) -> tuple[dict[str, Any], Arrays]:
    """(JSON values, arrays) of every layer of a wrapped environment.

    Raises:
        Unsupported: names the attribute that cannot be read.
    """
    values: dict[str, Any] = {}
    arrays: Arrays = {}
    for depth, layer in enumerate(_layers(env)):
        for name, value in vars(layer).items():
            if name != "env" and not isinstance(value, CONSTANT):
                values[f"{depth}.{name}"] = _plain(value, f"{depth}.{name}", arrays)
    return values, arrays


def restore(env: Any, values: dict[str, Any], arrays: Arrays) -> None:
    """Put what `capture` gave into a freshly made environment."""
    layers = list(_layers(env))
    for key, value in values.items():
        depth, name = key.split(".", 1)
        setattr(layers[int(depth)], name, _back(value, arrays))


def _layers(env: Any) -> list[Any]:
    found = [env]
    while isinstance(found[-1], gym.vector.VectorWrapper):
        found.append(found[-1].env)
    return found


def _plain(value: Any, where: str, arrays: Arrays) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.ndarray) and value.dtype != object:
        arrays[where] = value.copy()
        return {"array": where}
    if isinstance(value, np.generic):
        arrays[where] = np.array(value)
        return {"scalar": where}
    if isinstance(value, np.random.Generator):
        return {"generator": generator_state(value)}
    if isinstance(value, list | tuple):
        items = [_plain(v, f"{where}[{i}]", arrays) for i, v in enumerate(value)]
        return {"list" if isinstance(value, list) else "tuple": items}
    if isinstance(value, dict) and all(isinstance(k, str) for k in value):
        kept = {k: v for k, v in value.items() if not isinstance(v, CONSTANT)}
        return {"dict": {k: _plain(v, f"{where}.{k}", arrays) for k, v in kept.items()}}
    raise Unsupported(f"{where} is a {type(value).__name__}")


def _back(value: Any, arrays: Arrays) -> Any:
    if not isinstance(value, dict):
        return value
    (kind, inner), *_ = value.items()
    if kind == "array":
        return arrays[inner].copy()
    if kind == "scalar":
        return arrays[inner][()]
    if kind == "generator":
        return generator_from(inner)
    if kind == "dict":
        return {k: _back(v, arrays) for k, v in inner.items()}
    items = [_back(v, arrays) for v in inner]
    return items if kind == "list" else tuple(items)


def generator_state(rng: np.random.Generator) -> dict[str, Any]:
    """State of a PCG64 generator as JSON values.

    Raises:
        Unsupported: another bit generator.
    """
    state = rng.bit_generator.state
    if state["bit_generator"] != "PCG64":
        raise Unsupported(f"random generator {state['bit_generator']}")
    return dict(state)


def generator_from(state: dict[str, Any]) -> np.random.Generator:
    """The generator that `generator_state` described."""
    bits = np.random.PCG64()
    bits.state = cast(Any, state)
    return np.random.Generator(bits)
