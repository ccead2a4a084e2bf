"""Addresses that engines announce: can the other side reach them.

Doctor tries them from where it runs. That proves something for machines that reach the same
networks, and no more; what engines tell of the networks that they see says when an address cannot
be right, wherever doctor runs.
"""

from collections.abc import Iterator, Sequence

from kvturn.address import is_loopback, is_unspecified
from kvturn_cli.doctor.facts import EngineFacts, Facts, place_of
from kvturn_cli.doctor.finding import Finding, counted, listed, ok, problem, warning

_OTHER_SIDE = "Prefill and decode read each other's KV through it."
_HTTP = "Routers send turns there."
SIDE_CHANNEL_FIX = (
    "set VLLM_NIXL_SIDE_CHANNEL_HOST of {name} to an address that the other engines reach"
)
HTTP_FIX = "set kvturn_http_address of {name} to an address that routers reach"


def findings(facts: Facts) -> Iterator[Finding]:
    """Judges announced addresses by themselves, then those that were tried."""
    sessions = [engine for engine in facts.engines if engine.session is not None]
    for engine in sessions:
        yield from _announced(engine, sessions)
    yield from _tried_side_channels(facts)
    yield from _tried_http(facts)


def host_of(url: str) -> str:
    """Returns the host of a base URL."""
    rest = url.partition("://")[2].partition("/")[0]
    return rest.rpartition(":")[0] if rest.rpartition(":")[2].isdigit() else rest


def networks(engines: Sequence[EngineFacts]) -> set[str]:
    """Returns what tells apart the networks that engines are on, as far as is known."""
    told = {one.settings.network for one in engines if one.settings and one.settings.network}
    if told and all(one.settings and one.settings.network for one in engines):
        return told
    return {host_of(one.url) for one in engines if one.url and not is_loopback(host_of(one.url))}


def _announced(engine: EngineFacts, sessions: Sequence[EngineFacts]) -> Iterator[Finding]:
    assert engine.session is not None
    shared = len(networks(sessions)) <= 1
    described = engine.session.description
    addresses = [("reach.side_channel", "NIXL's side channel", _OTHER_SIDE, SIDE_CHANNEL_FIX)]
    hosts = [described.nixl.host]
    if engine.url:
        addresses.append(("reach.http", "its HTTP address", _HTTP, HTTP_FIX))
        hosts.append(host_of(engine.url))
    for (check, what, why, fix), host in zip(addresses, hosts, strict=True):
        seen = f"{engine.name} announces {host or 'nothing'} for {what}"
        if is_unspecified(host):
            yield problem(
                check, f"{seen}, which nobody can connect to", why, fix.format(name=engine.name)
            )
        elif is_loopback(host) and not shared:
            yield problem(
                check,
                f"{seen}, and the engines are on {counted(len(networks(sessions)), 'network')}",
                why,
                fix.format(name=engine.name),
            )


def _tried_side_channels(facts: Facts) -> Iterator[Finding]:
    reached = []
    for channel in facts.side_channels:
        address = f"{channel.host}:{channel.port}"
        if not channel.tried:
            yield ok(
                "reach.side_channel",
                f"{channel.engine_id}: {address} not tried, it means another machine there",
            )
        elif channel.problem:
            yield _unreachable(
                facts,
                "reach.side_channel",
                channel.engine_id,
                f"{channel.engine_id}: {address} of its NIXL side channel: {channel.problem}",
                _OTHER_SIDE,
                f"{SIDE_CHANNEL_FIX.format(name=channel.engine_id)}, and open port {channel.port}",
            )
        else:
            reached.append(f"{channel.engine_id} ({address})")
    if reached:
        yield ok("reach.side_channel", f"reached from here: {listed(reached)}")
    told = sum(
        one.session is not None and one.session.description.HasField("nixl")
        for one in facts.engines
    )
    yield from _not_tried("reach.side_channel", told, len(facts.side_channels))


def _tried_http(facts: Facts) -> Iterator[Finding]:
    reached = []
    for engine in facts.engines:
        if engine.probe is None:
            continue
        if not engine.probe.problem:
            reached.append(f"{engine.name} ({engine.url})")
            continue
        yield _unreachable(
            facts,
            "reach.http",
            engine.name,
            f"{engine.name}: {engine.url}: {engine.probe.problem}",
            _HTTP,
            f"start it, open its port, or {HTTP_FIX.format(name=engine.name)}",
        )
    if reached:
        yield ok("reach.http", f"reached from here: {listed(reached)}")
    addresses = {place_of(engine.url) for engine in facts.engines if engine.url}
    yield from _not_tried("reach.http", len(addresses), len(facts.probes))


def _not_tried(check: str, known: int, tried: int) -> Iterator[Finding]:
    """Tells that of a large fleet only the first ones are asked."""
    if tried < known:
        yield ok(check, f"{known - tried:,} of {known:,} addresses not tried: the fleet is large")


def _unreachable(facts: Facts, check: str, name: str, seen: str, why: str, fix: str) -> Finding:
    """A problem where doctor stands for the other side, a warning elsewhere."""
    if facts.host.from_here or _runs_beside_another(facts, name):
        return problem(check, f"{seen} (from here, where other engines run)", why, fix)
    again = "run kvturn doctor --from-here --no-turns on the other engine's machine to be sure; "
    return warning(
        check, f"{seen} (from here, which may not be where engines run)", why, again + fix
    )


def _runs_beside_another(facts: Facts, name: str) -> bool:
    """Tells whether another engine sees the same network as doctor does."""
    ours = facts.host.network
    return bool(ours) and any(
        one.settings is not None and one.settings.network == ours and one.name != name
        for one in facts.engines
    )
