"""`log.jsonl`: one log of all workers and the parent, ordered by one clock.

Each line is one `write` to a file opened for appending, so lines of several processes never mix and nothing
is lost with a process that dies. Logging never ends a run: a full disk loses lines, not training.
"""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any


class Log:
    """Writes lines `{time, clock, worker, level, message, ...}`; `clock` is monotonic seconds of this machine."""

    def __init__(self, directory: Path, worker: int | None = None) -> None:
        self.path, self.worker = directory / "log.jsonl", worker
        self.fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def __call__(self, level: str, message: str, **fields: Any) -> None:
        """Write one line. `level`: info, warning or error."""
        line = {"time": round(time.time(), 3), "clock": round(time.monotonic(), 6), "worker": self.worker}
        text = json.dumps({**line, "level": level, "message": message, **fields}, default=str)
        with suppress(OSError):
            os.write(self.fd, (text + "\n").encode())

    def close(self) -> None:
        """Close the file."""
        with suppress(OSError):
            os.close(self.fd)


def read(directory: Path) -> list[dict[str, Any]]:
    """Every line of a run's log in the order of its clock; a line cut off by a kill is left out."""
    lines = []
    for text in (directory / "log.jsonl").read_text().splitlines():
        with suppress(json.JSONDecodeError):
            lines.append(json.loads(text))
    # stable: lines of one run part keep their order (the clock begins anew with a reboot)
    return sorted(lines, key=lambda line: line["clock"])
