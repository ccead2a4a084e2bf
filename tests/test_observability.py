"""Prometheus' rules and Grafana's dashboards ask for what there is, and are well formed."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from typing import TYPE_CHECKING, Any

import pytest
from test_docs import ROOT

from kvturn_connector.tally import FAMILIES as CONNECTOR
from kvturn_connector.tally import LABELS, VERDICTS
from kvturn_lease.metrics import FAMILIES as LEASE
from kvturn_router.choice.plan import PlanKind
from kvturn_router.metrics import FAMILIES as ROUTER
from kvturn_router.turn.counts import Outcome

if TYPE_CHECKING:
    from collections.abc import Iterator

FOLDER = ROOT / "deploy/compose/observability"
RULES = FOLDER / "prometheus" / "rules.yml"
DASHBOARDS = {path.stem: path for path in sorted(FOLDER.glob("grafana/dashboards/*.json"))}
FAMILIES = {family.name: family for family in (*ROUTER, *LEASE, *CONNECTOR)}
OTHERS = {
    "up": set(),
    "ALERTS": {"alertname", "alertstate"},
    "kvturn:reuse:ratio5m": set(),
    "vllm:num_requests_running": {"model_name", "engine"},
    "haproxy_server_current_sessions": {"proxy", "server"},
    "haproxy_server_status": {"proxy", "server", "state"},
    "haproxy_frontend_http_responses_total": {"proxy", "code"},
}
"""Metrics that are not ours, or that rules record."""
OF_TARGETS = {"job", "instance", "worker", "le"}
ENGINE_LABELS = {"model_name", "engine"}
"""vLLM's own, on each of a connector's metrics."""
VALUES = {
    "plan": {*PlanKind, "none"},
    "verdict": set(VERDICTS.values()),
    "outcome": {*Outcome, *LABELS["kvturn_connector_reads_total"], "overdue", "sent", "dropped"},
    "reason": {*LABELS["kvturn_connector_releases_total"], "expired", "closed", "fenced"}
    | {"TOO_MANY_TURNS", "ENGINES_BUSY", "BODIES_EXHAUSTED", "NO_ENGINE"},
    "state": {"usable", "ejected", "draining", "session", "away", "UP"},
    "use": {"active", "retained", "free"},
    "source": {"reused", "local", "computed"},
    "job": {"kvturn-router", "kvturn-lease", "vllm", "haproxy"},
}
NAME = r"(?<![\w.])([a-zA-Z_:][a-zA-Z0-9_:]*)"


def expressions() -> Iterator[tuple[str, str]]:
    """Yields what rules and dashboards ask, with where that stands."""
    text = RULES.read_text()
    for found in re.finditer(r"^ +expr: (?:>-\n((?: {10,}.*\n)+)|(.*)$)", text, re.MULTILINE):
        yield "rules.yml", (found[1] or found[2]).strip()
    for name, path in DASHBOARDS.items():
        for one in targets(json.loads(path.read_text())):
            yield f"{name}.json", one["expr"]


def targets(board: dict[str, Any]) -> list[dict[str, Any]]:
    return [one for panel in board["panels"] for one in panel.get("targets", [])]


def selectors(expression: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Yields each metric that an expression names, with its matchers by label."""
    bare = re.sub(r"\[[^]]*\]|\b(?:by|on) ?\([^)]*\)", "", expression)
    for name, matchers, called in re.findall(rf"{NAME}(\{{[^}}]*\}})?( *\()?", bare):
        if not called and name not in ("and", "or", "offset"):
            yield name, dict(re.findall(r'(\w+)(?:=|=~|!=|!~)"([^"]*)"', matchers))


def family_of(name: str) -> str:
    """Returns the family of a sample's name."""
    for family in (name, re.sub(r"_(bucket|sum|count)$", "", name)):
        if family in FAMILIES and (family == name or FAMILIES[family].kind == "histogram"):
            return family
    return name


def labels_of(name: str) -> set[str]:
    """Returns the labels that a sample of that name can have. Raises KeyError if there is none."""
    if name in OTHERS:
        return OTHERS[name] | OF_TARGETS
    family = FAMILIES[family_of(name)]
    more = ENGINE_LABELS if family in CONNECTOR else set()
    return {*family.labels, *OF_TARGETS, *more}


def test_there_are_the_dashboards_that_are_promised() -> None:
    """Fleet, leases and reuse; each looks at something."""
    assert set(DASHBOARDS) == {"fleet", "leases", "reuse"}
    assert len(list(expressions())) > 100
    names = {name for _, expression in expressions() for name, _ in selectors(expression)}
    asked = {family_of(name) for name in names}
    assert len(asked & set(FAMILIES)) > 40


@pytest.mark.parametrize(("place", "expression"), list(expressions()))
def test_what_is_asked_for_is_there(place: str, expression: str) -> None:
    """Every metric is in the documented list, with these labels and values."""
    found = list(selectors(expression))
    assert found, f"{place}: {expression} names no metric"
    grouped = re.findall(r"\b(?:by|on) ?\(([^)]*)\)", expression)
    labels = {label.strip() for group in grouped for label in group.split(",") if label.strip()}
    for name, matchers in found:
        known = labels_of(name)
        assert set(matchers) <= known, f"{place}: {name} has no label {set(matchers) - known}"
        for label, pattern in matchers.items():
            if label in VALUES:
                values = {part for part in pattern.split("|") if re.fullmatch(r"[\w-]+", part)}
                assert values <= VALUES[label], f"{place}: {label}={pattern}"
    everywhere = set.union(*(labels_of(name) for name, _ in found))
    assert labels <= everywhere, f"{place}: nothing in {expression} has {labels - everywhere}"


def test_a_metric_that_is_not_there_would_be_found() -> None:
    """What the other tests rely on: names, matchers and labels are found in expressions."""
    asked = (
        'sum by (le, plan) (rate(kvturn_router_gone_bucket{outcome="ok"}[5m])) > on () vector(0)'
    )
    assert list(selectors(asked)) == [("kvturn_router_gone_bucket", {"outcome": "ok"})]
    with pytest.raises(KeyError):
        labels_of("kvturn_router_gone_bucket")
    assert labels_of("kvturn_router_turns_total") >= {"plan", "verdict", "outcome", "instance"}
    with pytest.raises(KeyError):
        labels_of("kvturn_router_turns_total_sum")


@pytest.mark.parametrize("name", list(DASHBOARDS))
def test_a_dashboard_is_one_that_grafana_takes(name: str) -> None:
    """Panels with ids and places of their own, on the provisioned source, each with a title."""
    board = json.loads(DASHBOARDS[name].read_text())
    assert board["uid"] == f"kvturn-{name}"
    sources = (FOLDER / "grafana/provisioning/datasources/kvturn.yaml").read_text()
    panels = board["panels"]
    ids = [panel["id"] for panel in panels]
    assert len(set(ids)) == len(ids)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, f"{panel['title']} lies on another panel"
        taken |= cells
        assert panel["title"]
        if panel["type"] == "row":
            continue
        assert panel["targets"]
        assert f"uid: {panel['datasource']['uid']}\n" in sources
        assert panel["fieldConfig"]["defaults"]["unit"]
        letters = [one["refId"] for one in panel["targets"]]
        assert len(set(letters)) == len(letters)
        for one in panel["targets"]:
            assert f"uid: {one['datasource']['uid']}\n" in sources


@pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool: apt install prometheus")
@pytest.mark.parametrize(
    "command", [("check", "config", "prometheus.yml"), ("test", "rules", "rules_test.yml")]
)
def test_prometheus_takes_its_configuration_and_fires_its_alerts(command: tuple[str, ...]) -> None:
    """As Prometheus' own tool reads them; rules_test.yml says what each alert must do when."""
    done = subprocess.run(
        ["promtool", *command], cwd=RULES.parent, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_is_tested_to_fire() -> None:
    """An alert that nobody has seen fire may never do."""
    alerts = re.findall(r"- alert: (\w+)", RULES.read_text())
    scenarios = (RULES.parent / "rules_test.yml").read_text()
    tested = re.findall(r"labels: '\{alertname=\"(\w+)\"\}', value: [1-9]", scenarios)
    assert len(alerts) == len(set(alerts))
    assert set(tested) == set(alerts)
