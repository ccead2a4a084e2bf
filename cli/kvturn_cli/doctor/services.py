"""Lease services and router: are they there, who leads, do they know each other."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from kvturn_cli.doctor.facts import Facts, LeaseFacts, LeaseProcess, RouterFacts, RouterSettings
from kvturn_cli.doctor.finding import Finding, counted, listed, ok, problem, warning

if TYPE_CHECKING:
    from kvturn.v1.lease_pb2 import Router

ROUTERS_TOLD_MAX = 1_000
"""Routers that a lease service tells of."""
NO_REUSE = "Without a leader of the lease service nothing is reused; turns are recomputed."
STORE_UNAVAILABLE = "STORE_UNAVAILABLE"


def findings(facts: Facts) -> Iterator[Finding]:
    """Judges the router first: without one nothing else is served."""
    yield from _router(facts.router)
    if facts.stock:
        yield ok("lease.used", "not used: the router reuses stock engines' handles (--stock-reuse)")
        return
    yield from _processes(facts.lease)
    yield from _leaders(facts.lease)
    yield from _acquainted(facts)


# --- Router --------------------------------------------------------------------------------------


def _router(router: RouterFacts) -> Iterator[Finding]:
    if router.problem:
        yield problem(
            "router.reachable",
            f"{router.url}: {router.problem}",
            "Clients reach the engines through the router.",
            "start it (kvturn router, or kvturn up), or give --router URL"
            " (and --ca FILE where it is https)",
        )
        return
    version = f", version {router.settings.version}" if router.settings else ""
    yield ok("router.reachable", f"{router.url} answers{version}")
    if router.ready:
        yield ok("router.ready", "one prefill and one decode engine at least are usable")
    else:
        yield problem(
            "router.ready",
            f"not ready: {router.not_ready or 'it does not say why'}",
            "A turn needs a prefill and a decode engine.",
            _fix_of_unready(router.not_ready),
        )
    yield from _settings(router)


def _fix_of_unready(why: str) -> str:
    if "draining" in why:
        return "take them up again (kvturn drain ENGINE --undo), or start others"
    return (
        "start the engines it lacks, or name them: --prefill URL, --decode URL of kvturn router,"
        " or kvturn_http_address of the connector"
    )


def _settings(router: RouterFacts) -> Iterator[Finding]:
    settings = router.settings
    if settings is None:
        yield warning(
            "router.settings",
            f"not told: {router.hidden or 'the router is too old'}",
            "How the router was started could not be compared with the engines.",
            "give --admin-key, one of the router's --admin-keys-file; update a router that has no"
            " /kvturn/v1/settings",
        )
        return
    if not settings.lease and not settings.stock_reuse:
        yield problem(
            "router.lease",
            "the router has no lease service",
            "Without one it serves plain P/D and every turn is computed anew (not_offered).",
            "start kvturn router with --lease HOST:PORT",
        )
    if settings.plan == "recompute":
        yield problem(
            "router.plan",
            "--plan recompute: every turn is computed anew",
            "This plan is for baselines; it turns reuse off.",
            "start kvturn router with --plan auto",
        )
    else:
        fixed = "" if settings.plan == "auto" else ": one way is fixed, costs are not looked at"
        yield ok("router.plan", f"--plan {settings.plan}{fixed}")


# --- Lease services ------------------------------------------------------------------------------


def _processes(lease: LeaseFacts) -> Iterator[Finding]:
    reached = [one for one in lease.processes if not one.problem]
    for process in lease.processes:
        if not process.problem:
            continue
        seen = f"{process.endpoint}: {process.problem}"
        fix = f"start it there, or correct the address (known by {lease.asked_of})"
        if "refuses us" in process.problem:
            fix = "give --lease-token-file FILE with a token of an operator or a router"
        if reached:
            why = "While it is away there is one process less that could lead."
            yield warning("lease.reachable", seen, why, fix)
        else:
            yield problem("lease.reachable", seen, NO_REUSE, fix)
    for process in reached:
        yield from _described(process)


def _described(process: LeaseProcess) -> Iterator[Finding]:
    told = process.described
    if told is None:
        yield warning(
            "lease.version",
            f"{process.endpoint} does not say what it is: it is older than this doctor",
            "Its version, its times and who leads could not be judged.",
            "update the lease service",
        )
        return
    stands = "leads" if told.leads else "stands by"
    yield ok(
        "lease.reachable",
        f"{process.endpoint} {stands}, version {told.version}, {process.answer_ms:.1f} ms",
    )


def _leaders(lease: LeaseFacts) -> Iterator[Finding]:
    described = [one for one in lease.processes if one.described is not None]
    leaders = [one for one in described if one.leads]
    if not described:
        return
    if len(leaders) > 1:
        yield problem(
            "lease.leader",
            f"{listed(one.endpoint for one in leaders)} lead at the same time",
            "Each knows only the engines that came to it, so turns find nothing to reuse.",
            "give all of them the same --store etcd://HOST:PORT,... (without it each keeps its"
            " state in memory and leads alone)",
        )
    elif leaders:
        yield from _led(leaders[0], described)
    else:
        yield _nobody_leads(described)


def _led(leader: LeaseProcess, described: list[LeaseProcess]) -> Iterator[Finding]:
    told = leader.described
    assert told is not None
    others = len(described) - 1
    if not told.etcd_endpoints:
        yield ok("lease.leader", f"{leader.endpoint} leads, alone: its state is in memory")
    elif others:
        yield ok("lease.leader", f"{leader.endpoint} leads, {counted(others, 'process')} stand by")
    else:
        yield warning(
            "lease.leader",
            f"{leader.endpoint} leads and nobody is known to stand by",
            "With etcd another process could lead within seconds when this one dies.",
            "start another kvturn lease with the same --store and --secret-file, and name both in"
            " --lease of the router and kvturn_lease_endpoint of the engines",
        )


def _nobody_leads(described: list[LeaseProcess]) -> Finding:
    reasons = {one.described.refusal for one in described if one.described is not None}
    named = {one.described.leader for one in described if one.described and one.described.leader}
    if STORE_UNAVAILABLE in reasons:
        fix = "see the findings on etcd; kvturn lease needs a majority of its members"
        return problem("lease.leader", "nobody leads: etcd does not answer", NO_REUSE, fix)
    if named:
        return problem(
            "lease.leader",
            f"none of these leads; {listed(sorted(named))} is said to",
            "Whoever does not know the leader's address cannot ask it.",
            f"name it too: --lease {','.join(sorted(named))} of doctor, and in --lease of the"
            " router and kvturn_lease_endpoint of the engines",
        )
    return problem(
        "lease.leader",
        "nobody leads",
        NO_REUSE,
        "wait for the leadership's TTL (--leadership, 3 s) and look again; then see the logs of"
        " kvturn lease",
    )


def _acquainted(facts: Facts) -> Iterator[Finding]:
    """The leader tells its lists, and the router has a session with it."""
    settings, leader = facts.router.settings, facts.lease.leader
    if facts.lease.problem:
        yield warning(
            "lease.lists",
            f"the leader does not tell which engines it knows: {facts.lease.problem}",
            "Engines' settings and sessions could not be judged.",
            "give --lease-token-file FILE with a token of an operator or a router",
        )
    if settings is None or leader is None or not settings.lease:
        return
    yield _session_of_router(settings, leader.routers)


def _session_of_router(settings: RouterSettings, routers: Sequence["Router"]) -> Finding:
    """Judges whether our router is among those that the leader knows."""
    known = f"{counted(len(routers), 'router')} with a session"
    turns = f"{counted(sum(one.turns_in_flight for one in routers), 'turn')} in flight"
    ours = settings.router_id
    if any(one.router_id == ours for one in routers):
        return ok("lease.routers", f"{known}, ours among them, {turns}")
    if routers and (not ours or len(routers) >= ROUTERS_TOLD_MAX):
        return ok("lease.routers", f"{known}, {turns}; whether ours is among them is not told")
    others = f" ({counted(len(routers), 'other')})" * bool(routers)
    return problem(
        "lease.routers",
        f"our router has no session with the leader{others}; it is to ask {listed(settings.lease)}",
        "The router asks nobody who holds a conversation (lease_service_unreachable).",
        "see the router's log; check --lease, --lease-ca and --lease-token-file of kvturn router",
    )
