"""`schedule.bin`: the global order of pulls and applies, from which a run can be executed again.

One entry a contribution, written under the store's lock before the tick that it belongs to is
published. A worker killed in between leaves an entry beyond the published count, which the next
writer overwrites: the record and the weights can never disagree.
"""

from __future__ import annotations

import os
import struct
from enum import IntEnum
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from slipstream.errors import ConfigError

ENTRY = np.dtype(
    [
        ("tick", "<i8"),  # the tick this entry made (entries of one `sync` round share it)
        ("pulled", "<i8"),  # the tick whose weights the worker had
        ("version", "<i8"),  # version after the tick
        ("steps", "<i8"),  # global environment steps after the tick
        ("checksum", "<u8"),  # of the weights after the tick, 0: not taken
        ("loss", "<f8"),  # of the rollout, and the norm of its gradient before clipping: fingerprints
        ("norm", "<f8"),
        ("rollout", "<u4"),  # number of the rollout in its incarnation
        ("worker", "<u2"),
        ("incarnation", "<u2"),
        ("kind", "<u1"),
        ("spare", "<u1", (7,)),
    ]
)
PACKED = struct.Struct("<qqqqQddIHHB7x")  # one ENTRY: filling an array's fields takes 20 times as long
MAGIC = b"SLIPREC1"
HEADER = 64


class Kind(IntEnum):
    """What happened to a contribution."""

    APPLIED = 1
    DROPPED = 2  # its gradient was not finite


class Recorder:
    """Writes entries of `schedule.bin` by position. One a process or thread; needs no lock of its own."""

    def __init__(self, path: str | Path) -> None:
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        if os.fstat(self.fd).st_size < HEADER:
            os.pwrite(self.fd, MAGIC.ljust(HEADER, b"\0"), 0)

    def write(self, index: int, entries: bytes) -> None:
        """Put packed entries at positions `index`, `index + 1`, …

        Raises:
            OSError: not all could be written; may be tried again.
        """
        rest, at = memoryview(entries), HEADER + index * ENTRY.itemsize
        while rest:  # a nearly full disk takes a part without complaint
            done = os.pwrite(self.fd, rest, at)
            rest, at = rest[done:], at + done

    def truncate(self, count: int) -> None:
        """Forget everything after the first `count` entries (a resume from an older checkpoint)."""
        os.ftruncate(self.fd, HEADER + count * ENTRY.itemsize)

    def close(self) -> None:
        """Close the file."""
        os.close(self.fd)


def read(path: str | Path, count: int | None = None) -> NDArray[np.void]:
    """The first `count` entries of a record (all of them by default).

    Raises:
        ConfigError: the file is missing, is no record, or is shorter than `count` entries.
    """
    file = Path(path)
    if not file.exists():
        raise ConfigError(f"{file}: this run was not recorded (record: false, or rule hogwild)")
    raw = file.read_bytes()
    if raw[: len(MAGIC)] != MAGIC or len(raw) < HEADER:
        raise ConfigError(f"{file}: not a schedule record")
    whole = (len(raw) - HEADER) // ENTRY.itemsize
    if count is not None and whole < count:
        raise ConfigError(f"{file}: holds {whole} entries, the run made {count}; the file is damaged")
    return np.frombuffer(raw, ENTRY, whole if count is None else count, HEADER)
