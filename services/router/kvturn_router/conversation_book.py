"""What a router remembers of the conversations that it has seen lately.

A hundred thousand conversations of up to 64 turns each: as Python objects a
turn would take 400 bytes, here it takes 56; and a record that is one `bytes`
object costs the garbage collector nothing. Nothing here does I/O.
"""

from collections import OrderedDict
from struct import Struct
from typing import Final

from kvturn_router.conversation import ConversationKey, TurnReport
from kvturn_router.verdict import Verdict

REPORTS_MAX: Final = 64
"""Turns remembered per conversation."""

_head: Final = Struct("<Q")  # turns
_turn: Final = Struct("<HHHHIIIIIIIIQ")
_UINT32_MAX: Final = (1 << 32) - 1
_WORDS_MAX: Final = 1 << 16


class ConversationBook:
    """The conversations that this router has seen lately, least recent forgotten first.

    `conversations_max` is at least 1.
    """

    def __init__(self, conversations_max: int) -> None:
        assert conversations_max >= 1
        self._conversations_max = conversations_max
        self._log = _TurnLog()
        # A head, then the latest turns as the log writes them.
        self._records: OrderedDict[ConversationKey, bytes] = OrderedDict()

    def __len__(self) -> int:
        return len(self._records)

    def begin_turn(self, key: ConversationKey) -> int:
        """Counts a turn that begins; returns its number, from 1."""
        record = self._records.get(key)
        if record is None:
            self._records[key] = _head.pack(1)
            if len(self._records) > self._conversations_max:
                self._records.popitem(last=False)
            return 1
        turns = int(_head.unpack_from(record)[0]) + 1
        self._records[key] = _head.pack(turns) + record[_head.size :]
        self._records.move_to_end(key)
        return turns

    def end_turn(self, key: ConversationKey, report: TurnReport) -> None:
        """Remembers how a turn was served; not the reason of its plan."""
        record = self._records.get(key)
        if record is None:
            return
        kept = record[_head.size :][-(REPORTS_MAX - 1) * _turn.size :]
        self._records[key] = record[: _head.size] + kept + self._log.written(report)

    def reports(self, key: ConversationKey) -> list[TurnReport] | None:
        """Returns the latest turns, oldest first; None if the conversation is not known."""
        record = self._records.get(key)
        return None if record is None else self._log.read(record[_head.size :])


class _TurnLog:
    """Writes and reads the reports of turns, one after the other.

    Times are kept in microseconds, up to 4,294 s. Verdicts, plans and engines
    are numbers in a list of words; of engines beyond its end the name is lost.
    """

    def __init__(self) -> None:
        self._words = ["", *(verdict.value for verdict in Verdict)]
        self._numbers = {word: number for number, word in enumerate(self._words)}

    def written(self, report: TurnReport) -> bytes:
        """Returns a log of one turn."""
        return _turn.pack(
            self._number(report.verdict),
            self._number(report.plan),
            self._number(report.prefill_engine),
            self._number(report.decode_engine),
            min(report.turn, _UINT32_MAX),
            min(report.prompt_tokens, _UINT32_MAX),
            min(report.reused_tokens, _UINT32_MAX),
            min(report.local_tokens, _UINT32_MAX),
            min(report.output_tokens, _UINT32_MAX),
            _microseconds(report.prefill_ms),
            _microseconds(report.read_ms),
            _microseconds(report.first_byte_ms),
            report.read_bytes,
        )

    def read(self, log: bytes) -> list[TurnReport]:
        """Returns the turns of a log."""
        return [self._report(*fields) for fields in _turn.iter_unpack(log)]

    def _report(
        self,
        verdict: int,
        plan: int,
        prefill_engine: int,
        decode_engine: int,
        turn: int,
        prompt_tokens: int,
        reused_tokens: int,
        local_tokens: int,
        output_tokens: int,
        prefill_us: int,
        read_us: int,
        first_byte_us: int,
        read_bytes: int,
    ) -> TurnReport:
        return TurnReport(
            turn=turn,
            verdict=Verdict(self._words[verdict]),
            prompt_tokens=prompt_tokens,
            reused_tokens=reused_tokens,
            local_tokens=local_tokens,
            prefill_ms=prefill_us / 1000,
            read_ms=read_us / 1000,
            read_bytes=read_bytes,
            plan=self._words[plan],
            first_byte_ms=first_byte_us / 1000,
            output_tokens=output_tokens,
            prefill_engine=self._words[prefill_engine],
            decode_engine=self._words[decode_engine],
        )

    def _number(self, word: str) -> int:
        number = self._numbers.get(word)
        if number is None:
            if len(self._words) == _WORDS_MAX:
                return 0
            number = self._numbers[word] = len(self._words)
            self._words.append(str(word))
        return number


def _microseconds(milliseconds: float) -> int:
    return min(round(milliseconds * 1000), _UINT32_MAX)
