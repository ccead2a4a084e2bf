"""What SIGHUP does to a service.

It has two senses. A terminal that goes sends it to what was started there: that ends in order, as
with SIGTERM. Operators send it to daemons so that they read their files again: services do that by
themselves (`watched.py`), so it must not end one that has no terminal.
"""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


def on_hangup(stop: Callable[[], object]) -> None:
    """Has SIGHUP call `stop` if this process has a terminal, and change nothing if not.

    What ignores it already, as under `nohup`, goes on doing so. Call it in the main thread.
    """
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        return
    # Not SIG_IGN, which processes that this one starts would inherit.
    handler = (lambda *_: stop()) if _has_terminal() else (lambda *_: None)
    signal.signal(signal.SIGHUP, handler)


def _has_terminal() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True
