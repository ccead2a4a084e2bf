"""Which conversation a turn goes on with, told by the history it was asked with.

A client may name a conversation and still hold several at once under that name
(sub-agents, a retry beside the first try), or name none at all. What tells them
apart is the history that each turn resends, seen as *points*: 16-byte digests,
points[0] of all of it (the turn's own), then of it up to right before each
answer in it, the latest first, last up to its first message. A turn whose later
points hold another turn's own goes on from that turn.

Each line of turns is a *branch* with an id of its own: C, "C~2" to "C~4" for a
conversation C that the client named; "conv-<hex>" or "SCOPE~<12 hex>" for one
that was recognised. A branch takes a turn

- that goes on from its latest turn, also while that one is in flight: the
  client has its whole answer, only its end has not been told here;
- while none of its turns is in flight, also one that parts from it later than
  from any other: an answer tried again, an edited or a compacted history. For a
  conversation that the client named that is so whatever they have in common: where
  its first message was edited tokens may be equal far into it, and points are not;
  else the turn must be asked with the latest turn's history again, or from the
  same answer on. Routers do not have a history without an answer in it recognised:
  any number of clients may begin with the same words.

A wrong guess costs reuse and nothing else, because tokens are compared before
KV is used, and never crosses tenants. Nothing here does I/O or knows the time;
the lease service recognises for all routers, a router in stock mode for itself.
"""

import functools
import hashlib
import re
from collections import OrderedDict
from collections.abc import Collection, Hashable, Sequence
from typing import Final, Generic, NamedTuple, TypeVar

Key = tuple[str, str, str]
"""Tenant, model, conversation id. Any NamedTuple of the three will do."""

BRANCHES_MAX: Final = 4
"""Branches of a conversation that the client named."""

POINTS_MAX: Final = 20
"""Points of a turn that are looked at."""

POINT_BYTES: Final = 16

ALIKE_MAX: Final = 64
"""Branches with the same history that are told apart; more of them are not recognised."""

NAME_BYTES_MAX: Final = 256

_MINTED_DIGITS: Final = 12
_SCOPE_BYTES_MAX: Final = NAME_BYTES_MAX - 1 - _MINTED_DIGITS

_branch_id = re.compile(r"(.+)~(?:[2-4]|[0-9a-f]{12})", re.DOTALL)


class Named(NamedTuple):
    """The conversation that a turn belongs to.

    `known`: it was there before. `extends`: the turn's history goes on from
    what is retained of it, as far as the points tell. `awaits`: it goes on from
    a turn that is in flight still, as far as has been told.
    """

    conversation_id: str
    known: bool = False
    extends: bool = False
    awaits: bool = False


class _Branch:
    """One line of turns.

    `own` is its latest turn's own digest, `answered` the point before it,
    `retained` the own digest of the turn whose KV is retained; each under its
    tenant and model, or b"" if not known. `points` are the latest turn's, one
    after the other.
    """

    __slots__ = ("answered", "in_flight", "key", "own", "points", "retained", "used")

    def __init__(self, key: Key) -> None:
        self.key = key
        self.own = b""
        self.answered = b""
        self.retained = b""
        self.points = b""
        self.in_flight = 0
        self.used = 0


_K = TypeVar("_K", bound=Hashable)


class _Index(Generic[_K]):
    """Branches by something they may share; `alike_max` of each at most, latest kept.

    Nearly always one branch has it alone, which is then held without a collection.
    """

    def __init__(self, alike_max: int) -> None:
        self._alike_max = alike_max
        self._branches: dict[_K, _Branch | dict[_Branch, None]] = {}

    def at(self, what: _K) -> Collection[_Branch]:
        found = self._branches.get(what)
        if found is None:
            return ()
        return (found,) if isinstance(found, _Branch) else found

    def add(self, what: _K, branch: _Branch) -> None:
        found = self._branches.setdefault(what, branch)
        if found is branch:
            return  # nearly always
        if isinstance(found, _Branch):
            self._branches[what] = {found: None, branch: None}
            return
        found[branch] = None
        if len(found) > self._alike_max:
            del found[next(iter(found))]

    def discard(self, what: _K, branch: _Branch) -> None:
        found = self._branches.get(what)
        if found is branch:
            del self._branches[what]  # nearly always
        elif isinstance(found, dict):
            found.pop(branch, None)
            if not found:
                del self._branches[what]


class Recognition:
    """The conversations known, the least recently used forgotten first.

    `entries_max` is at least 1.
    """

    def __init__(self, entries_max: int) -> None:
        assert entries_max >= 1
        self._entries_max = entries_max
        self._entries: OrderedDict[Key, _Branch] = OrderedDict()
        self._own: _Index[bytes] = _Index(ALIKE_MAX)
        self._answered: _Index[bytes] = _Index(ALIKE_MAX)
        self._under: _Index[Key] = _Index(entries_max)
        self._uses = 0

    def __len__(self) -> int:
        return len(self._entries)

    def name(self, key: Key, recognise: bool, points: Sequence[bytes]) -> Named:
        """Returns the conversation that a turn belongs to; changes nothing.

        `key` names the client's conversation, or, with `recognise`, carries the
        id that a new conversation gets. `points` beyond POINTS_MAX are not
        looked at. Call `began` next, with the id returned.
        """
        if not points:
            return Named(key[2], key in self._entries)
        asked = _tagged(key, points)
        if recognise:
            branch = self._recognised(key, asked)
            return Named(key[2]) if branch is None else _named(branch, asked)
        return self._branch_of(key, asked)

    def _recognised(self, key: Key, asked: Sequence[bytes]) -> _Branch | None:
        for depth, point in enumerate(asked):
            going_on = self._own.at(point)
            if depth and going_on:
                return max(going_on, key=_readiness)
            idle = [b for b in (*going_on, *self._answered.at(point)) if not b.in_flight]
            if idle:
                return max(idle, key=_readiness)
        return None

    def _branch_of(self, key: Key, asked: Sequence[bytes]) -> Named:
        """Chooses among the branches of a conversation that the client named."""
        only = self._entries.get(key)
        if only is not None and not only.in_flight and not self._under.at(key):
            return _named(only, asked)  # nearly always
        tenant, model, name = key
        best: _Branch | None = None
        best_rank: tuple[int, bool, bool, int] | None = None
        known: list[_Branch] = []
        free = ""
        for number in range(1, BRANCHES_MAX + 1):
            branch_id = name if number == 1 else f"{name}~{number}"
            branch = self._entries.get((tenant, model, branch_id))
            if branch is None:
                free = free or branch_id
                continue
            known.append(branch)
            goes_on = branch.own in asked[1:]
            if branch.in_flight and not goes_on:
                continue
            rank = (-_parting(branch, asked), goes_on, *_readiness(branch))
            if best_rank is None or rank > best_rank:
                best, best_rank = branch, rank
        if best is None and free and len(free.encode()) <= NAME_BYTES_MAX:
            return Named(free)
        return _named(best or min(known, key=_use), asked)

    def began(self, key: Key, points: Sequence[bytes]) -> None:
        """Counts a turn in flight of exactly this conversation, asked with this history."""
        branch = self._used(key)
        branch.in_flight += 1
        self._asked(branch, points)

    def ended(self, key: Key) -> None:
        """Counts a turn out. Once for each `began`; unknown conversations are ignored."""
        branch = self._entries.get(key)
        if branch is not None and branch.in_flight:
            branch.in_flight -= 1
            self._used(key)

    def retained(self, key: Key, history: bytes) -> None:
        """Notes what the retention at hand was asked with: the own digest of its turn.

        Makes the conversation known, after a failover, if it is not. `history`
        is empty where it is not known.
        """
        branch = self._used(key)
        branch.retained = _tagged(key, [history])[0] if history else b""
        if not branch.own and not branch.in_flight:
            self._asked(branch, [history] if history else ())

    def forget(self, key: Key) -> None:
        """Forgets a conversation; while turns of it are in flight, only what they were asked.

        Unknown ones are ignored.
        """
        branch = self._entries.get(key)
        if branch is not None:
            self._asked(branch, ())
            branch.retained = b""
            if not branch.in_flight:
                self._drop(branch)

    def branches(self, tenant: str, model: str, name: str) -> list[str]:
        """Returns the ids of all conversations under a name, which is an id or a scope.

        In the order they came; without the id itself if it is not known.
        """
        found = [name] if (tenant, model, name) in self._entries else []
        found += [branch.key[2] for branch in self._under.at((tenant, model, name))]
        if (scope := _cut(name)) != name:
            found += [branch.key[2] for branch in self._under.at((tenant, model, scope))]
        return found

    def _used(self, key: Key) -> _Branch:
        branch = self._entries.get(key)
        if branch is None:
            if len(self._entries) >= self._entries_max:
                self._drop(next(iter(self._entries.values())))
            key = (key[0], key[1], key[2])
            branch = self._entries[key] = _Branch(key)
            if (above := _above(key)) is not None:
                self._under.add(above, branch)
        else:
            self._entries.move_to_end(key)
        self._uses += 1
        branch.used = self._uses
        return branch

    def _drop(self, branch: _Branch) -> None:
        self._asked(branch, ())
        del self._entries[branch.key]
        if (above := _above(branch.key)) is not None:
            self._under.discard(above, branch)

    def _asked(self, branch: _Branch, points: Sequence[bytes]) -> None:
        """Notes what a branch's latest turn was asked with."""
        own, answered = (*_tagged(branch.key, points[:2]), b"", b"")[:2]
        if branch.own != own:
            _move(self._own, branch, branch.own, own)
            branch.own = own
        if branch.answered != answered:
            _move(self._answered, branch, branch.answered, answered)
            branch.answered = answered
        branch.points = b"".join([point[:POINT_BYTES] for point in points[:POINTS_MAX]])


def minted_id(scope: str, random_hex: str) -> str:
    """Returns the id of a new conversation that no client named.

    "SCOPE~<12 hex>", or "conv-<32 hex>" where `scope` is "". `random_hex` has
    at least 32 hex digits. A long scope is cut, so that the id has at most
    256 bytes.
    """
    if scope:
        return f"{_cut(scope)}~{random_hex[:_MINTED_DIGITS]}"
    return f"conv-{random_hex[:32]}"


def _cut(scope: str) -> str:
    if len(scope) * 4 <= _SCOPE_BYTES_MAX:
        return scope
    return scope.encode()[:_SCOPE_BYTES_MAX].decode(errors="ignore")


def _above(key: Key) -> Key | None:
    """Returns what a branch is under: the conversation or scope in its id, None if none is."""
    found = _branch_id.fullmatch(key[2])
    return None if found is None else (key[0], key[1], found[1])


def _move(index: _Index[bytes], branch: _Branch, old: bytes, new: bytes) -> None:
    if old:
        index.discard(old, branch)
    if new:
        index.add(new, branch)


def _tagged(key: Key, points: Sequence[bytes]) -> list[bytes]:
    tag = _tag(key[0], key[1])
    return [tag + point[:POINT_BYTES] for point in points[:POINTS_MAX]]


@functools.lru_cache(maxsize=1_024)
def _tag(tenant: str, model: str) -> bytes:
    """Returns what keeps the digests of tenants and models apart, whoever makes them equal."""
    named = f"{len(tenant)}:{tenant}{model}".encode()
    return hashlib.blake2b(named, digest_size=8).digest()


def _named(branch: _Branch, asked: Sequence[bytes]) -> Named:
    later = asked[1:]
    goes_on = branch.own in later
    extends = goes_on or branch.retained in later
    return Named(branch.key[2], True, extends, goes_on and branch.in_flight > 0)


def _parting(branch: _Branch, asked: Sequence[bytes]) -> int:
    """Returns at which point a turn's history parts from the branch's latest; 0 is the whole."""
    held = branch.points
    for depth, point in enumerate(asked):
        if held.find(point[-POINT_BYTES:]) >= 0:
            return depth
    return len(asked)


def _readiness(branch: _Branch) -> tuple[bool, int]:
    return not branch.in_flight, branch.used


def _use(branch: _Branch) -> int:
    return branch.used
