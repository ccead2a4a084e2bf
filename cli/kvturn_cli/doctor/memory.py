"""KV memory: is there room for what is to be retained."""

from collections.abc import Iterator

from kvturn_cli.doctor.facts import EngineFacts, Facts
from kvturn_cli.doctor.finding import Finding, Severity, ok, warning

PRESSURE_SHARE_MAX = 0.2
PRESSURE_LEAST = 5
"""Releases by pressure below which a share says nothing."""
FREE_SHARE_MIN = 1 / 16
"""What decode keeps free for requests."""
_WHY = "What is given up for want of memory is computed anew when its conversation goes on."


def findings(facts: Facts) -> Iterator[Finding]:
    """Judges each decode engine by its last heartbeat and what it gave up since it started."""
    for engine in facts.of_role("decode"):
        if engine.session is not None and engine.session.HasField("memory"):
            yield _judged(engine, facts.policy)


def is_short(facts: Facts) -> bool:
    """Tells whether some decode engine has less memory than its retentions could use."""
    return any(one.severity is Severity.WARNING for one in findings(facts))


def _fix(name: str, policy: str, released: dict[str, int]) -> str:
    """Says how to make room. Where the idle time already ends as many, a shorter one only costs."""
    more = (
        f"give {name} more KV memory (--gpu-memory-utilization; VLLM_CPU_KVCACHE_SPACE on a CPU)"
        " or start another decode engine"
    )
    shorter = policy == "idle" and released.get("idle", 0) <= released.get("pressure", 0)
    return f"{more}; or lower --idle of kvturn lease" if shorter else more


def _judged(engine: EngineFacts, policy: str) -> Finding:
    assert engine.session is not None
    memory = engine.session.memory
    total, free, retained = memory.total_blocks, memory.free_blocks, memory.retained_blocks
    active = max(total - free - retained, 0)
    seen = f"{engine.name}: {retained:,} of {total:,} blocks retained, {active:,} active"
    released = engine.probe.released if engine.probe else {}
    pressure, ended = released.get("pressure", 0), sum(released.values())
    fix = _fix(engine.name, policy, released)
    if pressure >= PRESSURE_LEAST and pressure > PRESSURE_SHARE_MAX * ended:
        share = f"{pressure:,} of {ended:,} retentions were given up for memory since it started"
        return warning("memory.pressure", f"{seen}; {share}", _WHY, fix)
    if total and retained and free < FREE_SHARE_MIN * total:
        return warning("memory.free", f"{seen}, {free:,} free", _WHY, fix)
    gone = f"; {pressure:,} of {ended:,} retentions given up for memory" if ended else ""
    return ok("memory.pressure", f"{seen}, {free:,} free{gone}")
