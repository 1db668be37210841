"""Checkpoints: safetensors and JSON, never pickle; a directory that is either whole or not there.

Written under another name, every file fsynced, then renamed; the previous ones stay until it is there.
`state.json` holds a checksum of each file and of itself, verified on loading.
"""

from __future__ import annotations

import json
import os
import shutil
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from slipstream.errors import ConfigError
from slipstream.store import Header, Slot

Arrays = dict[str, NDArray[Any]]
FORMAT = 1


def write_part(path: Path, values: dict[str, Any], arrays: Arrays) -> None:
    """Write JSON values and arrays as one safetensors file, atomically."""
    whole: Arrays = {k: np.ascontiguousarray(v).reshape(np.shape(v)) for k, v in arrays.items()}
    whole["_"] = np.zeros(1, np.uint8)  # a file of no tensors cannot carry values
    write_file(path, save(whole, metadata={"json": json.dumps(values)}))


def read_part(path: Path) -> tuple[dict[str, Any], Arrays]:
    """What `write_part` wrote.

    Raises:
        ConfigError: missing, cut off, or not such a file.
    """
    try:
        raw = path.read_bytes()
        arrays = load(raw)
        size = int.from_bytes(raw[:8], "little")
        values = json.loads(json.loads(raw[8 : 8 + size])["__metadata__"]["json"])
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as e:
        raise ConfigError(f"{path}: cannot be read ({e})") from None
    arrays.pop("_", None)
    return values, dict(arrays)


def write_file(path: Path, data: bytes) -> None:
    """Write a file so that a crash leaves the old one or the new one, on disk.

    Raises:
        OSError: such as a full disk; nothing is left behind then.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(fd, view) :]
            os.fsync(fd)
        finally:
            os.close(fd)
        os.replace(temporary, path)
    except OSError:
        with suppress(OSError):
            temporary.unlink()
        raise


def save_checkpoint(directory: Path, slot: Slot, state: dict[str, Any], workers: list[Path], keep: int) -> Path:
    """Write `checkpoints/<steps>/` (`<steps>.1` if that exists) from a slot that nobody changes meanwhile.

    Args:
        directory: the run directory.
        slot: weights, optimizer state, moments and counters.
        state: JSON values of the run: configuration, counters, parts.
        workers: files that workers wrote of themselves; they are moved in.
        keep: checkpoints to keep, this one included.

    Raises:
        OSError: such as a full disk; earlier checkpoints are untouched.
    """
    room = directory / "checkpoints"
    room.mkdir(exist_ok=True)
    sweep(directory)
    name = f"{slot.steps:012d}"
    for earlier in found(directory):  # the same step may be saved again (a run that is extended)
        if _order(earlier)[0] == slot.steps:
            name = f"{slot.steps:012d}.{_order(earlier)[1] + 1}"
    temporary = room / f".{name}.{os.getpid()}.tmp"
    temporary.mkdir()
    try:
        arrays: Arrays = {"weights": slot.weights, "moments": slot.moments}
        arrays |= {f"optimizer.{k}": v for k, v in slot.optimizer.items()}
        write_part(temporary / "store.safetensors", {}, arrays)
        for file in workers:
            write_file(temporary / file.name, file.read_bytes())
        files = {f.name: _digest(f.read_bytes()) for f in sorted(temporary.iterdir())}
        header = {h.name.lower(): int(slot.header[h]) for h in Header if h is not Header.CHECKSUM}
        whole = {"format": FORMAT, **header, **state, "files": files}
        whole["checksum"] = _digest(json.dumps(whole).encode())
        write_file(temporary / "state.json", json.dumps(whole, indent=1).encode())
        sync_directory(temporary)
        final = room / name
        os.replace(temporary, final)
        sync_directory(room)
    except OSError:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    for file in workers:
        file.unlink(missing_ok=True)
    for old in found(directory)[:-keep]:
        shutil.rmtree(old, ignore_errors=True)
    return final


def sync_directory(path: Path) -> None:
    """Make names in a directory durable."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sweep(directory: Path) -> None:
    """Remove what a kill during an earlier save left."""
    for stale in (directory / "checkpoints").glob(".*.tmp"):
        shutil.rmtree(stale, ignore_errors=True)


def _digest(data: bytes) -> str:
    return blake2b(data, digest_size=16).hexdigest()


def found(directory: Path) -> list[Path]:
    """Checkpoints of a run, oldest first."""
    room = (directory / "checkpoints").glob("[0-9]*")
    return sorted((p for p in room if p.is_dir() and p.name.replace(".", "").isdigit()), key=_order)


def _order(checkpoint: Path) -> tuple[int, int]:
    """(steps, how often that step had been saved before)."""
    steps, _, again = checkpoint.name.partition(".")
    return int(steps), int(again or 0)


class Loaded:
    """A verified checkpoint: `state` (JSON values), `arrays` of the store, `workers` (files by index)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.passed_over: list[tuple[Path, str]] = []  # newer ones that are damaged, and how
        try:
            self.state: dict[str, Any] = json.loads((path / "state.json").read_text())
        except (OSError, ValueError) as e:
            raise ConfigError(f"{path}: no readable state.json ({e})") from None
        if not isinstance(self.state, dict):
            raise ConfigError(f"{path / 'state.json'}: damaged")
        if self.state.get("format") != FORMAT:
            raise ConfigError(f"{path}: format {self.state.get('format')!r}, this version reads {FORMAT}")
        checksum = self.state.pop("checksum", None)
        if checksum != _digest(json.dumps(self.state).encode()):
            raise ConfigError(f"{path / 'state.json'}: damaged")
        for name, digest in self.state["files"].items():
            file = path / name
            if not file.is_file() or _digest(file.read_bytes()) != digest:
                raise ConfigError(f"{file}: missing or damaged")
        _, self.arrays = read_part(path / "store.safetensors")
        self.workers = {int(f.stem): f for f in path.glob("*.state")}

    def fill(self, slot: Slot) -> None:
        """Put weights, optimizer state, moments and counters into a slot.

        Raises:
            ConfigError: they are of another network or optimizer.
        """
        targets: Arrays = {"weights": slot.weights, "moments": slot.moments}
        targets |= {f"optimizer.{k}": v for k, v in slot.optimizer.items()}
        for name, target in targets.items():
            source = self.arrays.get(name)
            if source is None or source.shape != target.shape:
                have = None if source is None else source.shape
                raise ConfigError(
                    f"{self.path}: {name} has shape {have}, the run needs {target.shape}: "
                    "network, optimizer and normalization must be those it was trained with"
                )
            target[:] = source
        for h in Header:
            if h is not Header.CHECKSUM:
                slot.header[h] = self.state[h.name.lower()]


def newest(directory: Path) -> Loaded:
    """The newest checkpoint that is whole; damaged ones are passed over.

    Raises:
        ConfigError: there is none.
    """
    problems: list[tuple[Path, str]] = []
    for path in reversed(found(directory)):
        try:
            loaded = Loaded(path)
        except ConfigError as e:
            problems.append((path, str(e)))
        else:
            loaded.passed_over = problems
            return loaded
    why = f": {'; '.join(text for _, text in problems)}" if problems else ""
    what = "no whole checkpoint" if directory.is_dir() else "no such run directory"
    raise ConfigError(f"{directory}: {what}{why}")
