"""Which conversation a turn belongs to, and what the router remembers of each.

A conversation is named by (tenant, model, conversation id). The id is the
client's, from body `conversation_id` or header `X-Conversation-Id`. A client
that gives neither may still give a scope, which many of its conversations can
share: body `session_id`, a session header as agents send it, or body
`prompt_cache_key`. Within it, or within none, the history that a turn extends
tells which conversation it is (history.py). Nothing here does I/O.
"""

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple
from urllib.parse import quote

import msgspec

from kvturn_router.errors import bad_field
from kvturn_router.request.body import Members, given_string
from kvturn_router.verdict import Verdict

NAME_BYTES_MAX = 256
"""Longest tenant, model or conversation id, in bytes of UTF-8."""

ABSENCE_S_MIN = 0.001
ABSENCE_S_MAX = 24 * 3600
"""Longest absence that a client may declare; the lease service cuts it to its longest hold."""

SESSION_HEADERS = (
    "x-session-id",
    "session-id",
    "session_id",
    "conversation_id",
    "x-claude-code-session-id",
    "x-litellm-session-id",
    "x-openclaw-session-id",
    "x-hermes-session-id",
    "x-qwen-code-session-id",
    "x-session-affinity",
    "x-opencode-session",
    "x-task-id",
)
"""Headers in which agents name their session, the most telling first."""

_session = re.compile(r"[\x21-\x7e]{1,256}")
_plain = re.compile(r"[\x21-\x24\x26-\x7e]+")
_VISIBLE = "".join(chr(code) for code in range(0x21, 0x7F) if chr(code) != "%")


class ConversationKey(NamedTuple):
    """Names a conversation; all three parts are needed."""

    tenant: str
    model: str
    conversation_id: str


class TurnReport(msgspec.Struct, frozen=True):
    """How one turn was served.

    Token counts are 0 where not known; times are in milliseconds. `plan` is a
    word of PlanKind, "" where not known, and `plan_reason` why it was chosen;
    engines are base URLs, "" for none. `total_ms` is from the request to the
    last byte of the answer, 0 before that; `saved_ms` what reuse saved until the
    first byte, as the cost model estimates it, None where nothing was reused or
    too little is known. `trace_id` has 32 hexadecimal digits, "" if the turn is
    not traced; `age_ms` is how long ago the turn ended, None where nobody has
    counted.
    """

    turn: int
    verdict: Verdict
    prompt_tokens: int
    reused_tokens: int
    local_tokens: int
    prefill_ms: float
    read_ms: float
    read_bytes: int
    plan: str = ""
    first_byte_ms: float = 0.0
    output_tokens: int = 0
    prefill_engine: str = ""
    decode_engine: str = ""
    plan_reason: str = ""
    total_ms: float = 0.0
    saved_ms: float | None = None
    trace_id: str = ""
    age_ms: float | None = None


class HeldRetention(msgspec.Struct, frozen=True):
    """What a decode engine retains of a conversation now.

    `kept_s` is for how long unless there is another sign of life, None while a
    turn is in flight, and where nothing but need ends it.
    """

    conversation_id: str
    engine_id: str
    token_count: int
    being_read: bool
    kept_s: float | None


class ConversationView(NamedTuple):
    """What is known of a conversation, or of those of a scope: the latest turns, oldest first,
    each with its conversation's id, and what is held."""

    turns: list[tuple[str, TurnReport]]
    held: list[HeldRetention]


class ConversationEntry(msgspec.Struct, frozen=True):
    """A conversation in a list of them.

    `turns` is the number of its latest turn, `quiet_s` the time since its last
    sign of life, None where nobody has counted. `engine_id` names who holds, or
    last held, its KV, "" if that is not known; `held_tokens` are held in all.
    """

    tenant: str
    model: str
    conversation_id: str
    turns: int
    turns_in_flight: int = 0
    quiet_s: float | None = None
    engine_id: str = ""
    held_tokens: int = 0
    latest_turn: TurnReport | None = None


class Naming(msgspec.Struct, frozen=True):
    """What a client named: a conversation, or else a scope, or "" for both."""

    conversation_id: str
    scope: str


def naming_of(members: Members, header: str | None, session: str) -> Naming:
    """Returns what a request names.

    `header` is the value of X-Conversation-Id, None if not sent, `session` the
    session header's, "" if none was sent. Raises TurnError 400 naming the field
    that is of a wrong kind, or a conversation id that has not 1 to 256 bytes.
    A scope is not the router's own field, so one that is too long is cut.
    """
    # All before any is used: each member's kind is checked, whatever the others say.
    named = given_string(members, "conversation_id")
    session_id = given_string(members, "session_id")
    cache_key = given_string(members, "prompt_cache_key")
    if named is not None:
        return Naming(checked_name("conversation_id", named), "")
    if header is not None:
        return Naming(checked_name("X-Conversation-Id", header), "")
    scope = session_id or session or cache_key or ""
    if len(scope) * 4 > NAME_BYTES_MAX:
        scope = scope.encode()[:NAME_BYTES_MAX].decode(errors="ignore")
    return Naming("", scope)


def session_of(headers: Mapping[str, str], names: Sequence[str]) -> str:
    """Returns the first session header's value that can be a scope, "" if there is none.

    That is 1 to 256 visible ASCII characters. `headers` have lower-case names.
    """
    for name in names:
        if name in headers and _session.fullmatch(headers[name]):
            return headers[name]
    return ""


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
    return name.encode() if _plain.fullmatch(name) else quote(name, safe=_VISIBLE).encode()
