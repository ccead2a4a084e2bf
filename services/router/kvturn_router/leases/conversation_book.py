"""What a router remembers of the conversations that it has seen lately.

A hundred thousand conversations of up to 64 turns each: as Python objects a
turn would take 400 bytes, here it takes 78; and a record that is one `bytes`
object costs the garbage collector nothing. Nothing here does I/O.
"""

from collections import OrderedDict
from itertools import islice
from struct import Struct
from struct import error as StructError
from typing import Final

from kvturn.span_wire import SPAN_NAME_BYTES, TRACE_ID_BYTES
from kvturn_router.request.conversation import ConversationEntry, ConversationKey, TurnReport
from kvturn_router.verdict import Verdict

REPORTS_MAX: Final = 64
"""Turns remembered per conversation."""

_LOOKED_AT_MAX: Final = 10_000
"""Conversations that one list of some of them looks through."""

_head: Final = Struct(f"<Q{SPAN_NAME_BYTES}s")  # turns, and what names the latest one's span
_turn: Final = Struct(f"<HHHHHIIIIIIIIIQ{TRACE_ID_BYTES}s")
_NO_SPAN: Final = bytes(SPAN_NAME_BYTES)
_NO_TRACE: Final = bytes(TRACE_ID_BYTES)
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

    def begin_turn(self, key: ConversationKey, span: bytes = b"") -> tuple[int, bytes]:
        """Counts a turn that begins; returns its number, from 1, and the span to link to.

        `span` names the turn's own (`Span.name_bytes`), empty if it is not recorded. The other is
        that of the latest turn before it that was recorded; empty if one of them was not.
        """
        record = self._records.get(key)
        if record is None:
            self._records[key] = _head.pack(1, span or _NO_SPAN)
            if len(self._records) > self._conversations_max:
                self._records.popitem(last=False)
            return 1, b""
        turns, previous = _head.unpack_from(record)
        self._records[key] = _head.pack(turns + 1, span or previous) + record[_head.size :]
        self._records.move_to_end(key)
        return turns + 1, previous if span and previous != _NO_SPAN else b""

    def end_turn(self, key: ConversationKey, report: TurnReport) -> None:
        """Remembers how a turn was served; of its plan's reason the words, without the numbers."""
        record = self._records.get(key)
        if record is None:
            return
        kept = record[_head.size :][-(REPORTS_MAX - 1) * _turn.size :]
        self._records[key] = record[: _head.size] + kept + self._log.written(report)

    def reports(self, key: ConversationKey) -> list[TurnReport] | None:
        """Returns the latest turns, oldest first; None if the conversation is not known."""
        record = self._records.get(key)
        return None if record is None else self._log.read(record[_head.size :])

    def latest(
        self, limit: int, *, tenant: str | None, model: str | None
    ) -> tuple[list[ConversationEntry], int]:
        """Returns at most `limit` conversations, the latest first, and how many there are.

        `tenant` and `model` are those wanted, None for any; of those only the
        latest `_LOOKED_AT_MAX` conversations are looked through.
        """
        if tenant is None and model is None:
            keys = list(islice(reversed(self._records), limit))
            return [self._entry(key) for key in keys], len(self._records)
        keys = [
            key
            for key in islice(reversed(self._records), _LOOKED_AT_MAX)
            if tenant in (None, key.tenant) and model in (None, key.model)
        ]
        return [self._entry(key) for key in keys[:limit]], len(keys)

    def _entry(self, key: ConversationKey) -> ConversationEntry:
        record = self._records[key]
        reports = self._log.read(record[_head.size :][-_turn.size :])
        turns = int(_head.unpack_from(record)[0])
        return ConversationEntry(*key, turns=turns, latest_turn=reports[-1] if reports else None)


class _Words(dict[str, int]):
    """Verdicts, plans, reasons and engines, numbered as they come; those beyond its end are ""."""

    def __init__(self) -> None:
        self.spelt = ["", *(verdict.value for verdict in Verdict)]
        super().__init__((word, number) for number, word in enumerate(self.spelt))

    def __missing__(self, word: str) -> int:
        if len(self.spelt) == _WORDS_MAX:
            return 0
        self[str(word)] = len(self.spelt)
        self.spelt.append(str(word))
        return self[word]


class _TurnLog:
    """Writes and reads the reports of turns, one after the other.

    Times are kept in microseconds, up to 4,294 s. What reuse saved is not kept:
    without a lease service nothing is learned that would tell it.
    """

    def __init__(self) -> None:
        self._words = _Words()

    def written(self, report: TurnReport) -> bytes:
        """Returns a log of one turn."""
        words = self._words
        told = (
            words[report.verdict],
            words[report.plan],
            words[report.prefill_engine],
            words[report.decode_engine],
            words[_words_of(report.plan_reason)],
            report.turn,
            report.prompt_tokens,
            report.reused_tokens,
            report.local_tokens,
            report.output_tokens,
            int(report.prefill_ms * 1000 + 0.5),
            int(report.read_ms * 1000 + 0.5),
            int(report.first_byte_ms * 1000 + 0.5),
            int(report.total_ms * 1000 + 0.5),
        )
        trace = bytes.fromhex(report.trace_id)
        try:
            return _turn.pack(*told, report.read_bytes, trace)
        except StructError:
            cut = [min(number, _UINT32_MAX) for number in told]
            return _turn.pack(*cut, report.read_bytes, trace)

    def read(self, log: bytes) -> list[TurnReport]:
        """Returns the turns of a log."""
        return [self._report(*fields) for fields in _turn.iter_unpack(log)]

    def _report(
        self,
        verdict: int,
        plan: int,
        prefill_engine: int,
        decode_engine: int,
        plan_reason: int,
        turn: int,
        prompt_tokens: int,
        reused_tokens: int,
        local_tokens: int,
        output_tokens: int,
        prefill_us: int,
        read_us: int,
        first_byte_us: int,
        total_us: int,
        read_bytes: int,
        trace: bytes,
    ) -> TurnReport:
        spelt = self._words.spelt
        return TurnReport(
            turn=turn,
            verdict=Verdict(spelt[verdict]),
            prompt_tokens=prompt_tokens,
            reused_tokens=reused_tokens,
            local_tokens=local_tokens,
            prefill_ms=prefill_us / 1000,
            read_ms=read_us / 1000,
            read_bytes=read_bytes,
            plan=spelt[plan],
            first_byte_ms=first_byte_us / 1000,
            output_tokens=output_tokens,
            prefill_engine=spelt[prefill_engine],
            decode_engine=spelt[decode_engine],
            plan_reason=spelt[plan_reason],
            total_ms=total_us / 1000,
            trace_id="" if trace == _NO_TRACE else trace.hex(),
        )


def _words_of(reason: str) -> str:
    return " ".join(word for word in reason.split() if "=" not in word)
