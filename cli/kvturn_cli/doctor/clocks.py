"""Clocks: no rule depends on them, but the spans of a trace lie where they say."""

from collections.abc import Iterator

from kvturn_cli.doctor.facts import Clock, Facts
from kvturn_cli.doctor.finding import Finding, counted, ok, warning

SKEW_MAX_S = 0.1


def findings(facts: Facts) -> Iterator[Finding]:
    """Looks for two clocks that certainly differ by more than a trace can bear."""
    clocks = [one.clock for one in facts.lease.processes if one.clock]
    clocks += [facts.router.clock] if facts.router.clock else []
    clocks += [one.clock for one in facts.probes if one.clock]
    if not clocks:
        return
    clocks.append(Clock("this machine", 0.0, 0.0))
    ahead, behind = max(clocks, key=lambda one: one.low_s), min(clocks, key=lambda one: one.high_s)
    skew_s = ahead.low_s - behind.high_s
    if skew_s <= SKEW_MAX_S:
        widest_s = max(one.high_s - one.low_s for one in clocks)
        yield ok(
            "clocks.skew",
            f"{counted(len(clocks), 'clock')} agree, as far as can be told (each known to"
            f" {widest_s:.2g} s)",
        )
        return
    yield warning(
        "clocks.skew",
        f"the clock of {ahead.name} is at least {skew_s:.2g} s ahead of that of {behind.name}",
        "Leases do not depend on clocks, but spans of one trace then lie in the wrong order.",
        "keep time on all machines with chrony or systemd-timesyncd",
    )
