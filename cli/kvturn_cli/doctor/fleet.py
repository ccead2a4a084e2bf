"""Engines: are there enough, do all have a session, can all be used."""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from kvturn_cli.doctor.facts import EngineFacts, EngineProbe, Facts
from kvturn_cli.doctor.finding import Finding, counted, listed, ok, problem, warning

HEARTBEAT_AGES_MAX = 2
"""Heartbeat intervals after which a heartbeat is late."""
HEARTBEAT_DEFAULT_S = 1.0
"""Of a lease service that does not tell its own."""
LATELY_S = 3600.0
"""An expiry that is longer ago is not told of: whatever was amiss is over."""
CONNECTOR = (
    '--kv-transfer-config with "kv_connector": "KvturnConnector",'
    ' "kv_connector_module_path": "kvturn_connector.connector"'
)

SWITCHES = {
    "kvturn_lease_endpoint": "kvturn_lease_endpoint to the lease service's address",
    "bidirectional_kv_xfer": "bidirectional_kv_xfer to true",
}
"""What our connector must be told to do anything, and how."""
_UNREADABLE = "Nothing that this engine holds can be found or read (not_offered, no_lease)."
_NOT_PREFERRED = "Routers cannot prefer it for what it holds."


def findings(facts: Facts) -> Iterator[Finding]:
    """Judges each engine that somebody knows."""
    if facts.router.engines is None and facts.lease.engines is None:
        return
    engines = facts.engines
    pairs = _pairs(engines)
    yield from _roles(facts, pairs)
    if not facts.stock and facts.lease.engines is not None:
        for engine in engines:
            yield from _session(engine, pairs)
            yield from _address(engine, pairs, facts)
    for engine in engines:
        yield from _usable(engine, facts)
        yield from _draining(engine, engines, facts)
    if facts.lease.leader is not None:
        times = facts.lease.leader.times
        for engine in engines:
            yield from _heartbeat(engine, times.heartbeat_interval.ToNanoseconds() / 1e9)
            yield from _expiries(engine, times.session_ttl.ToNanoseconds() / 1e9)


class _Pair(NamedTuple):
    """What may be one engine: a session that tells no address, and an address without a session."""

    session: EngineFacts
    address: EngineFacts


def _pairs(engines: Sequence[EngineFacts]) -> list[_Pair]:
    """Returns for each session without an address one that flags name for its role.

    Which belongs to which nobody tells; only how many are left over is certain.
    """
    unplaced = [one for one in engines if one.session is not None and not one.url]
    pairs: list[_Pair] = []
    for engine in engines:
        if engine.session is not None or engine.seen is None or engine.seen.has_session:
            continue
        if _surely_without(engine.probe):
            continue
        fitting = [i for i, one in enumerate(unplaced) if _same_role(one.role, engine.role)]
        if fitting:
            pairs.append(_Pair(unplaced.pop(fitting[0]), engine))
    return pairs


def _surely_without(probe: EngineProbe | None) -> bool:
    """Tells whether an engine's metrics rule out that it has a session."""
    return probe is not None and (probe.connector_loaded is False or bool(probe.turned_off_by))


def _same_role(one: str, other: str) -> bool:
    return one == other or "both" in (one, other)


def _roles(facts: Facts, pairs: Sequence[_Pair]) -> Iterator[Finding]:
    told = {pair.address.url for pair in pairs}
    for role in ("prefill", "decode"):
        engines = [
            one for one in facts.of_role(role) if one.session is not None or one.url not in told
        ]
        if engines:
            names = listed(engine.name for engine in engines)
            yield ok("engines.known", f"{counted(len(engines), f'{role} engine')}: {names}")
        else:
            yield problem(
                "engines.known",
                f"no {role} engine is known",
                "A turn needs a prefill and a decode engine.",
                f"start one with kv_role {'kv_producer' if role == 'prefill' else 'kv_consumer'},"
                f" and name it by kvturn_http_address or --{role} of kvturn router",
            )


def _session(engine: EngineFacts, pairs: Sequence[_Pair]) -> Iterator[Finding]:
    """An engine that the router knows has a session with the lease service."""
    if engine.session is not None or any(pair.address is engine for pair in pairs):
        return
    name = f"{engine.name} ({engine.role})" if engine.role else engine.name
    off = engine.probe.turned_off_by if engine.probe else None
    loaded = engine.probe.connector_loaded if engine.probe else None
    if off:
        yield problem(
            "engines.session",
            f"{name}: our connector is loaded and turned off: {_and(off)} not set",
            _UNREADABLE,
            f"set {_and(SWITCHES.get(one, one) for one in off)} in its kv_connector_extra_config",
        )
    elif loaded:
        switches = "" if off is not None else f"set {_and(SWITCHES.values())}; if both are, "
        yield problem(
            "engines.session",
            f"{name}: our connector is loaded and has no session{_or_another(engine, pairs)}",
            _UNREADABLE,
            f"{switches}its log says why the lease service does not take it",
        )
    else:
        yield problem(
            "engines.session",
            f"{name}: no session with the lease service"
            + (", and its metrics show no kvturn connector" if loaded is False else "")
            + _or_another(engine, pairs),
            _UNREADABLE,
            f"start it with {CONNECTOR}, kvturn_lease_endpoint and bidirectional_kv_xfer true",
        )


def _and(texts: Iterable[str]) -> str:
    return " and ".join(texts)


def _or_another(engine: EngineFacts, pairs: Sequence[_Pair]) -> str:
    """Says who may be the one without a session, where sessions tell no address."""
    if _surely_without(engine.probe):
        return ""
    alike = [pair for pair in pairs if _same_role(pair.address.role, engine.role)]
    if not alike:
        return ""
    names = listed(pair.session.name for pair in alike)
    others = listed(pair.address.name for pair in alike)
    return f" (unless it is {names}, which tells no address; then {others} has none)"


def _address(engine: EngineFacts, pairs: Sequence[_Pair], facts: Facts) -> Iterator[Finding]:
    """An engine's session says where its HTTP API is."""
    if engine.session is None or engine.url:
        return
    seen = f"{engine.name} does not say its HTTP address"
    fix = "set kvturn_http_address to http://HOST:PORT in its kv_connector_extra_config"
    if facts.router.engines is None:
        yield warning("engines.address", seen, f"{_NOT_PREFERRED} It must be named by flags.", fix)
    elif any(pair.session is engine for pair in pairs):
        addresses = listed(
            pair.address.url for pair in pairs if _same_role(pair.session.role, engine.role)
        )
        yield warning(
            "engines.address", f"{seen}; the router knows {addresses} by name", _NOT_PREFERRED, fix
        )
    else:
        why = f"Routers cannot find it by its session. {_NOT_PREFERRED}"
        yield problem("engines.address", seen, why, fix)


def _usable(engine: EngineFacts, facts: Facts) -> Iterator[Finding]:
    if facts.router.engines is None or not engine.url:
        return
    if engine.seen is None:
        yield warning(
            "engines.used",
            f"{engine.name} has a session, and the router does not know {engine.url}",
            "It is given no turns by this router.",
            "wait a second and look again; else see the router's log on this engine's address",
        )
    elif not engine.seen.usable:
        yield problem(
            "engines.used",
            f"{engine.name}: the router cannot use it: {engine.seen.reason or 'no reason given'}",
            "It is given no turns until it answers /health again.",
            f"start it, or make {engine.url} reachable from the router's machine",
        )


def _draining(
    engine: EngineFacts, engines: Sequence[EngineFacts], facts: Facts
) -> Iterator[Finding]:
    """Who drains it decides who can take it up again: the lease service, or this router alone."""
    at_session = engine.session is not None and engine.session.draining
    at_router = engine.seen is not None and engine.seen.draining
    # Ranks of data parallelism share an address, which drains while one of them does.
    by_sessions = any(
        one.session.draining for one in engines if one.session is not None and one.url == engine.url
    )
    if at_session:
        fix = f"kvturn drain {engine.name} --undo"
    elif at_router and not by_sessions:
        fix = (
            f"POST {facts.router.url}/kvturn/v1/engines/drain?url={engine.url}&draining=false with"
            " an operator's key"
        )
    else:
        return
    yield warning(
        "engines.used",
        f"{engine.name} is draining" + ("" if at_session else " at this router"),
        "It is given no new turns; what it holds can still be read.",
        f"take it up again: {fix}",
    )


def _heartbeat(engine: EngineFacts, interval_s: float) -> Iterator[Finding]:
    if engine.session is None:
        return
    age_s = engine.session.last_heartbeat_age.ToNanoseconds() / 1e9
    due_s = interval_s or HEARTBEAT_DEFAULT_S
    if age_s > HEARTBEAT_AGES_MAX * due_s:
        yield warning(
            "engines.heartbeat",
            f"{engine.name}: its last heartbeat is {age_s:.1f} s old, one is due each {due_s:g} s",
            "An engine that is silent for the session TTL loses its session, and its"
            " conversations are recomputed.",
            "give its process CPU, or raise --session-ttl of kvturn lease",
        )


def _expiries(engine: EngineFacts, ttl_s: float) -> Iterator[Finding]:
    session = engine.session
    if session is None or not session.HasField("last_expiry_age"):
        return
    ago_s = session.last_expiry_age.ToNanoseconds() / 1e9
    if ago_s < LATELY_S:
        yield warning(
            "engines.expiries",
            f"{engine.name} lost {counted(session.expired_session_count, 'session')}, the latest"
            f" {ago_s:.0f} s ago: it was not heard for the session TTL of {ttl_s:g} s",
            "Nothing that it holds can be read until it registers again, and it gives up what it"
            " holds if that takes longer than readers may (engine_lost, no_lease).",
            "give its process CPU, look for a network that drops, see whether kvturn lease itself"
            " was stopped for that long (then each engine lost one), or raise its --session-ttl",
        )
