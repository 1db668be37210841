"""Entry of the `slipstream` command: starts the launcher before anything slow is imported."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Run the command line."""
    arguments = sys.argv[1:]
    launcher = None
    if arguments[:1] == ["replay"]:
        from slipstream.cores import SINGLE_THREADED

        os.environ.update(SINGLE_THREADED)  # before NumPy and torch are loaded: the same sums as in the workers
    elif arguments[:1] in (["train"], ["resume"]) and not {"-h", "--help"} & set(arguments):
        from slipstream.supervise import Launcher

        if sys.platform == "linux":
            launcher = Launcher()  # imports torch while options are read here
    from slipstream.cli import run

    sys.exit(run(arguments, launcher))


if __name__ == "__main__":
    main()
