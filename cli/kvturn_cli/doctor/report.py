"""Findings as a person and as a program read them. No I/O."""

import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from kvturn_cli.doctor.facts import Facts
from kvturn_cli.doctor.finding import Finding, Severity, counted

TITLES = {
    "router": "Router",
    "lease": "Lease service",
    "engines": "Engines",
    "versions": "Versions",
    "alike": "Prefill and decode",
    "times": "Times",
    "reach": "Addresses",
    "transfer": "KV transfer",
    "etcd": "etcd",
    "clocks": "Clocks",
    "memory": "KV memory",
    "tls": "Certificates",
    "traces": "Traces",
    "traffic": "Clients' turns",
    "turns": "Two turns of our own",
}
MARKS = {Severity.OK: "ok", Severity.WARNING: "warning", Severity.PROBLEM: "PROBLEM"}
WIDTH = 100
_INDENT = " " * 10


def lines(findings: Sequence[Finding]) -> Iterator[tuple[str, Severity | None]]:
    """Yields the report line by line, each with how bad it is; titles are not bad."""
    groups: dict[str, list[Finding]] = {}
    for finding in findings:
        groups.setdefault(finding.group, []).append(finding)
    for group, found in groups.items():
        yield TITLES.get(group, group), None
        for finding in found:
            yield from _lines_of(finding)
    yield "", None
    yield summary(findings), None


def _lines_of(finding: Finding) -> Iterator[tuple[str, Severity]]:
    head = f"  {MARKS[finding.severity]:<8}"
    texts = [
        (head, finding.seen),
        (f"{_INDENT}why: ", finding.why),
        (f"{_INDENT}fix: ", finding.fix),
    ]
    for start, text in texts:
        if text:
            rest = " " * len(start)
            # Commands and addresses are to be copied: they are not broken.
            for line in textwrap.wrap(
                text,
                WIDTH,
                initial_indent=start,
                subsequent_indent=rest,
                break_long_words=False,
                break_on_hyphens=False,
            ):
                yield line, finding.severity


def summary(findings: Sequence[Finding]) -> str:
    """Returns how much was found, in one line."""
    counts = Counter(finding.severity for finding in findings)
    parts = [
        counted(counts[Severity.PROBLEM], "problem"),
        counted(counts[Severity.WARNING], "warning"),
    ]
    return f"{', '.join(parts)}, {counts[Severity.OK]} in order"


def document(facts: Facts, findings: Sequence[Finding]) -> dict[str, Any]:
    """Returns the report for --json."""
    return {
        "findings": [{"group": one.group, **asdict(one)} for one in findings],
        "turns": [asdict(turn) for turn in facts.turns or ()],
        "summary": {
            severity.value: sum(one.severity == severity for one in findings)
            for severity in Severity
        },
    }
