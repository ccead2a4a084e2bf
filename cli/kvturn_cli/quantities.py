"""Times, counts and sizes as people read them. "-" stands for what is not known."""

UNKNOWN = "-"
_MINUTE_S = 60
_HOUR_S = 60 * _MINUTE_S
_DAY_S = 24 * _HOUR_S


def span(seconds: float | None) -> str:
    """Returns a time, to two digits or so: "0.4 s", "42 s", "12 min", "5 h", "3 d"."""
    if seconds is None:
        return UNKNOWN
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    for unit_s, name, below in ((1, "s", 2 * _MINUTE_S), (_MINUTE_S, "min", 2 * _HOUR_S)):
        if seconds < below:
            return f"{seconds / unit_s:.0f} {name}"
    if seconds < 2 * _DAY_S:
        return f"{seconds / _HOUR_S:.0f} h"
    return f"{seconds / _DAY_S:,.0f} d"


def count(number: int | None) -> str:
    """Returns a number: "12,345"."""
    return UNKNOWN if number is None else f"{number:,}"


def milliseconds(span_ms: float | None, digits: int = 0) -> str:
    """Returns a time without its unit."""
    return UNKNOWN if span_ms is None else f"{span_ms:,.{digits}f}"


def megabytes(size: int | None) -> str:
    """Returns a number of bytes in MB, without the unit."""
    return UNKNOWN if size is None else f"{size / 1e6:,.1f}"


def share(part: int, whole: int) -> str:
    """Returns a part in percent, "-" of nothing."""
    return f"{100 * part / whole:.0f}%" if whole else UNKNOWN
