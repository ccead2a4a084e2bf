"""The compose stack as written: it parses, is set by .env alone, and every service is confined.

That it runs is shown in tests/docker.
"""

from __future__ import annotations

import http.server
import importlib.util
import json
import os
import re
import subprocess
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from kvturn_cli.stack import SHARED_CPU
from kvturn_connector.config import ConnectorConfig
from kvturn_lease import config as lease_config
from kvturn_router import config as router_config

if TYPE_CHECKING:
    from types import ModuleType

FOLDER = Path(__file__).resolve().parent.parent / "deploy" / "compose"
FILES = sorted(FOLDER.glob("compose*.yaml"))
DOCKERFILES = sorted((FOLDER / "images").glob("*.Dockerfile"))
README = FOLDER / "README.md"
VARIABLE = re.compile(r"\$\{(\w+)\}")
HOST = re.compile(r"\b(?:[\w-]+\.)+(?:io|com|org|dev|net)\b")
SECONDS = {"s": 1, "m": 60, "h": 3600}


def settings() -> dict[str, str]:
    """Returns the variables of .env."""
    lines = (FOLDER / ".env").read_text().splitlines()
    pairs = [line.split("=", 1) for line in lines if line and not line.startswith("#")]
    assert len({name for name, _ in pairs}) == len(pairs), "a variable stands twice in .env"
    return dict(pairs)


def filled_in(text: str) -> str:
    """Returns a text with the variables of .env put in."""
    values = settings()
    return VARIABLE.sub(lambda found: values[found[1]], text).replace("$$", "$")


def services_of(file: Path) -> dict[str, dict[str, Any]]:
    """Returns the services of a compose file, the variables put in."""
    parsed: dict[str, dict[str, dict[str, Any]]] = yaml.safe_load(filled_in(file.read_text()))
    return parsed["services"]


def settings_check() -> ModuleType:
    """Returns the program that the service init runs first, as a module."""
    file = FOLDER / "images" / "check_settings.py"
    spec = importlib.util.spec_from_file_location("check_settings", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


CHECK = settings_check()


def told(**changes: str) -> list[str]:
    """Returns what the check says of .env with some values changed."""
    lines: list[str] = CHECK.problems((FOLDER / ".env").read_text(), {**settings(), **changes})
    return lines


def whole_services() -> list[tuple[str, dict[str, Any]]]:
    """Returns every service that runs something, of all files; not what a layer adds to one."""
    return [
        (name, service)
        for file in FILES
        for name, service in services_of(file).items()
        if "image" in service
    ]


EACH_SERVICE = pytest.mark.parametrize(
    ("name", "service"), whole_services(), ids=[name for name, _ in whole_services()]
)


def test_every_variable_is_set_in_the_env_file_and_explained_there() -> None:
    """No file asks for a variable that .env does not set, .env sets none that nobody asks for.

    Each group of variables stands under a comment.
    """
    asked = {name for file in FILES for name in VARIABLE.findall(file.read_text())}
    # What compose itself reads.
    own = {"COMPOSE_PROFILES", "COMPOSE_PROJECT_NAME"}
    assert asked == settings().keys() - own
    for block in re.split(r"\n\n", (FOLDER / ".env").read_text().strip()):
        assert block.startswith("#"), block


def test_every_image_is_pinned_and_names_no_registry() -> None:
    """Image variables hold a name and a version; Dockerfiles' defaults are those of .env."""
    images = {name: value for name, value in settings().items() if name.endswith("_IMAGE")}
    for name, image in images.items():
        assert re.fullmatch(r"[a-z0-9/-]+:v?\d[\w.-]+", image), f"{name}={image}"
        assert not HOST.search(image.split(":")[0]), f"{name}={image}"
    for file in DOCKERFILES:
        text = file.read_text()
        assert not HOST.search(text), file.name
        for name, default in re.findall(r"^ARG (\w+_IMAGE)=(\S+)$", text, re.MULTILINE):
            assert images[name] == default, f"{file.name}: {name}"
        for base in re.findall(r"^FROM (\S+)", text, re.MULTILINE):
            stages = re.findall(r" AS (\w+)$", text, re.MULTILINE)
            assert base in stages or VARIABLE.fullmatch(base), f"{file.name}: FROM {base}"


@EACH_SERVICE
def test_what_is_built_here_is_not_pulled(name: str, service: dict[str, Any]) -> None:
    """Only other people's images are asked of a registry, all of them."""
    built = {other["image"] for _, other in whole_services() if "build" in other}
    assert (service.get("pull_policy") == "never") == (service["image"] in built)


@EACH_SERVICE
def test_every_service_is_confined(name: str, service: dict[str, Any]) -> None:
    """A user without rights, nothing to write to, limits of memory, CPU, processes and logs."""
    assert service["user"] == "10001:10001"
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["mem_limit"]
    assert float(service["cpus"]) > 0
    assert service["pids_limit"] > 0
    assert service["logging"]["options"].keys() == {"max-size", "max-file"}
    assert "privileged" not in service


@EACH_SERVICE
def test_every_service_tells_its_health_and_is_started_again(
    name: str, service: dict[str, Any]
) -> None:
    """All but the one that only makes secrets. Its check has time to answer on a busy machine."""
    if name == "init":
        assert service["restart"] == "no"
        return
    assert service["restart"] == "unless-stopped"
    check = service["healthcheck"]
    assert check["test"][0] == "CMD"
    assert {"interval", "timeout", "retries", "start_period"} <= check.keys()
    assert int(check["timeout"].rstrip("s")) >= 10


def test_ports_are_published_on_one_address() -> None:
    """No service is reached from outside of the host unless BIND_ADDRESS says so."""
    for name, service in whole_services():
        for port in service.get("ports", []):
            assert port.startswith(settings()["BIND_ADDRESS"] + ":"), f"{name}: {port}"


def test_volumes_keep_the_owner_that_init_gives_them() -> None:
    """Of a volume that init mounts, no other image's folder may become the owner.

    Where all containers are made before any is started, the last one made would have its say.
    """
    services = dict(whole_services())
    layer = services_of(FOLDER / "compose.etcd3.yaml")
    mounted = [*services.pop("init")["volumes"], *layer["init"]["volumes"]]
    given = {text.split(":")[0] for text in mounted}
    for name, service in services.items():
        for text in service.get("volumes", []):
            source, _, rest = text.partition(":")
            if source in given and not rest.startswith("/run/kvturn:ro"):
                assert rest.endswith(":nocopy"), f"{name}: {text}"


def test_nothing_waits_for_a_service_that_a_profile_leaves_out() -> None:
    """Services without a profile depend on such services only."""
    everything = dict(whole_services())
    for name, service in whole_services():
        for needed in service.get("depends_on", {}):
            assert "profiles" not in everything[needed], f"{name} needs {needed}"


@pytest.mark.parametrize("service", ["lease-1", "lease-2", "router-1", "router-2"])
def test_kvturn_takes_the_settings(service: str, tmp_path: Path) -> None:
    """Its own parsers read each variable; files of secrets are looked for where they are put."""
    secrets = tmp_path / "kvturn"
    secrets.mkdir(mode=0o700)
    for name in ("cluster-secret", "engine-tokens", "router-tokens", "operator-tokens", "token"):
        (secrets / name).write_text("0123456789abcdef0123456789abcdef")
    given = services_of(FOLDER / "compose.yaml")[service]["environment"]
    environment = {
        name: str(value).replace("/run/kvturn", str(secrets)) for name, value in given.items()
    }
    if service.startswith("lease"):
        lease = lease_config.parse_config([], environment)
        assert lease.advertise == f"{service}:7600"
        assert not lease.trusts_all
    else:
        router = router_config.parse_config([], environment)
        assert router.drain_notice_s > 2, "the balancer must see that a router is not ready"


def test_engines_that_share_cores_keep_their_sessions() -> None:
    """What ships is for the profile that ships: engines on the CPUs of the rest, as kvturn up."""
    assert settings()["COMPOSE_PROFILES"] == "cpu"
    shipped = services_of(FOLDER / "compose.yaml")
    trust = shipped["lease-1"]["environment"]["KVTURN_LEASE_SESSION_TTL"]
    up = lease_config.parse_config(SHARED_CPU, {}).lessor.session_ttl_ns
    assert lease_config.parse_config([f"--session-ttl={trust}"], {}).lessor.session_ttl_ns == up
    usual_ms = router_config.parse_config(["--lease=lease:7600"], {}).question_deadline_ms
    assert shipped["router-1"]["environment"]["KVTURN_ROUTER_QUESTION_DEADLINE_MS"] > usual_ms


def test_routers_give_up_before_the_balancer_does() -> None:
    """It waits for longer than a turn can be silent: in line, in prefill, and in decode."""
    given = services_of(FOLDER / "compose.yaml")["router-1"]["environment"]
    names = ("QUEUE_TIMEOUT_S", "PREFILL_TIMEOUT_S", "DECODE_TIMEOUT_S")
    own = {f"KVTURN_ROUTER_{name}": given.get(f"KVTURN_ROUTER_{name}") for name in names}
    environment = {name: str(value) for name, value in own.items() if value is not None}
    router = router_config.parse_config(["--lease=lease:7600"], environment)
    silence_s = router.queue_s + router.prefill_timeout_s + router.decode_timeout_s
    text = (FOLDER / "balancer" / "haproxy.cfg").read_text()
    routers, _, _ = text.partition("frontend self")
    waits = re.findall(r"^    timeout (client|server) (\d+)([smh])$", routers, re.MULTILINE)
    assert [name for name, _, _ in waits] == ["client", "server"]
    assert all(int(number) * SECONDS[unit] > silence_s for _, number, unit in waits)


def test_engines_have_a_name_for_who_they_run_as() -> None:
    """No image has an entry for user 10001, and torch asks for its name."""
    for file in DOCKERFILES:
        if file.name.startswith("engine"):
            set_to = dict(
                word.split("=", 1)
                for words in re.findall(r"^ENV (.+)$", file.read_text(), re.MULTILINE)
                for word in words.split()
            )
            assert set_to["USER"] == set_to["LOGNAME"] != "", file.name


@pytest.mark.parametrize("service", ["router-1", "router-2", "balancer"])
def test_turns_have_time_to_end(service: str) -> None:
    """Compose kills nothing that still drains: its grace is longer than the process's own."""
    parsed = services_of(FOLDER / "compose.yaml")
    router = parsed["router-1"]["environment"]
    own_s = router["KVTURN_ROUTER_DRAIN_NOTICE_S"] + router["KVTURN_ROUTER_GRACE_S"]
    if service == "balancer":
        text = (FOLDER / "balancer" / "haproxy.cfg").read_text()
        found = re.search(r"hard-stop-after (\d+)s", text)
        assert found is not None
        own_s = int(found[1])
    assert int(parsed[service]["stop_grace_period"].rstrip("s")) > own_s


def test_engines_trace_to_the_collector_under_names_of_their_own() -> None:
    """A turn's trace has vLLM's spans, and they go where the connector's go."""
    services = services_of(FOLDER / "compose.yaml")
    engines = {name: service for name, service in services.items() if "profiles" in service}
    assert len(engines) == 4
    for name, service in engines.items():
        flags = dict(text.split("=", 1) for text in service["command"] if "=" in text)
        extra = json.loads(flags["--kv-transfer-config"])["kv_connector_extra_config"]
        assert flags["--otlp-traces-endpoint"] == extra["kvturn_otlp_endpoint"]
        own = name.removesuffix("-gpu")
        assert service["environment"]["OTEL_SERVICE_NAME"] == f"vllm-{own}"


def test_prometheus_asks_every_service_that_has_metrics() -> None:
    """Each target is a service of the stack; HAProxy has its page where it is asked for."""
    file = FOLDER / "observability" / "prometheus" / "prometheus.yml"
    jobs = {job["job_name"]: job for job in yaml.safe_load(file.read_text())["scrape_configs"]}
    asked = {
        target
        for job in jobs.values()
        for group in job.get("static_configs", ())
        for target in group["targets"]
    }
    services = services_of(FOLDER / "compose.yaml")
    assert {target.split(":")[0] for target in asked} - {"localhost"} <= services.keys()
    assert jobs["haproxy"]["static_configs"] == [{"targets": ["balancer:8404"]}]
    balancer = (FOLDER / "balancer" / "haproxy.cfg").read_text()
    assert "bind :8404" in balancer
    assert "use-service prometheus-exporter if { path /metrics }" in balancer


@pytest.mark.parametrize(
    ("service", "role"),
    [
        ("prefill-0", "kv_producer"),
        ("decode-0", "kv_consumer"),
        ("prefill-0-gpu", "kv_producer"),
        ("decode-0-gpu", "kv_consumer"),
    ],
)
def test_the_connector_takes_the_engines_settings(service: str, role: str, tmp_path: Path) -> None:
    """The JSON of each engine's flag parses, and holds keys that the connector knows."""
    (tmp_path / "token").write_text("0123456789abcdef0123456789abcdef")
    (tmp_path / "digest-key").write_text("0123456789abcdef0123456789abcdef")
    for file in tmp_path.iterdir():
        file.chmod(0o600)
    command = services_of(FOLDER / "compose.yaml")[service]["command"]
    flag = next(text for text in command if text.startswith("--kv-transfer-config="))
    config = json.loads(flag.split("=", 1)[1])
    assert config["kv_role"] == role
    assert config["kv_load_failure_policy"] == "recompute"
    extra = {
        key: value.replace("/run/kvturn", str(tmp_path)) if isinstance(value, str) else value
        for key, value in config["kv_connector_extra_config"].items()
    }
    ConnectorConfig.from_extra(extra)
    port = next(text for text in command if text.startswith("--port=")).split("=")[1]
    name = service.removesuffix("-gpu")
    assert extra["kvturn_engine_name"] == name
    assert extra["kvturn_http_address"] == f"http://{name}:{port}"


def test_the_balancer_sends_each_turn_once_and_holds_nothing_back() -> None:
    """Only connections are tried again, no connection to a router is used twice."""
    text = (FOLDER / "balancer" / "haproxy.cfg").read_text()
    assert re.findall(r"^\s+retry-on (.*)$", text, re.MULTILINE) == ["conn-failure"]
    assert "option http-server-close" in text
    assert "http-buffer-request" not in text
    assert "option httpchk GET /ready" in text


def test_three_etcd_nodes_know_each_other() -> None:
    """Each of the layer's nodes is in the cluster's list, and lease services ask all of them."""
    services = services_of(FOLDER / "compose.etcd3.yaml")
    nodes = {name for name in services if name.startswith("etcd")}
    assert len(nodes) == 3
    for name in nodes:
        cluster = services[name]["environment"]["ETCD_INITIAL_CLUSTER"]
        assert {member.split("=")[0] for member in cluster.split(",")} == nodes
    for name in ("lease-1", "lease-2"):
        store = services[name]["environment"]["KVTURN_LEASE_STORE"]
        assert {place.split(":")[0] for place in store.removeprefix("etcd://").split(",")} == nodes


def test_secrets_are_made_once_and_admitted(tmp_path: Path) -> None:
    """Run twice, the script changes nothing; every role's token is among those taken."""
    for name in ("lease", "engine", "router", "operator", "grafana", "etcd-1", "prometheus"):
        (tmp_path / name).mkdir()
    script = FOLDER / "images" / "make-secrets"
    subprocess.run([script, tmp_path], check=True)
    made = {file: file.read_text() for file in tmp_path.rglob("*") if file.is_file()}
    assert len({text.strip() for text in made.values()}) == 6, "secrets differ, tokens come twice"
    for file in made:
        assert file.stat().st_mode & 0o077 == 0, file
    for role in ("engine", "router", "operator"):
        token = (tmp_path / role / "token").read_text()
        assert len(token) == 48
        assert (tmp_path / "lease" / f"{role}-tokens").read_text().split() == [token]
    (tmp_path / "router" / "token").write_text("b" * 48)
    subprocess.run([script, tmp_path], check=True)
    assert len((tmp_path / "lease" / "router-tokens").read_text().split()) == 2
    made.pop(tmp_path / "router" / "token")
    made.pop(tmp_path / "lease" / "router-tokens")
    assert all(file.read_text() == text for file, text in made.items())


def test_the_readme_lists_every_variable() -> None:
    """Its table has each variable of .env with its value."""
    rows = re.findall(r"^\| `(\w+)` \| (?:`([^`|]*)`)? ?\|", README.read_text(), re.MULTILINE)
    assert dict(rows) == settings()


def test_the_settings_of_the_env_file_are_checked_and_right() -> None:
    """init is handed every variable, by name, but the one that is a secret."""
    assert settings().keys() == CHECK.KNOWN
    init = services_of(FOLDER / "compose.yaml")["init"]
    assert set(init["environment"]) == settings().keys() - {"HF_TOKEN"}
    assert init["entrypoint"][-1].startswith("check-settings /etc/kvturn/.env &&")
    assert told() == []
    gpu = {"GPU_TENSOR_PARALLEL": "2", "GPU_PREFILL": "0,1", "GPU_DECODE": "2,3"}
    assert told(COMPOSE_PROFILES="gpu,own_watch", BIND_ADDRESS="::", **gpu) == []


@pytest.mark.parametrize("name", sorted(settings().keys() - {"COMPOSE_PROJECT_NAME"}))
def test_a_value_of_the_wrong_kind_is_named(name: str) -> None:
    """One line, that begins with the variable; but what may be empty, or anything, is taken."""
    free = {"HF_TOKEN", "TORCH_BACKEND"}
    for wrong in ("", "no such thing"):
        lines = told(**{name: wrong})
        allowed = name in free or (name == "COMPOSE_PROFILES" and not wrong)
        assert len(lines) == (0 if allowed else 1), lines
        assert all(re.match(rf"{name}\b", line) for line in lines)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"GRAFANA_PORT": "8000"}, "HTTP_PORT and GRAFANA_PORT are both 8000"),
        ({"HTTP_PORT": "65536"}, "HTTP_PORT: must be a port from 1 to 65535, not '65536'"),
        ({"COMPOSE_PROFILES": "cpu,gpu"}, "COMPOSE_PROFILES: cpu and gpu engines"),
        ({"CPU_KV_CACHE_GIB": "6"}, "CPU_KV_CACHE_GIB=6 does not fit into CPU_MEMORY=6g"),
        ({"CPU_MODEL": "Qwen/Qwen3-8B"}, "CPU_MODEL: must be a folder in the container"),
        ({"SESSION_TTL_S": "3"}, "SESSION_TTL_S=3: --session-ttl"),
        ({"QUESTION_DEADLINE_MS": "0"}, "QUESTION_DEADLINE_MS=0: "),
        ({"COMPOSE_PROFILES": "gpu", "GPU_DECODE": "0"}, "GPU_PREFILL and GPU_DECODE both"),
        ({"COMPOSE_PROFILES": "gpu", "GPU_DECODE": "1,2"}, "GPU_DECODE=1,2 names 2 GPUs"),
        # As with `--profile`, of which compose tells no container.
        ({"COMPOSE_PROFILES": "cpu", "GPU_DECODE": "0"}, "GPU_PREFILL and GPU_DECODE both"),
        ({"COMPOSE_PROFILES": "gpu", "CPU_KV_CACHE_GIB": "6"}, "CPU_KV_CACHE_GIB=6 does not fit"),
    ],
)
def test_settings_that_cannot_be_are_refused(changes: dict[str, str], said: str) -> None:
    """A range, or two settings that contradict each other: one line names them and the fix."""
    (line,) = told(**changes)
    assert line.startswith(said)


def test_what_nobody_reads_in_the_env_file_is_refused() -> None:
    """A name that is mistyped, or that stands twice; names of one's own have a place."""
    text = (FOLDER / ".env").read_text()
    lines = CHECK.problems(f"{text}HTTP_PROT=1\nHTTP_PORT=9000\nOWN_PORT=1\n", settings())
    assert [line.partition(";")[0] for line in lines] == [
        "HTTP_PORT: stands twice in .env",
        "HTTP_PROT: nothing of the stack reads it",
    ]
    assert "did you mean HTTP_PORT?" in lines[1]


@pytest.mark.parametrize(
    ("command", "variables", "said"),
    [
        (["build.sh", "kvturn", "routr"], {}, "build.sh: no image routr; choose from kvturn,"),
        (["build.sh"], {"CA_FILE": "no.pem"}, "build.sh: cannot read no.pem; give INDEX_ENV"),
        (["roll.sh"], {}, "roll.sh: no service is named; usage: roll.sh SERVICE..."),
        (["roll.sh", "--all"], {}, "roll.sh: '--all' is no service; usage: roll.sh SERVICE..."),
        (["roll.sh", "lease-1", ""], {}, "roll.sh: '' is no service; usage: roll.sh SERVICE..."),
        (["roll.sh", "lease-1"], {"WAIT_S": "5m"}, "roll.sh: WAIT_S must be whole seconds"),
    ],
)
def test_a_wrong_call_does_nothing(
    command: list[str], variables: dict[str, str], said: str, tmp_path: Path
) -> None:
    """One line says what is wrong; Docker is not called."""
    never = tmp_path / "docker"
    never.write_text("#!/bin/sh\necho called\n")
    never.chmod(0o755)
    environment = {**os.environ, **variables, "DOCKER": str(never), "COMPOSE": str(never)}
    done = subprocess.run(
        [FOLDER / command[0], *command[1:]], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith(said)


@pytest.mark.parametrize("script", ["build.sh", "roll.sh"])
def test_help_tells_how_to_call(script: str) -> None:
    """Every variable that the script takes is in it."""
    done = subprocess.run([FOLDER / script, "--help"], capture_output=True, text=True, check=True)
    assert f"{script} " in done.stdout
    text = (FOLDER / script).read_text()
    for name in ("INDEX_ENV", "CA_FILE", "DOCKER", "COMPOSE", "WAIT_S"):
        assert (f"{name}=" in done.stdout) == (f"${{{name}:-" in text), name


@pytest.mark.parametrize(("path", "healthy"), [("/", True), ("/nothing", False)])
def test_a_service_is_healthy_that_answers_with_200(path: str, healthy: bool) -> None:
    """What Docker runs in the containers of kvturn and of engines."""
    script = FOLDER / "images" / "is-healthy"
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Empty) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        command = [script, str(server.server_port), path]
        assert (subprocess.run(command).returncode == 0) == healthy
        server.shutdown()
    assert subprocess.run(command, capture_output=True).returncode != 0, "nobody listens"


class Empty(http.server.BaseHTTPRequestHandler):
    """Has one page, without a word."""

    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/" else 404)
        self.end_headers()

    def log_request(self, code: object = "-", size: object = "-") -> None:
        """Says nothing of requests."""
