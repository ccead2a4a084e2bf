"""KV memory: is there room for what is to be retained."""

from collections.abc import Iterator

from kvturn_cli.doctor.facts import EngineFacts, Facts
from kvturn_cli.doctor.finding import Finding, ok, warning

PRESSURE_SHARE_MAX = 0.2
PRESSURE_LEAST = 5
"""Releases by pressure below which a share says nothing."""
FREE_SHARE_MIN = 1 / 16
"""What decode keeps free for requests."""
_WHY = "What is given up for want of memory is computed anew when its conversation goes on."
_FIX = (
    "give {name} more KV memory (--gpu-memory-utilization; VLLM_CPU_KVCACHE_SPACE on a CPU), start"
    " another decode engine, or lower --idle of kvturn lease"
)


def findings(facts: Facts) -> Iterator[Finding]:
    """Judges each decode engine by its last heartbeat and what it gave up since it started."""
    for engine in facts.of_role("decode"):
        if engine.session is not None and engine.session.HasField("memory"):
            yield _judged(engine)


def _judged(engine: EngineFacts) -> Finding:
    assert engine.session is not None
    memory = engine.session.memory
    total, free, retained = memory.total_blocks, memory.free_blocks, memory.retained_blocks
    active = max(total - free - retained, 0)
    seen = f"{engine.name}: {retained:,} of {total:,} blocks retained, {active:,} active"
    released = engine.probe.released if engine.probe else {}
    pressure, ended = released.get("pressure", 0), sum(released.values())
    fix = _FIX.format(name=engine.name)
    if pressure >= PRESSURE_LEAST and pressure > PRESSURE_SHARE_MAX * ended:
        share = f"{pressure:,} of {ended:,} retentions were given up for memory since it started"
        return warning("memory.pressure", f"{seen}; {share}", _WHY, fix)
    if total and retained and free < FREE_SHARE_MIN * total:
        return warning("memory.free", f"{seen}, {free:,} free", _WHY, fix)
    gone = f"; {pressure:,} of {ended:,} retentions given up for memory" if ended else ""
    return ok("memory.pressure", f"{seen}, {free:,} free{gone}")
