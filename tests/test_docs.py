"""The documents say what the code does: modules, settings, verdicts, names, links."""

import importlib
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from kvturn.v1 import common_pb2, lease_pb2
from kvturn_cli.__main__ import COMMANDS
from kvturn_cli.doctor.report import TITLES
from kvturn_cli.doctor.versions import VLLM_TESTED
from kvturn_connector.config import ConfigError, ConnectorConfig
from kvturn_router.verdict import Verdict

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
ARCHITECTURE = ROOT / "ARCHITECTURE.md"
ROUTER_README = ROOT / "services" / "router" / "README.md"
LEASE_README = ROOT / "services" / "lease" / "README.md"
CONNECTOR_README = ROOT / "connector" / "README.md"
CLI_README = ROOT / "cli" / "README.md"
TURNS = ROOT / "docs" / "turns.md"
DOCTOR = ROOT / "docs" / "doctor.md"
SECURITY = ROOT / "docs" / "security.md"
BAREMETAL = ROOT / "deploy" / "baremetal" / "README.md"
COMPOSE = ROOT / "deploy" / "compose" / "README.md"
DOCUMENTS = (
    README,
    ARCHITECTURE,
    ROOT / "CHANGELOG.md",
    ROUTER_README,
    LEASE_README,
    CONNECTOR_README,
    CLI_README,
    TURNS,
    DOCTOR,
    SECURITY,
    ROOT / "docs" / "clients.md",
    ROOT / "docs" / "ui.md",
    ROOT / "docs" / "metrics.md",
    ROOT / "docs" / "operations.md",
    ROOT / "docs" / "tutorial.md",
    *sorted((ROOT / "docs" / "api").glob("*.md")),
    BAREMETAL,
    COMPOSE,
)
PACKAGES = (
    "connector/kvturn_connector",
    "services/lease/kvturn_lease",
    "services/lease/kvturn_lease/etcd",
    "services/router/kvturn_router",
    "services/router/kvturn_router/front",
    "services/router/kvturn_router/turn",
    "services/router/kvturn_router/leases",
    "services/router/kvturn_router/choice",
    "services/router/kvturn_router/engines",
    "services/router/kvturn_router/request",
    "services/router/kvturn_router/telemetry",
    "cli/kvturn_cli",
    "cli/kvturn_cli/doctor",
    "cli/kvturn_cli/doctor/probes",
)
UPSTREAM_KEYS = {"bidirectional_kv_xfer", "kv_recompute_threshold", "decoder_kv_blocks_ttl"}
FLAGS_OF_OTHERS = {
    "--allowed-media-domains",
    "--cacert",
    "--fail-with-body",
    "--retry",
    "--retry-all-errors",
    "--retry-delay",
    "--auto-compaction-mode",
    "--auto-compaction-retention",
    "--enable-prompt-tokens-details",
    "--kv-transfer-config",
    "--no-enable-prefix-caching",
    "--otlp-traces-endpoint",
    "--branch",
    "--depth",
    "--entrypoint",
    "--home-dir",
    "--now",
    "--profile",
    "--rm",
    "--send-conversation-id",
    "--system",
    "--volumes",
}
SCRIPTS = sorted(BAREMETAL.parent.glob("*.sh"))
FOLDERS = ("protos", "services", "connector", "cli", "tests", "scripts", "requirements")
PLACES = {
    "lease/": "services/lease/kvturn_lease/",
    "router/": "services/router/kvturn_router/",
    "cli/": "cli/",
    "protos/": "protos/",
    "": "connector/kvturn_connector/",
}


def section(document: Path, title: str) -> str:
    """Returns the text under a heading, up to the next one of the same or a higher level."""
    found = re.search(rf"^(#+) {re.escape(title)}\n", document.read_text(), re.MULTILINE)
    assert found is not None, f"{document.name} has no heading {title!r}"
    rest = document.read_text()[found.end() :]
    return re.split(rf"^#{{1,{len(found[1])}}} ", rest, maxsplit=1, flags=re.MULTILINE)[0]


def rows(text: str) -> list[list[str]]:
    """Returns the cells of the tables in a text, without heads."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.rstrip()[1:-1].split("|")] for line in lines]


def names(text: str) -> list[str]:
    """Returns what stands between backticks."""
    return re.findall(r"`([^`]+)`", text)


@pytest.fixture
def help_of(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[[str], str]:
    """Returns a function that tells what `kvturn COMMAND --help` prints."""
    for name in [name for name in os.environ if name.startswith(("KVTURN_", "OTEL_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("COLUMNS", "400")

    def tell(command: str) -> str:
        module, function, _ = COMMANDS[command]
        with pytest.raises(SystemExit):
            getattr(importlib.import_module(module), function)(["--help"])
        return capsys.readouterr().out

    return tell


def flags_of(text: str) -> dict[str, str]:
    """Returns the flags in a help text with their defaults, "" where it names none."""
    flags = {}
    for part in re.split(r"^  (?=--)", text.partition("\noptions:")[2], flags=re.MULTILINE)[1:]:
        default = re.search(r"\(default ([^)]*)\)", part)
        flags[part.split(maxsplit=1)[0].rstrip(",")] = default[1] if default else ""
    return flags


def documented(document: Path) -> dict[str, str]:
    """Returns the flags of the table of a service's settings with their defaults."""
    head, *table = rows(section(document, "Settings"))
    assert head[0].startswith("flag of ")
    return {names(cells[0])[0]: cells[1] for cells in table}


def own_keys() -> set[str]:
    """Returns the keys that the connector knows."""
    with pytest.raises(ConfigError, match="known are") as refused:
        ConnectorConfig.from_extra({"kvturn_": ""})
    return set(re.findall(r"kvturn_\w+", str(refused.value)))


def slug(heading: str) -> str:
    """Returns the anchor that GitHub gives a heading."""
    return re.sub(r"[^a-z0-9 _-]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("package", PACKAGES)
def test_architecture_lists_exactly_the_modules_of_each_package(package: str) -> None:
    """A module that is added, renamed or removed shows here."""
    listed = [names(cells[0])[0] for cells in rows(section(ARCHITECTURE, package))[1:]]
    files = {file.name for file in (ROOT / package).glob("*.py")} - {"__init__.py"}
    assert sorted(listed) == sorted(files)


def test_a_folder_of_the_router_imports_only_from_those_below_it() -> None:
    """The order that ARCHITECTURE.md gives is the one that the imports keep."""
    package = ROOT / "services/router/kvturn_router"
    text = section(ARCHITECTURE, "services/router/kvturn_router").partition("| module")[0]
    order = [name for name in names(text) if (package / name).is_dir()]
    order = order[-len({file.parent for file in package.glob("*/*.py")}) :]
    for place, folder in enumerate(order):
        for file in (package / folder).glob("*.py"):
            used = re.findall(r"from kvturn_router\.(\w+)\.", file.read_text())
            assert not set(used) & set(order[:place]), f"{folder}/{file.name} imports from {used}"


def test_connector_keys_and_defaults_are_those_of_the_code() -> None:
    """Keys of kv_connector_extra_config, ours and upstream's, in the connector's table."""
    keys = own_keys() | UPSTREAM_KEYS
    table = rows(section(CONNECTOR_README, "The connector in your own vLLM"))[1:]
    assert {names(cells[0])[0] for cells in table} == keys
    config = ConnectorConfig.from_extra({})
    defaults = {names(cells[0])[0]: cells[1] for cells in table}
    assert defaults["kvturn_question_deadline_ms"] == str(config.question_deadline_ns // 10**6)
    assert defaults["kvturn_retentions_max"] == str(config.retentions_max)
    assert defaults["kvturn_nixl_progress_delay_us"] == str(config.nixl_progress_delay_us)
    assert defaults["kv_recompute_threshold"] == str(config.recompute_threshold_tokens)
    assert defaults["decoder_kv_blocks_ttl"] == str(config.max_hold_ns // 10**9)
    assert defaults["bidirectional_kv_xfer"] == str(config.bidirectional).lower()
    for key in ("kvturn_lease_endpoint", "kvturn_http_address", "kvturn_otlp_endpoint"):
        assert defaults[key] == "empty"
    empty = (config.lease_endpoints, config.http_address, config.traces, config.secret)
    assert not any(empty)


@pytest.mark.parametrize("document", [README, ROUTER_README], ids=["readme", "router"])
def test_no_connector_key_is_named_that_is_not_there(document: Path) -> None:
    """Words that begin with kvturn_ are keys or packages."""
    known = own_keys() | {package.rpartition("/")[2] for package in PACKAGES}
    assert set(re.findall(r"\bkvturn_[a-z_]+", document.read_text())) <= known


def test_the_connector_settings_that_are_shown_are_accepted() -> None:
    """Both JSON blocks, as the connector reads them at start."""
    blocks = re.findall(r"```json\n(.*?)```", CONNECTOR_README.read_text(), re.DOTALL)
    shown = [json.loads(block) for block in blocks]
    assert [one["kv_role"] for one in shown] == ["kv_producer", "kv_consumer"]
    for one in shown:
        assert ConnectorConfig.from_extra(one["kv_connector_extra_config"]).active
        assert one["kv_load_failure_policy"] == "recompute"


@pytest.mark.parametrize(
    ("service", "document"), [("router", ROUTER_README), ("lease", LEASE_README)]
)
def test_flags_and_defaults_of_the_services_are_those_of_the_code(
    service: str, document: Path, help_of: Callable[[str], str]
) -> None:
    """The tables under Settings hold every flag and no other."""
    assert documented(document) == flags_of(help_of(service))


def test_flags_of_up_and_its_companions_are_those_of_the_code(
    help_of: Callable[[str], str],
) -> None:
    """The text under "Run it on one machine" names every flag and no other."""
    shown = set(re.findall(r"--[a-z][a-z-]+", section(CLI_README, "Run it on one machine")))
    there: set[str] = set()
    for command in ("up", "down", "chat", "demo"):
        there |= set(flags_of(help_of(command)))
    assert shown == there


def test_flags_and_checks_of_doctor_are_those_of_the_code(help_of: Callable[[str], str]) -> None:
    """Its page names every flag and every check, and no other."""
    shown = {name for cells in rows(section(DOCTOR, "Flags"))[1:] for name in names(cells[0])}
    assert shown == set(flags_of(help_of("doctor")))
    code = "".join(
        file.read_text() for file in (ROOT / "cli" / "kvturn_cli" / "doctor").glob("*.py")
    )
    checks = set(re.findall(rf'"((?:{"|".join(TITLES)})\.[a-z_]+)"', code))
    page = section(DOCTOR, "What is found, why, and the fix")
    listed = {name for name in names(page) if name.partition(".")[0] in TITLES and "." in name}
    assert listed == checks


def test_the_versions_that_doctor_knows_as_tested_are_those_of_the_readme() -> None:
    """What is tested is said in one place for people and in one for doctor."""
    [cells] = [cells for cells in rows(section(README, "Supported versions")) if cells[0] == "vLLM"]
    assert tuple(re.findall(r"\d+\.\d+\.\d+", cells[1])) == VLLM_TESTED


def test_no_flag_is_named_that_is_not_there(help_of: Callable[[str], str]) -> None:
    """Every flag belongs to a command or script of ours, or is one of others' that are listed."""
    known = set(FLAGS_OF_OTHERS)
    for command in COMMANDS:
        known |= set(re.findall(r"--[a-z][a-z-]*", help_of(command)))
    for script in SCRIPTS:
        known |= set(re.findall(r"^  (--[a-z-]+) ", script.read_text(), re.MULTILINE))
    for document in DOCUMENTS:
        named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*[a-z]", document.read_text()))
        assert named <= known, document.name


def test_the_verdict_table_is_the_enum() -> None:
    """Document, contract and router name the same verdicts, in the same order."""
    table = [names(cells[0])[0] for cells in rows(section(TURNS, "Verdicts"))[1:]]
    contract = [
        name.removeprefix("VERDICT_").lower()
        for name, _ in common_pb2.Verdict.items()
        if name != "VERDICT_UNSPECIFIED"
    ]
    assert table == contract == [verdict.value for verdict in Verdict]


def test_the_reasons_of_plans_are_those_of_the_code() -> None:
    """Each word that is listed stands in plan.py, and each stand to the holder is listed."""
    listed = {
        names(cells[0])[0]
        for cells in rows(section(TURNS, "Reasons of plans"))
        if names(cells[0]) and not cells[0].startswith("a verdict")
    }
    text = (ROOT / "services/router/kvturn_router/choice/plan.py").read_text()
    assert not [word for word in listed if not re.search(rf"\b{word}\b", text)]
    assert set(re.findall(r'"((?:no|at)_holder|holder_\w+)"', text)) <= listed


def test_the_lease_rules_are_eighteen_and_name_modules_that_are_there() -> None:
    """Rule by rule, with the module that keeps it."""
    table = rows(section(ARCHITECTURE, "The lease rules"))[1:]
    assert [cells[0] for cells in table] == [str(number) for number in range(1, 19)]
    for cells in table:
        files = names(cells[2])
        assert files, f"rule {cells[0]} names no module"
        assert all(place(file).is_file() for file in files), files


def place(name: str) -> Path:
    """Returns the file that a short name means, e.g. lease/lessor.py."""
    prefix = next(prefix for prefix in PLACES if name.startswith(prefix))
    return ROOT / PLACES[prefix] / name.removeprefix(prefix)


def test_touch_points_name_what_the_modules_use() -> None:
    """Each name in the table stands in its module."""
    touched = rows(section(ARCHITECTURE, "What is touched of vLLM and NIXL"))[1:]
    for module, listed, *_ in touched:
        text = place(names(module)[0]).read_text()
        absent = [name for name in names(listed) if not re.search(rf"\b{name}\b", text)]
        assert not absent, f"{module} does not use {absent}"


def test_limits_name_what_the_modules_hold() -> None:
    """The last column gives a file, then the names in it that hold the limits."""
    for cells in rows(section(ARCHITECTURE, "Limits"))[1:]:
        text = ""
        for name in names(cells[-1]):
            if name.endswith(".py"):
                text = place(name).read_text()
            else:
                assert name in text, f"{cells[0]}: no {name}"


def test_the_life_of_a_turn_names_functions_that_are_there() -> None:
    """Each `module.Class.function` in the numbered steps exists in a package."""
    files: Sequence[Path] = [file for package in PACKAGES for file in (ROOT / package).glob("*.py")]
    texts: Mapping[Path, str] = {file: file.read_text() for file in files}
    for name in names(section(ARCHITECTURE, "Life of a turn")):
        module, *parts = name.split(".")
        if not parts or not re.fullmatch(r"\w+", module) or parts == ["py"]:
            continue
        if module[0].isupper():  # a class, of a module named just before
            module, parts = "", [module, *parts]
        named = [text for file, text in texts.items() if module in ("", file.stem)]
        found = [
            text
            for text in named
            if all(re.search(rf"\b(def|class) {part}\b", text) for part in parts)
        ]
        assert found or name == "kv_transfer_params.kvturn", name


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda file: file.name)
def test_relative_links_and_paths_resolve(document: Path) -> None:
    """Links lead to files and headings; paths between backticks are there."""
    for target in re.findall(r"\]\(([^)\s]+)\)", document.read_text()):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        file = document.parent / path if path else document
        assert file.exists(), f"{document.name} links to {target}"
        if anchor:
            headings = re.findall(r"^#+ (.+)$", file.read_text(), re.MULTILINE)
            assert anchor in {slug(heading) for heading in headings}, target
    for name in names(document.read_text()):
        if re.fullmatch(rf"({'|'.join(FOLDERS)})/[\w./-]+", name):
            assert (ROOT / name).exists(), f"{document.name} names {name}"


SPAN_SOURCES = (
    "services/router/kvturn_router/turn/account.py",
    "services/router/kvturn_router/turn/forward.py",
    "services/router/kvturn_router/turn/leg_spans.py",
    "services/router/kvturn_router/telemetry/turn_trace.py",
    "services/lease/kvturn_lease/telemetry.py",
    "services/lease/kvturn_lease/servicer.py",
    "services/lease/kvturn_lease/router_sessions.py",
    "connector/kvturn_connector/lease_client.py",
    "connector/kvturn_connector/decode.py",
)
TURNS = ROOT / "docs" / "turns.md"


def test_spans_and_their_attributes_are_all_told() -> None:
    """As the code names them, each once, and no other."""
    code = "\n".join((ROOT / name).read_text() for name in SPAN_SOURCES)
    families = r"(?:kvturn|gen_ai|server|http|rpc|error)"
    said = set(re.findall(rf'"({families}\.[a-z_.]+)"', code)) - {
        "kvturn.lease",
        "kvturn.router.telemetry",
    }
    outlooks = [name.removeprefix("OUTLOOK_").lower() for name, n in lease_pb2.Outlook.items() if n]
    said |= {f"kvturn.given_up_{outlook}" for outlook in outlooks}
    head, *table = rows(section(TURNS, "What spans say"))
    told = [name for cells in table for name in names(cells[0])]
    assert head[0] == "attribute"
    assert sorted(told) == sorted(said)
    spans = set(re.findall(r'(?:child|root|under|span)\([^"()]*"(\w+)"', code))
    tree = section(TURNS, "Traces").partition("\n\n    turn ")[2].partition("\n\n")[0]
    drawn = {"turn", *re.findall(r"[├└]─ (\w+)", tree)} - {"llm_request"}
    assert drawn - {"BeginRead", "EndRead"} == spans, "methods have spans of their names"
