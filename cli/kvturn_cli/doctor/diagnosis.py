"""All checks in the order in which they are told. No I/O."""

from collections.abc import Iterator

from kvturn_cli.doctor import (
    alike,
    certificates,
    clocks,
    collector,
    etcd,
    fleet,
    memory,
    reach,
    services,
    times,
    traffic,
    transfer,
    turns,
    versions,
)
from kvturn_cli.doctor.facts import Facts
from kvturn_cli.doctor.finding import Finding

CHECKS = (
    services.findings,
    fleet.findings,
    versions.findings,
    alike.findings,
    times.findings,
    reach.findings,
    transfer.findings,
    etcd.findings,
    clocks.findings,
    memory.findings,
    certificates.findings,
    collector.findings,
    traffic.findings,
    turns.findings,
)


def diagnose(facts: Facts) -> Iterator[Finding]:
    """Yields every finding."""
    for check in CHECKS:
        yield from check(facts)
