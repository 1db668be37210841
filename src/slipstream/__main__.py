"""Entry of the `slipstream` command: starts the launcher before anything slow is imported."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any


def _leave(number: int, frame: Any) -> None:
    """Ctrl-C while modules are imported: nothing has begun."""
    os._exit(128 + number)


def _interrupt(number: int, frame: Any) -> None:
    """Ctrl-C and SIGTERM alike unwind the command; training has its own handler."""
    raise KeyboardInterrupt(signal.Signals(number).name)


def main() -> None:
    """Run the command line."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _leave)
    arguments = sys.argv[1:]
    launcher = None
    if arguments[:1] == ["replay"]:
        from slipstream.cores import SINGLE_THREADED

        os.environ.update(SINGLE_THREADED)  # before NumPy and torch are loaded: one thread, as in the workers
    elif arguments[:1] in (["train"], ["resume"]) and not {"-h", "--help"} & set(arguments):
        from slipstream.launch import Launcher

        if sys.platform == "linux":
            launcher = Launcher()  # imports torch while options are read here
    from slipstream.cli import run

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)
    code = run(arguments, launcher)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # everything is closed; taking down the imported libraries costs half a second


if __name__ == "__main__":
    main()
