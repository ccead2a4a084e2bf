"""The clock of the lease rules."""

import time


def boottime_ns() -> int:
    """Returns CLOCK_BOOTTIME: it goes on while the machine is suspended, unlike CLOCK_MONOTONIC.

    What it says never leaves this machine.
    """
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)
