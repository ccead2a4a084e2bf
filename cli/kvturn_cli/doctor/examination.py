"""Gathers all facts: what can be asked at once is, and every question has a deadline."""

import asyncio
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar
from urllib.parse import urlsplit

from kvturn.lease_access import LeaseAccess
from kvturn_cli.doctor.facts import (
    CollectorFacts,
    EtcdFacts,
    Facts,
    HostFacts,
    LeaseFacts,
    RouterFacts,
    place_of,
)
from kvturn_cli.doctor.probes.certificates import Server, probe_certificates
from kvturn_cli.doctor.probes.collector import CollectorAccess, probe_collector
from kvturn_cli.doctor.probes.engines import ENGINES_MAX, probe_engine, probe_side_channels
from kvturn_cli.doctor.probes.etcd import probe_etcd
from kvturn_cli.doctor.probes.host import efa_provider, this_host
from kvturn_cli.doctor.probes.lease import probe_lease
from kvturn_cli.doctor.probes.router import RouterAccess, probe_router
from kvturn_cli.doctor.probes.turns import drive_turns, lengths
from kvturn_cli.doctor.transfer import LIBFABRIC
from kvturn_lease.etcd.config import EtcdConfig

T = TypeVar("T")

USUAL_LEASE = "127.0.0.1:7600"


@dataclass(frozen=True)
class Scope:
    """What to look at. Empty addresses are learned from the router and the lease service."""

    router: RouterAccess
    lease: Sequence[str] = ()
    lease_access: LeaseAccess = field(default_factory=LeaseAccess)
    etcd: EtcdConfig | None = None
    """None: etcd as the lease service names it, with `etcd_access`."""
    etcd_access: EtcdConfig | None = None
    """Certificates and user for etcd; its endpoints are not looked at."""
    otlp: str = ""
    collector_access: CollectorAccess = field(default_factory=lambda: CollectorAccess({}))
    engine_tls: ssl.SSLContext | None = None
    from_here: bool = False
    turns: bool = True
    model: str = ""
    timeout_s: float = 3.0
    """Of each question."""
    turn_timeout_s: float = 120.0
    """Of each turn."""


async def examine(scope: Scope, tell: Callable[[str], None]) -> Facts:
    """Returns the facts; `tell` is told what is being asked."""
    tell(f"asking the router at {scope.router.url}")
    router = await probe_router(scope.router, scope.timeout_s)
    tell("asking the lease service")
    lease = await _lease(scope, router)
    facts = Facts(router, lease, host=this_host(from_here=scope.from_here))
    tell(f"asking {len(facts.engines)} engines, etcd and the collector")
    facts = await _surroundings(scope, facts)
    if not scope.turns:
        return facts
    return await _turns(scope, facts, tell)


async def _lease(scope: Scope, router: RouterFacts) -> LeaseFacts:
    settings = router.settings
    if scope.lease:
        endpoints, asked_of = scope.lease, "--lease"
    elif settings is not None:
        endpoints, asked_of = settings.lease, "--lease of the router"
    else:
        endpoints, asked_of = (USUAL_LEASE,), "the usual address"
    if not endpoints:
        return LeaseFacts()
    return await probe_lease(endpoints, asked_of, scope.lease_access, scope.timeout_s)


async def _surroundings(scope: Scope, facts: Facts) -> Facts:
    urls = list({place_of(one.url): one.url for one in facts.engines if one.url}.values())
    probes, channels, etcd, collector, host, certificates = await asyncio.gather(
        asyncio.gather(
            *(probe_engine(url, scope.engine_tls, scope.timeout_s) for url in urls[:ENGINES_MAX])
        ),
        probe_side_channels(
            (facts.lease.engines or ())[:ENGINES_MAX], facts.host.network, scope.timeout_s
        ),
        _etcd(scope, facts),
        _collector(scope, facts),
        _host(scope, facts),
        probe_certificates(_tls_servers(scope, facts, urls[:ENGINES_MAX]), scope.timeout_s),
    )
    return replace(
        facts,
        probes=probes,
        side_channels=channels,
        etcd=etcd,
        collector=collector,
        host=host,
        certificates=certificates,
    )


def _tls_servers(scope: Scope, facts: Facts, engines: Sequence[str]) -> list[Server]:
    """Returns who is reached over TLS: the router, engines, processes of the lease service."""
    servers = []
    for url, tls in (
        (scope.router.url, scope.router.tls),
        *((e, scope.engine_tls) for e in engines),
    ):
        parts = urlsplit(url)
        if parts.scheme == "https":
            servers.append(Server(url, parts.hostname or "", parts.port or 443, tls))
    context = scope.lease_access.context
    if context is not None:
        for process in facts.lease.processes:
            host, _, port = process.endpoint.rpartition(":")
            name = f"lease service {process.endpoint}"
            servers.append(Server(name, host.strip("[]"), int(port), context))
    return servers


async def _etcd(scope: Scope, facts: Facts) -> EtcdFacts | None:
    config = scope.etcd
    if config is None:
        named = next(
            (
                tuple(one.described.etcd_endpoints)
                for one in facts.lease.processes
                if one.described is not None and one.described.etcd_endpoints
            ),
            (),
        )
        if not named:
            return None
        config = replace(scope.etcd_access or EtcdConfig(endpoints=named), endpoints=named)
    return await probe_etcd(config, scope.timeout_s)


async def _collector(scope: Scope, facts: Facts) -> CollectorFacts | None:
    settings = facts.router.settings
    endpoint, protocol, asked_of = scope.otlp, "", "--otlp"
    if not endpoint and settings is not None:
        endpoint, protocol = settings.otlp_endpoint or "", settings.otlp_protocol or ""
        asked_of = "--otlp-endpoint of the router"
    if not endpoint:
        return None
    access = scope.collector_access
    return await probe_collector(endpoint, protocol, asked_of, scope.timeout_s, access)


async def _host(scope: Scope, facts: Facts) -> HostFacts:
    """Asks libfabric only where an engine on this machine asks for it."""
    asked = any(
        one.settings is not None
        and LIBFABRIC in one.settings.nixl_backends
        and one.settings.machine == facts.host.machine
        for one in facts.engines
    )
    if not asked:
        return facts.host
    found, problem = await efa_provider(scope.timeout_s)
    return replace(facts.host, efa=found, efa_problem=problem)


async def _turns(scope: Scope, facts: Facts, tell: Callable[[str], None]) -> Facts:
    router = facts.router
    if router.problem or not router.ready:
        return replace(facts, turns_skipped="the router is not there or not ready")
    model = scope.model or next(iter(router.models), "")
    if not model:
        why = router.models_problem or "the router serves no model"
        return replace(facts, turns_skipped=why)
    tell(f"driving two turns with {model}")
    turns = await drive_turns(scope.router, model, lengths(facts), scope.turn_timeout_s)
    return replace(facts, turns=turns)
