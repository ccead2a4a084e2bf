"""What is remembered of conversations: who holds them, and why the last retention ended."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from kvturn_lease.verdict import Verdict

if TYPE_CHECKING:
    from kvturn_lease.lease import Lease

TURNS_IN_FLIGHT_MAX = 1_000_000
TURN_MAX = (1 << 32) - 1
"""Highest number of a turn; all that follow have it, too. Only one that was made up is so high."""


class ConversationKey(NamedTuple):
    """Names a conversation; nobody reads another tenant's KV."""

    tenant: str
    model: str
    conversation_id: str


class Conversation:
    """One conversation. It outlives its leases, to answer why there is none.

    Invariant: `lease` is the one lease of the conversation that has not ended.
    """

    __slots__ = (
        "absence_ns",
        "alive_until_ns",
        "closed",
        "engine_id",
        "key",
        "last_incarnation",
        "last_number",
        "lease",
        "seen_ns",
        "told_in_flight",
        "traced",
        "turn",
        "turns_begun",
        "turns_in_flight",
        "verdict",
    )

    def __init__(self, key: ConversationKey) -> None:
        self.key = key
        self.lease: Lease | None = None
        self.verdict = Verdict.FIRST_TURN
        """Why there is no lease, or why the lease before `lease` ended."""
        self.engine_id = ""
        """Engine that holds or last held its KV."""
        self.last_incarnation = ""
        self.last_number = 0
        """The last ended retention, which `verdict` is about."""
        self.turn = 0
        """Turn of the newest retention that was announced; 0 when not known."""
        self.seen_ns = 0
        """When its last sign of life came, or its engine brought it; 0 if none has in this term."""
        self.alive_until_ns = 0
        """When it becomes idle unless a turn is in flight."""
        self.turns_begun = 0
        """Number of the latest turn that began; 0 if none did that was numbered."""
        self.traced = b""
        """Names the span of the latest turn that was recorded; empty if none was."""
        self.absence_ns = 0
        """What its client says, again and again, that it is away for at most; 0 if it does not.
        In place of the idle time if shorter, until the conversation has been idle once."""
        self.turns_in_flight = 0
        self.told_in_flight = 0
        """Of those, the ones of routers' sessions, which are over when they say so or end."""
        self.closed = False
        """The client ended it and no turn has begun since."""

    @property
    def retained(self) -> Lease | None:
        """Its lease if the engine that retains it is known to be there, else None."""
        lease = self.lease
        return lease if lease is not None and lease.engine.session is not None else None


@dataclass(frozen=True, slots=True)
class ConversationView:
    """A conversation as an operator sees it."""

    key: ConversationKey
    turns: int
    """Number of its latest turn, 0 if not known."""
    turns_in_flight: int
    quiet_ns: int | None
    """Time since its last sign of life, None if there was none in this term."""
    engine_id: str
    token_count: int
    block_count: int
    lease_count: int
    idle_in_ns: int | None
    """Time until it becomes idle, None if it does not, as things are, or retains nothing."""


class Conversations:
    """All conversations; of those without a lease only the latest used are kept."""

    def __init__(self, dormant_max: int) -> None:
        assert dormant_max > 0
        self._dormant_max = dormant_max
        self._held: dict[ConversationKey, Conversation] = {}
        self._dormant: OrderedDict[ConversationKey, Conversation] = OrderedDict()

    def __len__(self) -> int:
        return len(self._held) + len(self._dormant)

    def all(self) -> list[Conversation]:
        """Returns all that are known now, in no particular order."""
        # In the order of the dict below it: an OrderedDict looks up each of its keys to list them.
        return [*self._held.values(), *dict.values(self._dormant)]

    def get(self, key: ConversationKey) -> Conversation | None:
        """Returns a known conversation, and counts as a use of it."""
        conversation = self._held.get(key)
        if conversation is None:
            conversation = self._dormant.get(key)
            if conversation is not None:
                self._dormant.move_to_end(key)
        return conversation

    def add(self, key: ConversationKey) -> Conversation:
        """Adds a conversation that is not known yet, without a lease."""
        assert key not in self._held
        assert key not in self._dormant
        conversation = self._dormant[key] = Conversation(key)
        return conversation

    def hold(self, conversation: Conversation, lease: Lease) -> None:
        """Notes that `lease` holds the conversation now."""
        assert conversation.lease is None
        self._dormant.pop(conversation.key, None)
        self._held[conversation.key] = conversation
        conversation.lease = lease

    def let_go(self, conversation: Conversation) -> None:
        """Notes that the conversation's lease has ended."""
        assert conversation.lease is not None
        conversation.lease = None
        del self._held[conversation.key]
        self._dormant[conversation.key] = conversation

    def forget_surplus(self) -> Conversation | None:
        """Forgets and returns the conversation longest unused, if there are too many."""
        if len(self._dormant) <= self._dormant_max:
            return None
        return self._dormant.popitem(last=False)[1]
