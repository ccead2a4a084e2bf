"""Versions: which are supported, and which must be equal."""

import re
from collections.abc import Iterable, Iterator

from kvturn_cli.doctor.facts import EngineFacts, Facts
from kvturn_cli.doctor.finding import Finding, counted, listed, ok, problem, warning

VLLM_TESTED = ("0.29.0", "0.32.0")
VLLM_STREAMS_HANDLES = (0, 33)
"""From this version on vLLM's streams carry kv_transfer_params."""


def findings(facts: Facts) -> Iterator[Finding]:
    """Judges vLLM, NIXL, connectors, and kvturn's own parts among each other."""
    yield from _vllm(facts)
    if facts.stock:
        yield from _stock_streams(facts)
    sessions = [engine for engine in facts.engines if engine.session is not None]
    yield from _same(
        "versions.nixl",
        "NIXL",
        ((one.name, one.settings.nixl_version if one.settings else "") for one in sessions),
        "NIXL's wire format changes between versions, so that reads may fail.",
        "install the same nixl beside every vLLM",
    )
    yield from _own(facts, sessions)


def numbers(version: str) -> tuple[int, ...]:
    """Returns the leading numbers of a version, () if it has none."""
    found = re.match(r"v?(\d+(?:\.\d+)*)", version)
    return tuple(int(part) for part in found[1].split(".")) if found else ()


def _vllm(facts: Facts) -> Iterator[Finding]:
    versions: dict[str, list[str]] = {}
    for engine in facts.engines:
        if engine.vllm_version:
            versions.setdefault(engine.vllm_version, []).append(engine.name)
    if len(versions) > 1:
        seen = "; ".join(f"{one}: {listed(names)}" for one, names in sorted(versions.items()))
        yield problem(
            "versions.vllm",
            f"vLLM's version differs: {seen}",
            "vLLM's NIXL connector refuses KV of another version, in both directions.",
            "run the same vLLM on all engines that exchange KV",
        )
    for version, names in sorted(versions.items()):
        yield _supported(version, names)


def _supported(version: str, names: list[str]) -> Finding:
    seen = f"vLLM {version} on {listed(names)}"
    tested = [numbers(one) for one in VLLM_TESTED]
    if numbers(version) in tested:
        return ok("versions.vllm", seen)
    fix = f"run one of those that are tested: {', '.join(VLLM_TESTED)}"
    if numbers(version) and numbers(version) < tested[0]:
        why = "The connector needs interfaces that came with 0.29."
        return problem("versions.vllm", f"{seen} is too old", why, fix)
    why = "The connector uses some names inside vLLM that may differ in other versions."
    return warning("versions.vllm", f"{seen} is not tested", why, fix)


def _stock_streams(facts: Facts) -> Iterator[Finding]:
    for engine in facts.of_role("decode"):
        version = engine.vllm_version
        if numbers(version) and numbers(version) < VLLM_STREAMS_HANDLES:
            yield problem(
                "versions.stock_streams",
                f"{engine.name}: streams of vLLM {version} carry no kv_transfer_params",
                "With --stock-reuse a streamed turn then leaves no handle, and the next one is"
                " computed anew.",
                "run vLLM 0.33 or newer, or our connector with --lease in place of --stock-reuse",
            )


def _own(facts: Facts, sessions: list[EngineFacts]) -> Iterator[Finding]:
    """All parts of kvturn are of one version."""
    parts = [(f"connector of {one.name}", _connector(one)) for one in sessions]
    parts += [
        (f"lease service {one.endpoint}", one.described.version)
        for one in facts.lease.processes
        if one.described is not None
    ]
    leader = facts.lease.leader
    if leader is not None:
        parts += [(f"router {one.router_id}", one.version) for one in leader.routers]
    if facts.router.settings is not None:
        parts.append((f"router {facts.router.url}", facts.router.settings.version))
    yield from _same(
        "versions.kvturn",
        "kvturn",
        parts,
        "Parts of other versions work together only as far as both know of a thing.",
        "update all parts to one version: lease services first, then routers, then engines",
    )


def _connector(engine: EngineFacts) -> str:
    assert engine.session is not None
    return engine.session.description.connector_version


def _same(
    check: str, what: str, parts: Iterable[tuple[str, str]], why: str, fix: str
) -> Iterator[Finding]:
    versions: dict[str, list[str]] = {}
    for name, version in parts:
        if version:
            versions.setdefault(version, []).append(name)
    if len(versions) > 1:
        seen = "; ".join(f"{one}: {listed(names)}" for one, names in sorted(versions.items()))
        yield warning(check, f"{what}'s version differs: {seen}", why, fix)
    elif versions:
        [(version, names)] = versions.items()
        yield ok(check, f"{what} {version} in {counted(len(names), 'part')}")
