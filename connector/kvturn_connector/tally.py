"""What an engine's connector counts, and under which names vLLM's `/metrics` shows it. No vllm.

vLLM takes statistics of a step as lists of numbers by key; there is one key for each value that a
family's label has. docs/metrics.md says what each number means.
"""

from __future__ import annotations

from typing import Final

from kvturn.metrics import Family
from kvturn.v1 import common_pb2, lease_pb2
from kvturn_connector.config import SWITCHES

_SHORT_S: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)
_READ_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
_BYTES: Final = tuple(float(1 << power) for power in range(16, 37, 2))


def _named(prefix: str, items: list[tuple[str, int]]) -> dict[int, str]:
    return {value: name.removeprefix(prefix).lower() for name, value in items if value}


REASONS: Final = _named("RELEASE_REASON_", common_pb2.ReleaseReason.items())
OUTLOOKS: Final = _named("OUTLOOK_", lease_pb2.Outlook.items())
OUTCOMES: Final = _named("READ_OUTCOME_", lease_pb2.ReadOutcome.items())
VERDICTS: Final = _named("VERDICT_", common_pb2.Verdict.items())

RETAINED_BLOCKS: Final = Family(
    "kvturn_connector_retained_blocks",
    "gauge",
    "Blocks of KV memory that decode holds for later turns.",
)
RETENTIONS: Final = Family(
    "kvturn_connector_retentions_total",
    "counter",
    "Finished turns whose blocks decode has held.",
)
RELEASES: Final = Family(
    "kvturn_connector_releases_total",
    "counter",
    "Retentions whose blocks went back to the pool, by reason.",
    ("reason",),
)
GIVEN_UP: Final = Family(
    "kvturn_connector_given_up_total",
    "counter",
    "Retentions given up for requests that needed their memory, by what the lease service expected "
    "of their conversations.",
    ("outlook",),
)
VERDICTS_GIVEN: Final = Family(
    "kvturn_connector_prefill_verdicts_total",
    "counter",
    "Prefill legs that came with a lease, or whose model cannot be reused, by verdict.",
    ("verdict",),
)
READS: Final = Family(
    "kvturn_connector_reads_total",
    "counter",
    "Reads that were granted to prefill, by how they ended: completed, not_read (given back), "
    "failed or too_long.",
    ("outcome",),
)
READ: Final = Family(
    "kvturn_connector_read_seconds",
    "histogram",
    "Time of a completed read from decode, its slowest rank's.",
    (),
    _READ_S,
)
READ_BYTES: Final = Family(
    "kvturn_connector_read_bytes",
    "histogram",
    "Bytes of a completed read from decode, of all ranks.",
    (),
    _BYTES,
)
QUESTION: Final = Family(
    "kvturn_connector_question_seconds",
    "histogram",
    "Time from prefill's question for a lease to the lease service's answer.",
    (),
    _SHORT_S,
)
DIGEST: Final = Family(
    "kvturn_connector_digest_seconds",
    "histogram",
    "Time that the lease client's thread took to digest the tokens of a turn.",
    (),
    _SHORT_S,
)
SESSION_UP: Final = Family(
    "kvturn_connector_session_up",
    "gauge",
    "1 while the engine has a session with the lease service, as of its latest step: an idle "
    "engine takes none.",
)
OFF: Final = Family(
    "kvturn_connector_off",
    "gauge",
    "1 for a setting that is not given, so that the connector does what the stock one does and "
    "nothing is retained or read.",
    ("setting",),
)
SPANS: Final = Family(
    "kvturn_connector_spans_total",
    "counter",
    "Spans by what became of them: sent, or dropped because they did not fit or could not be "
    "delivered.",
    ("outcome",),
)

FAMILIES: Final = (
    RETAINED_BLOCKS,
    RETENTIONS,
    RELEASES,
    GIVEN_UP,
    VERDICTS_GIVEN,
    READS,
    READ,
    READ_BYTES,
    QUESTION,
    DIGEST,
    SESSION_UP,
    OFF,
    SPANS,
)
LABELS: Final = {
    RELEASES.name: tuple(REASONS.values()),
    GIVEN_UP.name: tuple(OUTLOOKS.values()),
    VERDICTS_GIVEN.name: tuple(VERDICTS.values()),
    READS.name: tuple(OUTCOMES.values()),
    OFF.name: SWITCHES,
    SPANS.name: ("sent", "dropped"),
}
"""All values of a family's label, where it has one."""


def key_of(family: Family, label: str = "") -> str:
    """Returns under which key a family's numbers travel, with one value of its label."""
    return f"{family.name} {label}" if label else family.name


def labels_of(family: Family) -> tuple[str, ...]:
    """Returns the values of a family's label; one empty for none."""
    return LABELS.get(family.name, ("",))


KEYS: Final = tuple(
    key_of(family, label)
    for family in FAMILIES
    if family is not OFF  # known from the start
    for label in labels_of(family)
)
