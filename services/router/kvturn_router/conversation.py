"""Which conversation a turn belongs to, and what the router remembers of each.

A conversation is named by (tenant, model, conversation id). The id is the
client's, from the first of: body `conversation_id`, header `X-Conversation-Id`,
body `session_id`, body `prompt_cache_key`. Where there is none the caller mints
one. Nothing here does I/O.
"""

from collections import OrderedDict
from typing import NamedTuple
from urllib.parse import quote

from kvturn_router.body import Members, given_string
from kvturn_router.errors import bad_field
from kvturn_router.verdict import Verdict

NAME_BYTES_MAX = 256
"""Longest tenant, model or conversation id, in bytes of UTF-8."""

ABSENCE_S_MIN = 0.001
ABSENCE_S_MAX = 24 * 3600
"""Longest absence that a client may declare; the lease service cuts it to its longest hold."""

REPORTS_MAX = 64
"""Turns remembered per conversation."""

_VISIBLE = "".join(chr(code) for code in range(0x21, 0x7F) if chr(code) != "%")


class ConversationKey(NamedTuple):
    """Names a conversation; all three parts are needed."""

    tenant: str
    model: str
    conversation_id: str


class TurnReport(NamedTuple):
    """How one turn was served.

    Token counts are 0 where not known; times are in milliseconds.
    """

    turn: int
    verdict: Verdict
    prompt_tokens: int
    reused_tokens: int
    local_tokens: int
    prefill_ms: float
    read_ms: float
    read_bytes: int


def conversation_id_of(members: Members, header: str | None) -> str | None:
    """Returns the id the client gave, or None if it gave none.

    `header` is the value of X-Conversation-Id, None if not sent. Raises
    TurnError 400 naming the field that holds no string of 1 to 256 bytes.
    """
    named = given_string(members, "conversation_id")
    if named is not None:
        return checked_name("conversation_id", named)
    if header is not None:
        return checked_name("X-Conversation-Id", header)
    for name in ("session_id", "prompt_cache_key"):
        named = given_string(members, name)
        if named is not None:
            return checked_name(name, named)
    return None


def checked_name(field: str, name: str) -> str:
    """Returns the name; raises TurnError 400 naming `field` if its length is out of range."""
    size = len(name.encode())
    if not 1 <= size <= NAME_BYTES_MAX:
        raise bad_field(field, f"{field} must have 1 to {NAME_BYTES_MAX} bytes, not {size}.")
    return name


def checked_absence_s(field: str, absence_s: float) -> float:
    """Returns the absence; raises TurnError 400 naming `field` if it is out of range."""
    # Written so that NaN, too, is out of range.
    if not ABSENCE_S_MIN <= absence_s <= ABSENCE_S_MAX:
        raise bad_field(field, f"{field} must be {ABSENCE_S_MIN} to {ABSENCE_S_MAX} seconds.")
    return absence_s


def header_value(name: str) -> bytes:
    """Returns a name as a header value: percent-encoded where not visible ASCII."""
    return quote(name, safe=_VISIBLE).encode()


class _Record:
    __slots__ = ("ended_ns", "reports", "turns")

    def __init__(self) -> None:
        self.turns = 0
        self.reports: list[TurnReport] = []
        # When the last turn that decode retained ended; 0 if none did.
        self.ended_ns = 0


class ConversationBook:
    """The conversations that this router has seen lately, least recent forgotten first.

    `conversations_max` is at least 1.
    """

    def __init__(self, conversations_max: int) -> None:
        assert conversations_max >= 1
        self._conversations_max = conversations_max
        self._records: OrderedDict[ConversationKey, _Record] = OrderedDict()

    def __len__(self) -> int:
        return len(self._records)

    def begin_turn(self, key: ConversationKey) -> int:
        """Counts a turn that begins; returns its number, from 1."""
        record = self._records.get(key)
        if record is None:
            record = self._records[key] = _Record()
            if len(self._records) > self._conversations_max:
                self._records.popitem(last=False)
        else:
            self._records.move_to_end(key)
        record.turns += 1
        return record.turns

    def end_turn(self, key: ConversationKey, report: TurnReport, retained_ns: int) -> None:
        """Remembers how a turn was served.

        `retained_ns` is now if decode retains the turn's KV, else 0.
        """
        record = self._records.get(key)
        if record is None:
            return
        record.reports.append(report)
        if len(record.reports) > REPORTS_MAX:
            del record.reports[0]
        record.ended_ns = retained_ns

    def retained_turn(self, key: ConversationKey, since_ns: int) -> int:
        """Returns the latest turn, if decode retains it and it ended after `since_ns`; else 0."""
        record = self._records.get(key)
        if record is None or not record.reports or record.ended_ns <= since_ns:
            return 0
        return record.reports[-1].turn

    def reports(self, key: ConversationKey) -> list[TurnReport] | None:
        """Returns the latest turns, oldest first; None if the conversation is not known."""
        record = self._records.get(key)
        return None if record is None else list(record.reports)
