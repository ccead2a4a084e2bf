"""One worker of a router with several, started by `workers.py` alone.

`python -m kvturn_router.worker PARENT NUMBER FOLDER FLAGS`: a router that shares its ports, names
its number in its log, tells the other workers its metrics in FOLDER ("" for not), and ends in order
when the process PARENT is gone, whichever way that went.
"""

import ctypes
import os
import signal
import sys
from pathlib import Path
from typing import Final

from kvturn_router.__main__ import EXIT_FAILED, run
from kvturn_router.worker_pages import WorkerPlace

_PR_SET_PDEATHSIG: Final = 1


def main() -> int:
    """Runs until told to end, or until the parent is gone. Returns the exit code."""
    parent, number, folder, *flags = sys.argv[1:]
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(parent):
        return EXIT_FAILED  # It went before we could ask to be told.
    return run(flags, WorkerPlace(int(number), Path(folder) if folder else None))


if __name__ == "__main__":
    sys.exit(main())
