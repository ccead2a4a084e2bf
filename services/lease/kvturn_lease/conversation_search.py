"""Finds the conversations that an operator asks for, a step at a time. No I/O, no clock.

There can be hundreds of thousands, and turns must not wait until all were looked at. What is
searched is a copy of the list, as it was at first; a conversation that is seen again while the
search goes on keeps its place or moves to the front.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvturn_lease.conversation import Conversation

_STEP = 2_048
"""Conversations looked at in one step: less than a millisecond."""

_seen_ns = attrgetter("seen_ns")


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Which conversations are wanted: all, less those that a field which is set leaves out."""

    tenant: str = ""
    model: str = ""
    engine_id: str = ""
    """That holds, or last held, the conversation's KV."""
    retained_only: bool = False
    conversation_id: str = ""
    """Its own, or the one under which it was told apart (kvturn/recognition.py)."""

    def matches(self, conversation: Conversation) -> bool:
        """Tells whether a conversation is one of them."""
        key = conversation.key
        return (
            (not self.tenant or key.tenant == self.tenant)
            and (not self.model or key.model == self.model)
            and (not self.engine_id or conversation.engine_id == self.engine_id)
            and (not self.retained_only or conversation.retained is not None)
            and (not self.conversation_id or self._is_named(key.conversation_id))
        )

    def _is_named(self, conversation_id: str) -> bool:
        name = self.conversation_id
        return conversation_id == name or conversation_id.startswith(f"{name}~")


class ConversationSearch:
    """One search; go through steps() once, then take what was found."""

    def __init__(
        self, conversations: Sequence[Conversation], wanted: Wanted, count_max: int
    ) -> None:
        """`conversations` must not change; `count_max` above 0."""
        assert count_max > 0
        self._conversations = conversations
        self._wanted = wanted
        self._count_max = count_max
        self._latest: list[Conversation] = []
        self.total = 0
        """How many match."""

    def steps(self) -> Iterator[None]:
        """Looks at all of them, and yields after each step."""
        for start in range(0, len(self._conversations), _STEP):
            self._look_at(self._conversations[start : start + _STEP])
            yield

    def _look_at(self, conversations: Sequence[Conversation]) -> None:
        found = [each for each in conversations if self._wanted.matches(each)]
        self.total += len(found)
        if len(self._latest) == self._count_max:
            oldest_ns = self._latest[-1].seen_ns
            found = [each for each in found if each.seen_ns > oldest_ns]
        if found:
            found += self._latest
            self._latest = heapq.nlargest(self._count_max, found, key=_seen_ns)

    def latest(self) -> list[Conversation]:
        """Returns those with the latest sign of life, the latest first."""
        return sorted(self._latest, key=_seen_ns, reverse=True)
