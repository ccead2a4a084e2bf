"""All engines, and who names them. Sans-IO.

An engine is named by flags, by an operator, by the session that it holds with
the lease service, or by several of these: at one address there is one engine.
What flags or operators say of its role holds over what it says itself. Once
nobody names it, it is given no turns any more; its running ones go on, and then
its connections are closed.

An engine whose session has ended counts as named for a while longer: engines
connect again within seconds when the lease service changes, and until then
turns need them. One that is really gone refuses connections, which takes it out.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Final, Literal, NamedTuple

from kvturn.address import EngineAddress, engine_address
from kvturn_router.engines.engine import BOTH, DECODE, PREFILL, Engine
from kvturn_router.engines.loads import Loads

__all__ = ["DECODE", "PREFILL", "Engine", "Fleet"]

logger = logging.getLogger("kvturn.router.fleet")

FLAGS: Final = "flags"
OPERATOR: Final = "operator"
Source = Literal["flags", "operator"]

ENGINES_MAX: Final = 1024
"""Engines at once; more are refused."""

LINGER_NS: Final = 10_000_000_000
"""How long an engine whose session has ended still counts as named by it."""


class FleetFull(Exception):
    """There are as many engines as there may be."""


class AnnouncedEngine(NamedTuple):
    """An engine as its session with the lease service describes it.

    `role` is "prefill", "decode" or "both", "" if it says none.
    `http_address` is as the engine says, unchecked, "" if it says none.
    """

    engine_id: str
    role: str
    http_address: str
    draining: bool


class EngineView(NamedTuple):
    """One engine as operators see it."""

    url: str
    role: str
    named_by: list[str]
    """"flags", "operator", or "session:" and an engine id."""
    usable: bool
    reason: str
    """Why it is not usable, empty if it is."""
    draining: bool
    in_flight: int
    served: int


class _Member:
    """One engine with those who name it."""

    __slots__ = ("drained", "engine", "place", "roles", "sessions")

    def __init__(self, place: str, engine: Engine) -> None:
        self.place = place
        self.engine = engine
        self.roles: dict[Source, str] = {}
        self.sessions: dict[str, AnnouncedEngine] = {}
        self.drained = False
        """Whether an operator of this router drains it."""


class Fleet:
    """The engines, of both roles.

    `build` makes an engine; it is given a number that no other has had, from 0.
    `clock_ns` is CLOCK_BOOTTIME. `changed` is called after each change of which
    engines may be given turns.
    """

    def __init__(
        self,
        build: Callable[[EngineAddress, int], Engine],
        clock_ns: Callable[[], int],
        *,
        linger_ns: int = LINGER_NS,
    ) -> None:
        self.prefills: Loads[Engine] = Loads()
        self.decodes: Loads[Engine] = Loads()
        self.changed: Callable[[], None] = lambda: None
        self.due: Callable[[], None] = lambda: None
        """Called when an engine is to be asked after its health before its time."""
        self._build = build
        self._built = 0
        self._clock_ns = clock_ns
        self._linger_ns = linger_ns
        self._members: dict[str, _Member] = {}
        self._place_of: dict[str, str] = {}
        self._ended_ns: dict[str, int] = {}
        self._leaving: list[Engine] = []
        self._unheard: set[str] = set()

    def __iter__(self) -> Iterator[Engine]:
        """All engines that somebody names."""
        return iter([member.engine for member in self._members.values()])

    def missing(self) -> list[str]:
        """Returns the roles of which no engine is available, in the order of a turn."""
        roles = ((PREFILL, self.prefills), (DECODE, self.decodes))
        return [role for role, engines in roles if not any(one.available for one in engines)]

    def lack(self, role: str) -> str:
        """Returns in words why no engine of a role is available, "" if one is."""
        engines = list(self.prefills if role == PREFILL else self.decodes)
        draining = [engine.draining for engine in engines]
        if any(engine.available for engine in engines):
            return ""
        if not engines:
            return f"no {role} engine is known"
        if all(draining):
            return f"all {role} engines are draining"
        return f"no {role} engine is healthy" + (" that is not draining" if any(draining) else "")

    def holder(self, http_address: str, engine_id: str = "") -> Engine | None:
        """Returns the decode engine of that id, or else at that address; None if there is none."""
        place = self._place_of.get(engine_id)
        if place is None:
            place = _place_of(http_address)
        member = self._members.get(place) if place else None
        return member.engine if member and member.engine in self.decodes else None

    def views(self) -> list[EngineView]:
        """Returns all engines as they are now, by URL."""
        return sorted(map(_view, self._members.values()))

    def view(self, url: str) -> EngineView:
        """Returns the engine at a URL as it is now. Raises KeyError if nobody names one."""
        return _view(self._members[_place_of(url)])

    # --- named by flags and operators -------------------------------------------------------------

    def add(self, url: str, role: str, source: Source) -> Engine:
        """Takes an engine up for a role; returns it. Flags add roles, an operator says the role.

        Raises ValueError, in words that follow the URL, if it is no engine's
        base URL, and FleetFull.
        """
        assert role in (PREFILL, DECODE, BOTH)
        member = self._member(engine_address(url))
        before = member.roles.get(source, role) if source == FLAGS else role
        member.roles[source] = _joined(before, role)
        self._settle(member)
        return member.engine

    def remove(self, url: str, source: Source) -> bool:
        """Withdraws what `source` said of the engine; returns whether it had said anything."""
        member = self._members.get(_place_of(url))
        if member is None or member.roles.pop(source, None) is None:
            return False
        self._settle(member)
        return True

    def is_named(self, url: str) -> bool:
        """Tells whether somebody names an engine at that URL."""
        return _place_of(url) in self._members

    def drain(self, url: str, draining: bool) -> bool:
        """Gives an engine no new turns, or again some; returns whether there is one."""
        member = self._members.get(_place_of(url))
        if member is None:
            return False
        member.drained = draining
        self._settle(member)
        return True

    # --- named by sessions; this is an EngineListener ---------------------------------------------

    def all_announced(self, engines: Sequence[AnnouncedEngine]) -> None:
        """Takes all engines that have a session now."""
        named = {engine.engine_id for engine in engines}
        self.gone([name for name in self._place_of if name not in named])
        self.announced(engines)

    def announced(self, engines: Sequence[AnnouncedEngine]) -> None:
        """Takes engines that came or changed."""
        for engine in engines:
            self._ended_ns.pop(engine.engine_id, None)
            try:
                address = engine_address(engine.http_address) if engine.http_address else None
                member = None if address is None else self._announced(engine, address)
            except (ValueError, FleetFull) as problem:
                self._ignore(engine, str(problem))
                member = None
            place = self._place_of.get(engine.engine_id)
            if place is not None and (member is None or member.place != place):
                self._withdraw(engine.engine_id)
            if member is not None:
                self._place_of[engine.engine_id] = member.place
                member.sessions[engine.engine_id] = engine
                if not member.engine.usable:
                    member.engine.health.ask_now(self._clock_ns())
                    self.due()
                self._settle(member)

    def gone(self, engine_ids: Sequence[str]) -> None:
        """Takes engines whose session has ended."""
        now_ns = self._clock_ns()
        for engine_id in engine_ids:
            if engine_id in self._place_of:
                self._ended_ns.setdefault(engine_id, now_ns + self._linger_ns)

    def _announced(self, engine: AnnouncedEngine, address: EngineAddress) -> _Member | None:
        known = self._members.get(address.place)
        if known is None and not engine.role:
            return None  # It says not what it is for, and nobody else does.
        return known or self._member(address)

    def _withdraw(self, engine_id: str) -> None:
        member = self._members[self._place_of.pop(engine_id)]
        del member.sessions[engine_id]
        self._settle(member)

    def _ignore(self, engine: AnnouncedEngine, why: str) -> None:
        # Once an engine, not once a session: a wrong address stays wrong.
        if engine.engine_id not in self._unheard and len(self._unheard) < ENGINES_MAX:
            self._unheard.add(engine.engine_id)
            logger.warning(
                "engine %s is not used: its address %r %s",
                engine.engine_id,
                engine.http_address[:256],
                why,
            )

    # --- health -----------------------------------------------------------------------------------

    def seen_well(self, engine: Engine) -> None:
        """Takes a good answer to the question after an engine's health."""
        was = engine.usable
        engine.health.answered_well(self._clock_ns())
        self._note(engine, was=was)

    def seen_badly(self, engine: Engine, why: str) -> None:
        """Takes a bad answer to the question after an engine's health, or none."""
        was, asked = engine.usable, engine.health.asked
        engine.health.answered_badly(why, self._clock_ns())
        self._note(engine, was=was or not asked)

    def refused(self, engine: Engine, why: str) -> None:
        """Takes out an engine that refused a connection, until it answers again."""
        was = engine.usable
        engine.health.refused(why, self._clock_ns())
        self._note(engine, was=was)

    def failed(self, engine: Engine, why: str) -> None:
        """Takes a turn that an engine failed: a status of 500 or more, silence, a lost connection.

        The last available engine of a role is never taken out by that: it may
        be the turns that are at fault.
        """
        others = [
            any(one.available for one in loads if one is not engine) for loads in engine.loads
        ]
        if all(others):
            was = engine.usable
            engine.health.failed(why, self._clock_ns())
            self._note(engine, was=was)

    def sweep(self) -> None:
        """To be called every second: ends what is over by now."""
        now_ns = self._clock_ns()
        for engine_id in [name for name, end_ns in self._ended_ns.items() if end_ns <= now_ns]:
            del self._ended_ns[engine_id]
            self._withdraw(engine_id)
        for engine in [one for one in self._leaving if not one.in_flight]:
            engine.pool.close()
            self._leaving.remove(engine)

    def close(self) -> None:
        """Ends every connection."""
        for engine in (*self, *self._leaving):
            engine.pool.close()

    # --- members ----------------------------------------------------------------------------------

    def _member(self, address: EngineAddress) -> _Member:
        member = self._members.get(address.place)
        if member is None:
            if len(self._members) >= ENGINES_MAX:
                raise FleetFull(f"would be one engine more than {ENGINES_MAX}")
            engine = self._build(address, self._built)
            self._built += 1
            member = self._members[address.place] = _Member(address.place, engine)
            self.due()
        return member

    def _settle(self, member: _Member) -> None:
        """Brings an engine in line with what is said of it now."""
        engine = member.engine
        said = list(member.roles.values()) or [one.role for one in member.sessions.values()]
        role = _joined(*said)
        served = [
            loads
            for name, loads in ((PREFILL, self.prefills), (DECODE, self.decodes))
            if role in (name, BOTH)
        ]
        drained_there = any(one.draining for one in member.sessions.values())
        engine.draining = member.drained or drained_there
        if role != engine.role and FLAGS not in member.roles:
            logger.info("%s is now %s engine", engine.url, f"a {role}" if role else "no")
        engine.role = role
        for loads in set(engine.loads) - set(served):
            loads.remove(engine)
        engine.loads = tuple(served)
        for loads in served:
            loads.add(engine)
        engine.changed()
        if not member.roles and not member.sessions:
            del self._members[member.place]
            self._leaving.append(engine)
        self._tell()

    def _note(self, engine: Engine, *, was: bool) -> None:
        if engine.usable is was:
            return
        if engine.usable:
            logger.info("%s engine %s is usable", engine.role, engine.url)
        else:
            why = engine.health.reason
            logger.warning("%s engine %s is not usable: %s", engine.role, engine.url, why)
        engine.changed()
        self._tell()

    def _tell(self) -> None:
        self.changed()
        # A full engine that is gone is no longer waited for.
        self.prefills.turned()
        self.decodes.turned()


def _view(member: _Member) -> EngineView:
    engine = member.engine
    return EngineView(
        engine.url,
        engine.role,
        [*member.roles, *(f"session:{name}" for name in member.sessions)],
        engine.usable,
        engine.health.reason,
        engine.draining,
        engine.in_flight,
        engine.served,
    )


def _joined(*roles: str) -> str:
    """Returns the role that covers all of these."""
    named = {role for role in roles if role}
    return BOTH if len(named) > 1 else next(iter(named), "")


@lru_cache(maxsize=ENGINES_MAX)
def _place_of(url: str) -> str:
    """Returns the place of an engine's base URL, "" if it is none."""
    try:
        return engine_address(url).place
    except ValueError:
        return ""
