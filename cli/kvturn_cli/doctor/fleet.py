"""Engines: are there enough, do all have a session, can all be used."""

from collections.abc import Iterator

from kvturn_cli.doctor.facts import EngineFacts, Facts
from kvturn_cli.doctor.finding import Finding, counted, listed, ok, problem, warning

HEARTBEAT_AGES_MAX = 2
"""Heartbeat intervals after which a heartbeat is late."""
LATELY_S = 3600.0
"""An expiry that is longer ago is not told of: whatever was amiss is over."""
CONNECTOR = (
    '--kv-transfer-config with "kv_connector": "KvturnConnector",'
    ' "kv_connector_module_path": "kvturn_connector.connector"'
)


def findings(facts: Facts) -> Iterator[Finding]:
    """Judges each engine that somebody knows."""
    if facts.router.engines is None and facts.lease.engines is None:
        return
    yield from _roles(facts)
    if not facts.stock and facts.lease.engines is not None:
        for engine in facts.engines:
            yield from _session(engine)
    for engine in facts.engines:
        yield from _usable(engine, facts)
    if facts.lease.leader is not None:
        times = facts.lease.leader.times
        for engine in facts.engines:
            yield from _heartbeat(engine, times.heartbeat_interval.ToSeconds())
            yield from _expiries(engine, times.session_ttl.ToNanoseconds() / 1e9)


def _roles(facts: Facts) -> Iterator[Finding]:
    for role in ("prefill", "decode"):
        engines = facts.of_role(role)
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


def _session(engine: EngineFacts) -> Iterator[Finding]:
    """An engine that the router knows has a session with the lease service."""
    if engine.session is None:
        loaded = engine.probe.connector_loaded if engine.probe else None
        if loaded:
            yield problem(
                "engines.session",
                f"{engine.name}: our connector is loaded and has no session",
                "Nothing that this engine holds can be found or read (not_offered, no_lease).",
                "set kvturn_lease_endpoint to the lease service's address and"
                " bidirectional_kv_xfer to true in its kv_connector_extra_config; if both are,"
                " its log says why the lease service does not take it",
            )
            return
        yield problem(
            "engines.session",
            f"{engine.name}: no session with the lease service"
            + (", and its metrics show no kvturn connector" if loaded is False else ""),
            "Nothing that this engine holds can be found or read (not_offered, no_lease).",
            f"start it with {CONNECTOR} and kvturn_lease_endpoint",
        )
    elif not engine.url:
        yield problem(
            "engines.address",
            f"{engine.name} does not say its HTTP address",
            "Routers cannot find it by its session, nor prefer it for what it holds.",
            "set kvturn_http_address to http://HOST:PORT in its kv_connector_extra_config",
        )


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
    elif engine.seen.draining or (engine.session is not None and engine.session.draining):
        yield warning(
            "engines.used",
            f"{engine.name} is draining",
            "It is given no new turns; what it holds can still be read.",
            "take it up again: DrainEngine with draining false, or POST"
            f" /kvturn/v1/engines/drain?url={engine.url}&draining=false",
        )


def _heartbeat(engine: EngineFacts, interval_s: float) -> Iterator[Finding]:
    if engine.session is None:
        return
    age_s = engine.session.last_heartbeat_age.ToNanoseconds() / 1e9
    if age_s > HEARTBEAT_AGES_MAX * max(interval_s, 1.0):
        yield warning(
            "engines.heartbeat",
            f"{engine.name}: its last heartbeat is {age_s:.1f} s old, one is due each"
            f" {max(interval_s, 1.0):g} s",
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
            f" {ago_s:.0f} s ago: it was silent for the session TTL of {ttl_s:g} s",
            "Nothing that it holds can be read until it registers again, and it gives up what it"
            " holds if that takes longer than readers may (engine_lost, no_lease).",
            "give its process CPU, look for a network that drops, or raise --session-ttl of"
            " kvturn lease",
        )
