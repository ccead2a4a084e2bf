"""How many files a process may have open at once, its connections among them."""

import contextlib
import resource
from typing import Final

FILES_MIN: Final = 64
"""With fewer a service cannot start, or has none left for a connection."""


def raise_limit() -> str:
    """Raises the limit as far as the system lets us; returns what to say if that is too low.

    The usual soft limit of 1,024 is far below the hard one; a turn takes two connections.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= FILES_MIN:
        return ""
    return (
        f"only {soft} files may be open at once, and {FILES_MIN} are the least; raise the limit:"
        " ulimit -n, or LimitNOFILE of the unit"
    )
