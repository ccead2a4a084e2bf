"""All engines that the lessor knows: with a session, away, or gone but for their fence."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from kvturn_lease.errors import EnginesExhausted, IncarnationInUse, SessionFenced
from kvturn_lease.session import Engine

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvturn_lease.session import SessionId
    from kvturn_lease.store import SessionRecord


class Engines:
    """Engines by id and by incarnation.

    One without a session is *away* while its leases are remembered and *gone* after that. Both
    are still fenced; of the two together only the latest are kept, the gone ones leave first.
    """

    def __init__(self, live_max: int, absent_max: int) -> None:
        assert live_max > 0
        assert absent_max > 0
        self._live_max = live_max
        self._absent_max = absent_max
        self._by_id: dict[str, Engine] = {}
        self._by_incarnation: dict[str, Engine] = {}
        self._away: OrderedDict[str, Engine] = OrderedDict()  # the longest away first
        self._gone: OrderedDict[str, Engine] = OrderedDict()

    def get(self, engine_id: str) -> Engine | None:
        """Returns the engine of that id."""
        return self._by_id.get(engine_id)

    def of_incarnation(self, incarnation: str) -> Engine | None:
        """Returns the engine whose current incarnation this is."""
        return self._by_incarnation.get(incarnation)

    def all(self) -> Iterable[Engine]:
        """Returns all engines, in no particular order."""
        return self._by_id.values()

    def restore(self, record: SessionRecord) -> None:
        """Takes over the fence of an engine that an earlier term knew."""
        engine = Engine(record.engine_id, record.incarnation)
        engine.number = record.session_number
        engine.fenced.extend(record.fenced)
        engine.draining = record.draining
        self._by_id[engine.engine_id] = self._gone[engine.engine_id] = engine
        self._by_incarnation[engine.incarnation] = engine

    def check(self, session_id: SessionId) -> Engine | None:
        """Returns the engine, if known, that may open this session.

        Raises SessionFenced, IncarnationInUse or EnginesExhausted.
        """
        engine = self._by_id.get(session_id.engine_id)
        incarnation = session_id.incarnation
        if engine is not None:
            if incarnation in engine.fenced:
                raise SessionFenced
            if incarnation == engine.incarnation and session_id.number <= engine.number:
                raise SessionFenced
        if self._by_incarnation.get(incarnation) not in (None, engine):
            raise IncarnationInUse
        if engine is None or engine.session is None:
            live_count = len(self._by_id) - len(self._away) - len(self._gone)
            if live_count >= self._live_max:
                raise EnginesExhausted(self._live_max)
        return engine

    def enter(self, session_id: SessionId) -> Engine:
        """Returns the engine, added if new, of a session that check() allowed.

        Its incarnation is the caller's to replace.
        """
        engine = self._by_id.get(session_id.engine_id)
        if engine is None:
            engine = Engine(session_id.engine_id, session_id.incarnation)
            self._by_id[engine.engine_id] = engine
            self._by_incarnation[engine.incarnation] = engine
        self._away.pop(engine.engine_id, None)
        self._gone.pop(engine.engine_id, None)
        return engine

    def replace_incarnation(self, engine: Engine, incarnation: str) -> None:
        """Puts a new incarnation in the place of the engine's.

        Which of the two is the newer process is not known yet: a Register may have been on its
        way for longer than its process lived. So the old one may come back until fence_displaced().
        """
        engine.displaced.append(engine.incarnation)
        if incarnation in engine.displaced:
            engine.displaced.remove(incarnation)
        del self._by_incarnation[engine.incarnation]
        engine.incarnation = incarnation
        self._by_incarnation[incarnation] = engine

    def fence_displaced(self, engine: Engine) -> bool:
        """Fences, for ever, what the engine's incarnation replaced; False if there is nothing.

        Call it when the incarnation has shown that it lives.
        """
        if not engine.displaced:
            return False
        engine.fenced.extend(engine.displaced)
        engine.displaced.clear()
        return True

    def leave(self, engine: Engine) -> None:
        """Notes that the engine has no session any more."""
        self._away[engine.engine_id] = engine

    @property
    def away_count(self) -> int:
        """Engines without a session whose leases are remembered."""
        return len(self._away)

    def longest_away(self) -> Engine | None:
        """Returns the engine whose leases are remembered for the longest time."""
        return next(iter(self._away.values()), None)

    def give_up(self, engine: Engine) -> None:
        """Notes that the leases of an engine that is away are no longer remembered."""
        del self._away[engine.engine_id]
        self._gone[engine.engine_id] = engine

    def is_crowded(self) -> bool:
        """True if more engines without a session are known than may be."""
        return len(self._away) + len(self._gone) > self._absent_max

    def forget_gone(self) -> Engine | None:
        """Forgets and returns the engine that is gone for the longest time, if there is one."""
        if not self._gone:
            return None
        _, engine = self._gone.popitem(last=False)
        del self._by_id[engine.engine_id]
        del self._by_incarnation[engine.incarnation]
        return engine
