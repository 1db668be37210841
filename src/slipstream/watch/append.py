"""A file that grows by whole records, for one writer: where there is no room for one, no half stays behind."""

from __future__ import annotations

import errno
import os
from pathlib import Path


class Appender:
    """Adds records to a file; each is there at once or not at all."""

    def __init__(self, path: Path) -> None:
        self.fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def add(self, record: bytes) -> None:
        """Append a record.

        Raises:
            OSError: such as a full disk; the file is as it was.
        """
        size, written = os.fstat(self.fd).st_size, 0
        try:
            written = os.write(self.fd, record)
        finally:
            if written < len(record):
                os.ftruncate(self.fd, size)
        if written < len(record):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def close(self) -> None:
        """Close the file."""
        os.close(self.fd)
