"""docs/metrics.md lists exactly the metrics that processes expose, with their meanings."""

from collections.abc import Sequence

import pytest
from test_docs import ROOT, names, rows, section

from kvturn.metrics import Family
from kvturn_connector.tally import FAMILIES as CONNECTOR
from kvturn_lease.metrics import FAMILIES as LEASE
from kvturn_router.metrics import FAMILIES as ROUTER

METRICS = ROOT / "docs" / "metrics.md"


def unit_of(family: Family) -> str:
    """Returns the unit that a name says; a count has none."""
    parts = family.name.split("_")
    return next((unit for unit in ("seconds", "bytes", "tokens", "blocks") if unit in parts), "")


def row_of(family: Family) -> list[str]:
    """Returns the line of a family in the table."""
    labels = " ".join(f"`{label}`" for label in family.labels)
    return [f"`{family.name}`", family.kind, labels, unit_of(family), family.about]


@pytest.mark.parametrize(
    ("title", "families"), [("Router", ROUTER), ("Lease service", LEASE), ("Engines", CONNECTOR)]
)
def test_the_table_is_what_the_code_says(title: str, families: Sequence[Family]) -> None:
    """Both ways, with type, labels, unit and meaning; what processes expose is compared with the
    code where they run."""
    own = [family for family in families if family.name.startswith("kvturn_")]
    assert rows(section(METRICS, title))[1:] == [row_of(family) for family in own]


def test_names_follow_the_conventions() -> None:
    """One prefix, base units, and no label that clients can fill."""
    for family in (*ROUTER, *LEASE, *CONNECTOR):
        assert family.name.startswith(("kvturn_", "process_"))
        assert not {"tenant", "model", "conversation", "lease"} & set(family.labels)
        assert names(row_of(family)[0]) == [family.name]
        assert "|" not in family.about
