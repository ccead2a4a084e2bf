"""What doctor says: one finding a check, with what was seen, why it matters and the fix."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class Severity(StrEnum):
    """How bad a finding is."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True)
class Finding:
    """One finding. What is in order has neither a reason nor a fix."""

    check: str
    """Name of the check, stable: "GROUP.NAME"."""
    severity: Severity
    """How bad it is."""
    seen: str
    """What was seen, with numbers."""
    why: str = ""
    """Why it matters, one sentence."""
    fix: str = ""
    """What to do: the flag, key or command."""

    @property
    def group(self) -> str:
        """What the check is about."""
        return self.check.partition(".")[0]


def ok(check: str, seen: str) -> Finding:
    """Returns a finding of what is in order."""
    return Finding(check, Severity.OK, seen)


def warning(check: str, seen: str, why: str, fix: str) -> Finding:
    """Returns a finding of what costs something, or may."""
    return Finding(check, Severity.WARNING, seen, why, fix)


def problem(check: str, seen: str, why: str, fix: str) -> Finding:
    """Returns a finding of what keeps reuse from happening, or turns from being served."""
    return Finding(check, Severity.PROBLEM, seen, why, fix)


def listed(items: Iterable[object], most: int = 6) -> str:
    """Returns items in one line, the first ones of many."""
    texts = [str(item) for item in items]
    more = len(texts) - most
    return ", ".join(texts[:most]) + (f" and {more} more" if more > 0 else "")


def counted(count: int, noun: str) -> str:
    """Returns a number with its noun: "1 engine", "2 engines"."""
    plural = f"{noun[:-1]}ies" if noun.endswith("y") and noun[-2:-1] not in "aeiou" else f"{noun}s"
    return f"{count:,} {noun if count == 1 else plural}"
