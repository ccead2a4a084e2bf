"""The compose stack with real engines: it starts, reuses, is rolled, and heals from kills.

One stack for all tests, in their order. Whoever is killed is killed from outside, as a crash.
"""

from __future__ import annotations

import json
import time
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from compose_stack import ComposeStack
from port_turns import MODEL, Client, Load

from kvturn.client import connect
from kvturn_cli.ports import pick_free

if TYPE_CHECKING:
    from collections.abc import Iterator

    from docker_engine import DockerEngine

# Two cores start two engines; under load from elsewhere that takes minutes.
START_TIMEOUT_S = 900
HEAL_TIMEOUT_S = 120
PORTS = ("HTTP_PORT", "GRPC_PORT", "PROMETHEUS_PORT", "JAEGER_PORT", "GRAFANA_PORT")
ENGINES = ("prefill-0", "decode-0")
LEASES = ("lease-1", "lease-2")
ROUTERS = ("router-1", "router-2")
# Jaeger and Grafana are in no package, so the stack runs without them.
SERVICES = ("etcd", *LEASES, *ROUTERS, "balancer", *ENGINES, "otel-collector", "prometheus")
# Whether it leads: SERVING under the service's name on the leader only.
LEADS = """
import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
stub = health_pb2_grpc.HealthStub(grpc.insecure_channel("127.0.0.1:7600"))
asked = health_pb2.HealthCheckRequest(service="kvturn.v1.LeaseService")
print(stub.Check(asked, timeout=5).status)
"""


@pytest.fixture(scope="module")
def stack(engine: DockerEngine, image_names: dict[str, str]) -> Iterator[ComposeStack]:
    """The stack, with the services that the first test starts."""
    taken: set[int] = set()
    variables = {
        **image_names,
        **{name: str(pick_free(taken)) for name in PORTS},
        "COMPOSE_PROFILES": "cpu",
        # Two cores run ten services and these tests: nothing here is about how soon they answer.
        "QUESTION_DEADLINE_MS": "1000",
        "HEALTH_TIMEOUT_S": "10",
        # Reads are what is shown, also where costs would say to compute.
        "ROUTER_PLAN": "pull",
    }
    made = ComposeStack(engine, variables, "kvturn-test")
    made.down()
    try:
        yield made
    finally:
        made.down()


def port(stack: ComposeStack) -> int:
    return int(stack.environment["HTTP_PORT"])


def leader(stack: ComposeStack) -> str:
    """Returns the lease service that leads, "" where none does."""
    leading = [name for name in LEASES if stack.inside(name, "python", "-c", LEADS).strip() == "1"]
    assert len(leading) < 2, "two lease services lead"
    return leading[0] if leading else ""


def standby(stack: ComposeStack) -> str:
    """Returns the lease service that would lead next."""
    return next(name for name in LEASES if name != leader(stack))


def asked(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return json.load(answer)


def wait_until_reused(stack: ComposeStack, name: str, timeout_s: float) -> None:
    """Returns when the second turn of a new conversation reuses the first one's KV."""
    deadline_s = time.monotonic() + timeout_s
    number = 0
    while True:
        number += 1
        client = Client(port(stack), f"{name}-{number}")
        client.story()
        second = client.turn("And then?")
        if second.reused_tokens > 0:
            return
        assert time.monotonic() < deadline_s, f"still {second.verdict}"


def test_a_wrong_setting_stops_the_start(engine: DockerEngine, image_names: dict[str, str]) -> None:
    """The first service says in a line which it is; what comes after waits for its success."""
    wrong = ComposeStack(engine, {**image_names, "SESSION_TTL_S": "1"}, "kvturn-test-wrong")
    try:
        wrong.compose("up", "-d", "init")
        assert engine.run("wait", wrong.container("init")).strip() == "2"
        (line,) = wrong.log("init").splitlines()
        assert line.startswith("settings: SESSION_TTL_S=1: --session-ttl")
    finally:
        wrong.down()


def test_lease_services_wait_for_a_late_etcd(stack: ComposeStack) -> None:
    """As when a machine boots, which starts containers in any order: none gives up."""
    stack.compose("up", "-d", "init")
    stack.engine.run("wait", stack.container("init"))
    stack.compose("up", "-d", "--no-deps", *(name for name in SERVICES if name != "etcd"))
    stack.wait_healthy(*LEASES, timeout_s=HEAL_TIMEOUT_S)
    assert leader(stack) == "", "nobody can lead without etcd"
    stack.compose("up", "-d", "--no-deps", "etcd")
    stack.wait_healthy("etcd", timeout_s=HEAL_TIMEOUT_S)
    deadline_s = time.monotonic() + HEAL_TIMEOUT_S
    while not leader(stack):
        assert time.monotonic() < deadline_s, "etcd is there and nobody leads"
        time.sleep(0.5)
    stack.wait_healthy(*SERVICES, timeout_s=START_TIMEOUT_S)
    for name in SERVICES:
        assert stack.state(name)["RestartCount"] == 0, f"{name} was started more than once"


def test_up_finds_nothing_to_do(stack: ComposeStack) -> None:
    """`docker compose up` on a stack that runs leaves every container as it is."""
    before = [stack.container(name) for name in SERVICES]
    stack.compose("up", "-d", *SERVICES)
    assert [stack.container(name) for name in SERVICES] == before


@pytest.mark.parametrize("service", SERVICES)
def test_a_process_has_no_rights_and_limits(stack: ComposeStack, service: str) -> None:
    """As the kernel sees it: a user without capabilities, nothing to write to, cgroup limits."""
    state = stack.state(service)
    status = Path(f"/proc/{state['State']['Pid']}/status").read_text()
    told = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert set(told["Uid"].split()) == set(told["Gid"].split()) == {"10001"}
    assert int(told["CapEff"], 16) == int(told["CapBnd"], 16) == 0
    assert told["NoNewPrivs"] == "1"
    host = state["HostConfig"]
    assert host["ReadonlyRootfs"]
    assert host["Memory"] > 0
    assert host["NanoCpus"] > 0
    assert host["PidsLimit"] > 0
    assert host["RestartPolicy"]["Name"] == "unless-stopped"


def test_the_second_turn_reuses_the_first(stack: ComposeStack) -> None:
    """Through the one port, with traces of every part at the receiver."""
    client = Client(port(stack), "trip-42")
    first = client.story()
    assert first.verdict == "first_turn"
    second = client.turn("And then?")
    assert second.verdict in ("reused", "partial_prefix")
    assert second.reused_tokens > 64
    services: set[str] = set()
    deadline_s = time.monotonic() + 30
    parts = {"kvturn-router", "kvturn-lease", "kvturn-connector"}
    wanted = parts | {f"vllm-{name}" for name in ENGINES}
    while not wanted <= services:
        assert time.monotonic() < deadline_s, f"traces only of {services}"
        services = traced(stack.inside("otel-collector", "cat", "/dev/shm/traces.jsonl"))


def traced(lines: str) -> set[str]:
    """Returns the names of services in OTLP/JSON lines."""
    return {
        attribute["value"]["stringValue"]
        for line in lines.splitlines()
        for spans in json.loads(line)["resourceSpans"]
        for attribute in spans["resource"]["attributes"]
        if attribute["key"] == "service.name"
    }


async def test_grpc_goes_through_the_balancer(stack: ComposeStack) -> None:
    """A turn over gRPC, on the other port."""
    address = f"127.0.0.1:{stack.environment['GRPC_PORT']}"
    async with connect(address) as router, router.conversation(MODEL) as held:
        answer = await held.complete(messages=[{"role": "user", "content": "Hello."}], max_tokens=4)
    assert answer.verdict == "first_turn"


def test_prometheus_reaches_its_targets(stack: ComposeStack) -> None:
    """All but the collector's own page: what stands in for the collector has none."""
    url = f"http://127.0.0.1:{stack.environment['PROMETHEUS_PORT']}/api/v1/targets"
    down = {"not asked yet"}
    deadline_s = time.monotonic() + 60
    while down:
        assert time.monotonic() < deadline_s, f"down: {down}"
        targets = asked(url)["data"]["activeTargets"]
        down = {
            target["scrapeUrl"]
            for target in targets
            if target["health"] != "up" and target["labels"]["job"] != "otel-collector"
        }
        time.sleep(1)


def test_a_rolling_restart_fails_no_turn(stack: ComposeStack) -> None:
    """Lease services and routers made anew, one by one, while clients hold conversations."""
    with Load(port(stack), "rolling") as load:
        load.wait_turns(4, timeout_s=HEAL_TIMEOUT_S)
        before = load.turns
        stack.roll(*LEASES, *ROUTERS)
        assert load.turns > before, "no turn ended while services were rolled"
        load.wait_turns(4, timeout_s=HEAL_TIMEOUT_S)
    assert load.failures == []
    wait_until_reused(stack, "rolled", HEAL_TIMEOUT_S)


def test_what_is_kept_outlives_its_container(stack: ComposeStack) -> None:
    """etcd and Prometheus, made anew under load, find what they wrote; no turn needs them."""
    stack.inside("etcd", "etcdctl", "put", "kept", "well")
    url = f"http://127.0.0.1:{stack.environment['PROMETHEUS_PORT']}/api/v1/query"
    then = f"{url}?query=up&time={time.time()}"
    samples = asked(then)["data"]["result"]
    assert samples
    with Load(port(stack), "kept") as load:
        load.wait_turns(1, timeout_s=HEAL_TIMEOUT_S)
        stack.roll("etcd", "prometheus", "otel-collector")
        load.wait_turns(2, timeout_s=HEAL_TIMEOUT_S)
    assert load.failures == []
    assert stack.inside("etcd", "etcdctl", "get", "kept") == "kept\nwell\n"
    assert len(asked(then)["data"]["result"]) == len(samples)


@pytest.mark.parametrize("service", ["etcd", "leader", "standby", "otel-collector", "prometheus"])
def test_no_turn_needs_what_only_watches_or_remembers(stack: ComposeStack, service: str) -> None:
    """Killed under load: no turn fails, the service is back by itself, and turns reuse again."""
    name = {"leader": leader, "standby": standby}.get(service, lambda _: service)(stack)
    with Load(port(stack), f"without-{service}") as load:
        load.wait_turns(2, timeout_s=HEAL_TIMEOUT_S)
        restarts = stack.kill(name)
        load.wait_turns(4, timeout_s=HEAL_TIMEOUT_S)
        stack.wait_restarted(name, restarts, timeout_s=HEAL_TIMEOUT_S)
    assert load.failures == []
    wait_until_reused(stack, f"after-{service}", HEAL_TIMEOUT_S)


@pytest.mark.parametrize("service", ROUTERS)
def test_a_killed_router_takes_its_own_turns_with_it_and_no_other(
    stack: ComposeStack, service: str
) -> None:
    """Each client had one turn in flight at most; what it asks next the other router serves."""
    with Load(port(stack), service, clients=2) as load:
        load.wait_turns(2, timeout_s=HEAL_TIMEOUT_S)
        restarts = stack.kill(service)
        load.wait_turns(4, timeout_s=HEAL_TIMEOUT_S)
        stack.wait_restarted(service, restarts, timeout_s=HEAL_TIMEOUT_S)
    assert len(load.failures) <= 2, load.failures
    wait_until_reused(stack, f"after-{service}", HEAL_TIMEOUT_S)


@pytest.mark.parametrize("service", ["balancer", *ENGINES])
def test_what_there_is_one_of_is_missed_until_it_is_back(stack: ComposeStack, service: str) -> None:
    """Turns fail with an error, not in silence; then all is healthy and reuses again."""
    with Load(port(stack), service, clients=1) as load:
        load.wait_turns(2, timeout_s=HEAL_TIMEOUT_S)
        restarts = stack.kill(service)
        load.wait_failures(1, timeout_s=HEAL_TIMEOUT_S)
    stack.wait_restarted(service, restarts, timeout_s=START_TIMEOUT_S)
    stack.wait_healthy(*ROUTERS, "balancer", timeout_s=HEAL_TIMEOUT_S)
    wait_until_reused(stack, f"after-{service}", HEAL_TIMEOUT_S)
