"""Which conversation a turn goes on with, told by the history it was asked with.

A client may name a conversation and still hold several at once under that name
(sub-agents, a retry beside the first try), or name none at all. What tells them
apart is the history that each turn resends, seen as *points*: 16-byte digests,
points[0] of all of it, then of it up to right before each answer in it, the
latest first, last up to its first message. A turn whose later points hold the
whole history of an earlier turn (its own digest) goes on from that turn.

Each line of turns is a *branch* with an id of its own: C, "C~2" to "C~4" for a
conversation C that the client named; "conv-<hex>" or "SCOPE~<12 hex>" for one
that was recognised. A wrong guess costs reuse and nothing else, because the
tokens are compared before KV is used. Nothing here does I/O or knows the time;
the lease service recognises for all routers, a router in stock mode for itself.
"""

from collections.abc import Sequence
from typing import NamedTuple

Key = tuple[str, str, str]
"""Tenant, model, conversation id. Any NamedTuple of the three will do."""

BRANCHES_MAX = 4
"""Branches of a conversation that the client named."""

POINTS_MAX = 20
"""Points of a turn that are looked at."""


class Named(NamedTuple):
    """The conversation that a turn belongs to.

    `known`: it was there before. `extends`: the turn's history goes on from
    what is retained of it, as far as the points tell. `awaits`: a turn of it is
    in flight, or its retention has not been told of, whose whole answer this
    turn's client has.
    """

    conversation_id: str
    known: bool = False
    extends: bool = False
    awaits: bool = False


class Recognition:
    """The conversations known, the least recently used forgotten first.

    `entries_max` is at least 1.
    """

    def __init__(self, entries_max: int) -> None:
        raise NotImplementedError

    def __len__(self) -> int:
        raise NotImplementedError

    def name(self, key: Key, recognise: bool, points: Sequence[bytes]) -> Named:
        """Returns the conversation that a turn belongs to; changes nothing.

        `key` names the client's conversation, or, with `recognise`, carries the
        id that a new conversation gets. `points` beyond POINTS_MAX are not
        looked at. Call `began` next, with the id returned.
        """
        raise NotImplementedError

    def began(self, key: Key, points: Sequence[bytes]) -> None:
        """Counts a turn in flight of exactly this conversation, asked with this history."""
        raise NotImplementedError

    def ended(self, key: Key) -> None:
        """Counts a turn out. Once for each `began`; unknown conversations are ignored."""
        raise NotImplementedError

    def retained(self, key: Key, history: bytes) -> None:
        """Notes what the retention at hand was asked with: the own digest of its turn.

        Makes the conversation known, after a failover, if it is not. `history`
        is empty where it is not known.
        """
        raise NotImplementedError

    def forget(self, key: Key) -> None:
        """Forgets a conversation, unless a turn of it is in flight; unknown ones are ignored."""
        raise NotImplementedError

    def branches(self, tenant: str, model: str, name: str) -> list[str]:
        """Returns the ids of all conversations under a name, which is an id or a scope.

        In the order they came; without the id itself if it is not known.
        """
        raise NotImplementedError


def minted_id(scope: str, random_hex: str) -> str:
    """Returns the id of a new conversation that no client named.

    "SCOPE~<12 hex>", or "conv-<32 hex>" where `scope` is "". `random_hex` has
    at least 32 hex digits. A long scope is cut, so that the id has at most
    256 bytes.
    """
    raise NotImplementedError
