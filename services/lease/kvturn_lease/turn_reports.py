"""The latest turns of conversations, as routers reported them: packed, and bounded over all."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvturn_lease.conversation import ConversationKey

REPORTS_MAX = 16
"""Reports of one conversation that are kept."""
REPORTS_BYTES_MAX = 64 * 1024 * 1024
"""Bytes over all conversations, with what it takes to keep them."""
_STAMP_BYTES = 8
_CONVERSATION_BYTES = 400
"""About what a conversation takes besides its reports."""
_REPORT_BYTES = 41
"""What a report takes besides its bytes."""


class KeptReport(NamedTuple):
    """A report that was kept."""

    came_ns: int
    """When it came."""
    report: bytes
    """As it was added."""


class TurnReports:
    """Reports by conversation; the conversation longest without a new one is forgotten first."""

    def __init__(self, bytes_max: int = REPORTS_BYTES_MAX) -> None:
        assert bytes_max > 0
        self._bytes_max = bytes_max
        self._bytes = 0
        self._stamp_ns = 0
        self._reports: OrderedDict[ConversationKey, tuple[bytes, ...]] = OrderedDict()

    def __len__(self) -> int:
        """Conversations with a report."""
        return len(self._reports)

    def add(self, key: ConversationKey, report: bytes, now_ns: int) -> None:
        """Keeps the report of a conversation's latest turn, serialized."""
        # In front, and no two the same: so those of several conversations sort by age.
        self._stamp_ns = max(now_ns, self._stamp_ns + 1)
        stamped = self._stamp_ns.to_bytes(_STAMP_BYTES, "big") + report
        self._bytes += len(stamped) + _REPORT_BYTES
        reports = self._reports.get(key)
        if reports is None:
            self._reports[key] = (stamped,)
            self._bytes += _CONVERSATION_BYTES
        else:
            if len(reports) == REPORTS_MAX:
                self._bytes -= len(reports[0]) + _REPORT_BYTES
                reports = reports[1:]
            self._reports[key] = (*reports, stamped)
            self._reports.move_to_end(key)
        while self._bytes > self._bytes_max:
            _, forgotten = self._reports.popitem(last=False)
            self._bytes -= _CONVERSATION_BYTES
            self._bytes -= sum(len(each) + _REPORT_BYTES for each in forgotten)

    def latest(self, keys: Iterable[ConversationKey]) -> list[tuple[ConversationKey, KeptReport]]:
        """Returns the latest reports of conversations together, the oldest first."""
        found = [(report, key) for key in keys for report in self._reports.get(key, ())]
        found.sort()
        return [(key, _unpacked(report)) for report, key in found[-REPORTS_MAX:]]

    def newest(self, key: ConversationKey) -> KeptReport | None:
        """Returns the latest report of a conversation, None if there is none."""
        reports = self._reports.get(key)
        return None if reports is None else _unpacked(reports[-1])


def _unpacked(stamped: bytes) -> KeptReport:
    return KeptReport(int.from_bytes(stamped[:_STAMP_BYTES], "big"), stamped[_STAMP_BYTES:])
