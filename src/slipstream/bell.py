"""Waking a process that waits for another: instead of `sleep`, which takes 180 us for 50 and polls while it waits.

A ring is a hint and may be lost: who waits looks at the condition itself, again and again. It is an empty datagram to
an address without a file (Linux), so that nothing is left when a process is killed. Elsewhere waiting is sleeping.
"""

from __future__ import annotations

import os
import select
import socket
from contextlib import suppress
from time import sleep

LONGEST = 5e-3  # seconds of a wait: for what nobody rings (a stop, a pause, a worker found dead), and for lost rings
NAP = 50e-6  # without bells


class Bell:
    """One process's (or thread's) bell, and the means to ring those of the others at the same store."""

    def __init__(self, fd: int, mine: int) -> None:
        """`fd` is any descriptor of the store: all who ring each other have opened the same file."""
        status = os.fstat(fd)
        self.name = f"\0slipstream-{status.st_dev}-{status.st_ino}-"
        self.socket: socket.socket | None = None
        with suppress(OSError, AttributeError):  # no such addresses here, or another handle has this seat's
            self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            self.socket.setblocking(False)
            self.socket.bind(self.name + str(mine))
            self.heard = select.poll()
            self.heard.register(self.socket, select.POLLIN)
            return
        if self.socket is not None:
            self.socket.close()
            self.socket = None

    def wait(self) -> None:
        """Return when rung, and after a while anyway."""
        if self.socket is None:
            sleep(NAP)
        elif self.heard.poll(1000 * LONGEST):
            with suppress(BlockingIOError):
                self.socket.recv(1)

    def ring(self, seat: int) -> None:
        """Wake whoever has this seat, if anybody."""
        if self.socket is not None:
            with suppress(OSError):  # nobody there yet, or rung so often already that it is full
                self.socket.sendto(b"", self.name + str(seat))

    def close(self) -> None:
        """Give the address free."""
        if self.socket is not None:
            self.socket.close()
            self.socket = None
