"""Which endpoint of the lease service to ask. Sans-IO.

One process of the lease service leads, others stand by; a client knows the endpoints of all of
them. It asks the one that last answered as leader for as long as nothing speaks against it:

- It says that it stands by: ask the leader that it names, if that is one of ours, else the next.
- It cannot be connected to: ask the next; this one fails fast, so it may be asked again.
- It is silent past a deadline: ask the next, and this one not before it has answered a probe. So
  a frozen process costs one deadline, not one per question.

Whenever it is in doubt who leads, all endpoints are probed; silent ones are probed always.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence


class Leader:
    """A client's belief about who leads. Wrong beliefs cost time, never safety."""

    def __init__(self, endpoints: Sequence[str]) -> None:
        """`endpoints`: at least one HOST:PORT, the likeliest leader first; repeats count once."""
        assert endpoints
        self._endpoints = tuple(dict.fromkeys(endpoints))
        self._first = self._endpoints[0]
        self._known = False
        self._last = ""
        self.changes = 0
        """How often another endpoint came to lead, or one whose connection broke led again: it may
        have forgotten what it knew."""
        self._silent: set[str] = set()
        self._broken: set[str] = set()
        self._heard_ns: dict[str, int] = {}

    @property
    def endpoints(self) -> tuple[str, ...]:
        """All endpoints, in the order given."""
        return self._endpoints

    @property
    def known(self) -> str:
        """The endpoint that leads; empty while that is in doubt."""
        return self._first if self._known else ""

    @property
    def doubted(self) -> list[str]:
        """The endpoints to probe now."""
        if not self._known:
            return list(self._endpoints)
        return [one for one in self._endpoints if one in self._silent]

    def is_broken(self, endpoint: str) -> bool:
        """True from its silence or the failure of its connection until it is heard again."""
        return endpoint in self._broken

    def next(self, tried: Collection[str]) -> str | None:
        """Returns whom to ask after all of `tried`; None when nobody is left to ask."""
        start = self._endpoints.index(self._first)
        for endpoint in self._endpoints[start:] + self._endpoints[:start]:
            if endpoint not in tried and endpoint not in self._silent:
                return endpoint
        return None

    def leads(self, endpoint: str, now_ns: int) -> None:
        """It has answered a question as only the leader does."""
        self._hear(endpoint, now_ns)
        self._first = endpoint
        self._known = True
        if endpoint != self._last:
            self._last = endpoint
            self.changes += 1

    def claims(self, endpoint: str, now_ns: int) -> None:
        """It has answered a probe as leader: taken for it while no other is known to lead.

        One that was frozen may still take itself for the leader when it wakes up.
        """
        self._hear(endpoint, now_ns)
        if not self._known:
            self.leads(endpoint, now_ns)

    def stands_by(self, endpoint: str, leader: str, now_ns: int) -> None:
        """It does not lead; `leader` is whom it names, empty if nobody."""
        self._hear(endpoint, now_ns)
        self._leave(endpoint)
        if not self._known and leader in self._endpoints and leader != endpoint:
            self._first = leader

    def answers(self, endpoint: str, now_ns: int) -> None:
        """It has answered a probe without a word about who leads."""
        self._hear(endpoint, now_ns)

    def lost(self, endpoint: str) -> None:
        """It could not be connected to, or the connection broke."""
        self._broken.add(endpoint)
        self._leave(endpoint)
        if endpoint == self._last:
            self._last = ""

    def silent(self, endpoint: str, asked_ns: int) -> None:
        """It did not answer what it was asked at `asked_ns`; ignored if it was heard since."""
        if self._heard_ns.get(endpoint, -1) >= asked_ns:
            return  # Slow with this one answer, not frozen.
        self._silent.add(endpoint)
        self._broken.add(endpoint)
        self._leave(endpoint)

    def doubt(self, endpoint: str) -> None:
        """Less was heard of it than it should have said; whom to ask stays as it is."""
        if endpoint == self._first:
            self._known = False

    def _hear(self, endpoint: str, now_ns: int) -> None:
        self._silent.discard(endpoint)
        self._broken.discard(endpoint)
        self._heard_ns[endpoint] = now_ns

    def _leave(self, endpoint: str) -> None:
        if endpoint == self._first:
            self._known = False
            after = self._endpoints.index(endpoint) + 1
            self._first = self._endpoints[after % len(self._endpoints)]
