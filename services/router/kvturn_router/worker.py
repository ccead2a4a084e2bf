"""One worker of a router with several, started by `workers.py` alone.

`python -m kvturn_router.worker PARENT NUMBER FLAGS`: a router that shares its ports, names its
number in its log, and ends in order when the process PARENT is gone, whichever way that went.
"""

import ctypes
import os
import signal
import sys
from typing import Final

from kvturn_router.__main__ import EXIT_FAILED, run

_PR_SET_PDEATHSIG: Final = 1


def main() -> int:
    """Runs until told to end, or until the parent is gone. Returns the exit code."""
    parent, number, *flags = sys.argv[1:]
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(parent):
        return EXIT_FAILED  # It went before we could ask to be told.
    return run(flags, int(number))


if __name__ == "__main__":
    sys.exit(main())
