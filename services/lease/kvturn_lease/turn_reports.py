"""The latest turns of conversations, as routers reported them: packed, and bounded over all."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvturn_lease.conversation import ConversationKey

REPORTS_MAX = 16
"""Reports of one conversation that are kept."""
REPORTS_BYTES_MAX = 64 * 1024 * 1024
"""Bytes over all conversations, with what it takes to keep them."""
_SEQUENCE_BYTES = 8
_CONVERSATION_BYTES = 400
"""About what a conversation takes besides its reports."""
_REPORT_BYTES = 41
"""What a report takes besides its bytes."""


class TurnReports:
    """Reports by conversation; the conversation longest without a new one is forgotten first."""

    def __init__(self, bytes_max: int = REPORTS_BYTES_MAX) -> None:
        assert bytes_max > 0
        self._bytes_max = bytes_max
        self._bytes = 0
        self._sequence = 0
        self._reports: OrderedDict[ConversationKey, tuple[bytes, ...]] = OrderedDict()

    def __len__(self) -> int:
        """Conversations with a report."""
        return len(self._reports)

    def add(self, key: ConversationKey, report: bytes) -> None:
        """Keeps the report of a conversation's latest turn, serialized."""
        self._sequence += 1
        # The sequence in front: so those of several conversations sort by age.
        numbered = self._sequence.to_bytes(_SEQUENCE_BYTES, "big") + report
        self._bytes += len(numbered) + _REPORT_BYTES
        reports = self._reports.get(key)
        if reports is None:
            self._reports[key] = (numbered,)
            self._bytes += _CONVERSATION_BYTES
        else:
            if len(reports) == REPORTS_MAX:
                self._bytes -= len(reports[0]) + _REPORT_BYTES
                reports = reports[1:]
            self._reports[key] = (*reports, numbered)
            self._reports.move_to_end(key)
        while self._bytes > self._bytes_max:
            _, forgotten = self._reports.popitem(last=False)
            self._bytes -= _CONVERSATION_BYTES
            self._bytes -= sum(len(each) + _REPORT_BYTES for each in forgotten)

    def latest(self, keys: Iterable[ConversationKey]) -> list[tuple[ConversationKey, bytes]]:
        """Returns the latest reports of conversations together, the oldest first."""
        found = [(report, key) for key in keys for report in self._reports.get(key, ())]
        found.sort()
        return [(key, report[_SEQUENCE_BYTES:]) for report, key in found[-REPORTS_MAX:]]
