"""What is installed and works here: environments, algorithms, the machine."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from slipstream import config, store
from slipstream.cores import usable_cores

NEEDS = {  # module of an entry point -> (package it imports, extra or None)
    "gymnasium.envs.box2d": ("Box2D", "box2d"),
    "gymnasium.envs.mujoco": ("mujoco", None),
    "gymnasium.envs.phys2d": ("jax", None),
    "gymnasium.envs.tabular": ("jax", None),
}


def environments() -> list[dict[str, Any]]:
    """Every registered environment: id, whether it has a preset or a vector form, what it lacks here."""
    import gymnasium as gym

    import slipstream.envs.hidden  # noqa: F401
    from slipstream.envs import atari

    found = []
    if installed("ale_py"):
        importlib.import_module("ale_py")  # registers its games
    else:
        needs = "needs ale_py: pip install 'slipstream-rl[atari]'"
        found.append({"id": "ALE/*-v5", "preset": False, "vector": True, "needs": needs})
    for name, spec in sorted(gym.registry.items()):
        if str(spec.entry_point).startswith("ale_py") and not atari.owns(name):
            continue  # the same games once more, without the usual preprocessing
        needs = "" if not callable(spec.entry_point) else "moved to a package of its own"
        for module, (package, extra) in NEEDS.items():
            if str(spec.entry_point or spec.vector_entry_point).startswith(module) and not installed(package):
                needs = f"needs {package}" + (f": pip install 'slipstream-rl[{extra}]'" if extra else "")
        vector = spec.vector_entry_point is not None or atari.owns(name)
        found.append({"id": name, "preset": bool(config.preset(name)), "vector": vector, "needs": needs})
    return found


def installed(package: str) -> bool:
    """Whether a package can be imported; it is not imported."""
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):
        return False


def catalogue() -> dict[str, dict[str, str]]:
    """First line of each algorithm's and rule's documentation."""
    rooms = {"algorithms": "algos", "rules": "rules"}
    return {title: {name: _first_line(room, name) for name in config.names(room)} for title, room in rooms.items()}


def _first_line(room: str, name: str) -> str:
    tree = ast.parse((config.HERE / room / f"{name}.py").read_text())  # importing a rule would import torch
    text = (ast.get_docstring(tree) or "").splitlines()[0]
    return text.split(": ", 1)[-1]


def examine() -> list[dict[str, Any]]:
    """One check a line: name, ok, text, and whether training needs it."""
    checks = [_versions(), _cores(), _memory(), _store()]
    for extra, package, what in (
        ("box2d", "Box2D", "LunarLander, BipedalWalker, CarRacing"),
        ("classic", "pygame", "rendering of classic control"),
        ("atari", "ale_py", "Atari games"),
        ("bench", "stable_baselines3", "comparisons with Stable-Baselines3"),
        ("plot", "matplotlib", "pictures of learning curves"),
        ("compare", "scipy", "comparisons of algorithms and update rules (slipstream compare)"),
        ("video", "imageio_ffmpeg", "videos of a policy at play (slipstream watch)"),
    ):
        here = installed(package)
        text = f"{what}" if here else f"would add {what}: pip install 'slipstream-rl[{extra}]'"
        checks.append({"name": f"extra {extra}", "ok": here, "text": text, "needed": False})
    return checks


def _versions() -> dict[str, Any]:
    names = []
    for package in ("torch", "gymnasium", "numpy", "tensorboard"):
        try:
            names.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            return {"name": "packages", "ok": False, "text": f"{package} is not installed", "needed": True}
    python = f"Python {platform.python_version()}"
    return {
        "name": "packages",
        "ok": sys.version_info >= (3, 11),
        "text": ", ".join([python, *names]),
        "needed": True,
    }


def _cores() -> dict[str, Any]:
    cores, host = usable_cores(), os.cpu_count()
    text = f"{cores} usable" + (f" of the host's {host} (affinity and cgroup limits)" if host != cores else "")
    return {"name": "cores", "ok": True, "text": text, "needed": True}


def _memory() -> dict[str, Any]:
    place = Path("/dev/shm")
    if not place.is_dir():
        return {"name": "shared memory", "ok": True, "text": "no /dev/shm; a file is used", "needed": True}
    stat = os.statvfs(place)
    free = stat.f_bavail * stat.f_frsize / 2**20
    text = f"/dev/shm has {free:,.0f} MiB free"
    if free < 64:
        text += "; small: large networks fall back to a file (docker: --shm-size=1g)"
    return {"name": "shared memory", "ok": True, "text": text, "needed": True}


def _store() -> dict[str, Any]:
    """Make a store, update and read it: shared memory, the lock and the optimizer at once."""
    import numpy as np

    from slipstream.optimize import Stepper, state_layout
    from slipstream.store import Layout, Segment, Snapshot, Store, initialize

    try:
        layout = Layout(1024, state_layout("adam", 1024), 0, 1)
        segment = Segment.create(layout.regions()[1], ["/dev/shm", "/tmp"])
        initialize(segment.path, layout, np.zeros(1024, np.float32))
        handle = Store(segment.path, 0)
        stepper = Stepper(handle, "adam", 1e-8, 0.99)
        with handle.update() as slot:
            stepper.step(slot, np.ones(1024, np.float32), 0.5)
            slot.header[1] += 1
        snapshot = Snapshot(np.zeros(1024, np.float32), 0)
        got = handle.read(snapshot)
        handle.close()
        segment.close()
        good = got == 1 and bool(np.allclose(snapshot.weights, -0.5, atol=1e-5)) and not store.sweep()
        return {
            "name": "parameter store",
            "ok": good,
            "text": "an update was written and read whole",
            "needed": True,
        }
    except Exception as e:
        return {"name": "parameter store", "ok": False, "text": f"{type(e).__name__}: {e}", "needed": True}
