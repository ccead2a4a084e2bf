"""A lease: the time-bounded right to read what a decode engine retains."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

from kvturn_lease.deadline_queue import NEVER_NS
from kvturn_lease.verdict import ReleaseReason

if TYPE_CHECKING:
    from kvturn_lease.conversation import Conversation, ConversationKey
    from kvturn_lease.session import Engine


class LeaseId(NamedTuple):
    """Names a lease, for ever: the session number changes whenever its engine registers."""

    incarnation: str
    number: int
    """Retention number, unique within the incarnation."""
    session_number: int

    def __str__(self) -> str:
        return f"{self.incarnation}.{self.number}.{self.session_number}"


class LeaseState(IntEnum):
    """What can be done with a lease now; numbered as in lease.proto."""

    ACTIVE = 1
    READING = 2
    ENDING = 3


class Outlook(IntEnum):
    """Whether a lease's conversation will go on; numbered as in lease.proto."""

    NORMAL = 1
    EXPECTED = 2
    """A turn is in flight, or the client said that it will be back."""
    IDLE = 3
    """Not back within what its client said, and kept all the same."""


@dataclass(frozen=True, slots=True)
class Retention:
    """A retention as an engine announces it."""

    lease_id: LeaseId
    conversation: ConversationKey
    token_count: int
    block_count: int
    """Blocks over all KV cache groups."""
    turn: int
    """Turn number as the router counted it; 0 when not known."""
    payload: bytes
    """Block ids and digests for the reader; the core hands them out and never looks inside."""
    prompt_tokens: int = 0
    """Tokens of the prompt of the turn that left it; 0 when not known."""
    local_cached_tokens: int = 0
    """Prompt tokens that decode found in its own prefix cache."""
    history: bytes = b""
    """Digest of the history that turn was asked with; empty when not known."""


class Lease:
    """One lease, held by its engine and, until it ends, by its conversation."""

    __slots__ = (
        "block_count",
        "conversation",
        "end_reason",
        "engine",
        "granted_ns",
        "history",
        "inherit_until_ns",
        "number",
        "outlook",
        "payload",
        "prompt_tokens",
        "read_ns",
        "read_open",
        "read_session_number",
        "timer_ns",
        "token_count",
        "turn",
    )

    def __init__(
        self, engine: Engine, conversation: Conversation, retention: Retention, now_ns: int
    ) -> None:
        self.engine = engine
        self.conversation = conversation
        self.number = retention.lease_id.number
        self.token_count = retention.token_count
        self.block_count = retention.block_count
        self.turn = retention.turn
        self.prompt_tokens = retention.prompt_tokens
        self.history = retention.history
        self.payload = retention.payload
        self.granted_ns = now_ns
        """When it was granted or inherited; its longest hold counts from here."""
        self.inherit_until_ns = 0
        """Until when a reader of an earlier term may remain; 0 if none ever could."""
        self.read_ns = 0
        self.read_session_number = 0
        """When and under which session number its one read began; 0 if it did not."""
        self.read_open = False
        """The read may still be going on."""
        self.end_reason = ReleaseReason.NONE
        self.outlook = Outlook.NORMAL
        """What its engine knows, or will with the next acknowledgement."""
        self.timer_ns = NEVER_NS

    @property
    def begun(self) -> bool:
        """True for ever once its one read was granted."""
        return self.read_session_number != 0

    @property
    def ended(self) -> bool:
        """True once it is no longer granted; a reader may remain."""
        return self.end_reason != ReleaseReason.NONE

    @property
    def state(self) -> LeaseState:
        """What can be done with it now."""
        if self.ended:
            return LeaseState.ENDING
        return LeaseState.READING if self.read_open else LeaseState.ACTIVE


@dataclass(frozen=True, slots=True)
class LeaseView:
    """A lease as shown to an operator; times are spans, in nanoseconds, as of now."""

    lease_id: LeaseId
    conversation: ConversationKey
    engine_id: str
    state: LeaseState
    end_reason: ReleaseReason
    token_count: int
    block_count: int
    age_ns: int
    idle_in_ns: int | None
    """Time until it becomes idle; None while a turn is in flight or it is not ACTIVE."""
    reading_for_ns: int | None
    """Time since its read began; None if no reader remains."""
