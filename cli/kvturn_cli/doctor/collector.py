"""Where traces go: does the collector answer in what it is spoken to."""

from collections.abc import Iterator

from kvturn.otlp import GRPC, HTTP
from kvturn_cli.doctor.facts import Facts
from kvturn_cli.doctor.finding import Finding, counted, ok, warning

_PORTS = {GRPC: 4317, HTTP: 4318}
_WHY = "Turns are served all the same, but leave no trace."


def findings(facts: Facts) -> Iterator[Finding]:
    """Judges the collector if one is known, and which engines trace."""
    collector = facts.collector
    if collector is None:
        yield ok("traces.collector", "no collector is known: --otlp-endpoint of kvturn router")
    elif collector.refused:
        yield warning(
            "traces.collector",
            f"{collector.endpoint} (known by {collector.asked_of}) refuses us: {collector.problem}",
            _WHY,
            "set OTEL_EXPORTER_OTLP_HEADERS (NAME=VALUE,...) to what it wants, for doctor as for"
            " routers, lease services and engines",
        )
    elif collector.problem:
        yield warning(
            "traces.collector",
            f"{collector.endpoint} (known by {collector.asked_of}) answers neither in"
            f" {collector.wanted} nor in the other protocol: {collector.problem}",
            _WHY,
            "start the collector (kvturn otlp is a small one), or correct --otlp-endpoint",
        )
    elif collector.protocol != collector.wanted:
        yield warning(
            "traces.collector",
            f"{collector.endpoint} (known by {collector.asked_of}) answers in"
            f" {collector.protocol}, not in {collector.wanted}",
            _WHY,
            f"--otlp-protocol {collector.protocol} on routers and lease services,"
            f" kvturn_otlp_protocol on engines; or give --otlp-endpoint and kvturn_otlp_endpoint"
            f" the collector's port for {collector.wanted} ({_PORTS[collector.wanted]} as a rule)",
        )
    else:
        yield ok(
            "traces.collector",
            f"{collector.endpoint} took an empty export in {collector.protocol} within"
            f" {collector.answer_ms:.1f} ms",
        )
    untraced = [one for one in facts.engines if one.settings and not one.settings.traced]
    if collector is not None and untraced:
        yield ok(
            "traces.engines",
            f"{counted(len(untraced), 'engine')} without vLLM's own spans"
            " (--otlp-traces-endpoint); kvturn's do not need them",
        )
