"""Three etcd nodes layered on: started in order, and any one of them may be lost."""

from __future__ import annotations

import time
from datetime import datetime
from typing import TYPE_CHECKING

from compose_stack import ComposeStack

if TYPE_CHECKING:
    from docker_engine import DockerEngine

NODES = ("etcd", "etcd-2", "etcd-3")
FILES = ("compose.yaml", "compose.etcd3.yaml")
TIMEOUT_S = 180
CHECK_S = 5.0
"""How long after a start Docker asks for etcd's health: its interval."""


def test_any_one_of_three_nodes_may_be_lost(
    engine: DockerEngine, image_names: dict[str, str]
) -> None:
    """A lease service is elected on three nodes, and again while each in turn is away."""
    stack = ComposeStack(engine, image_names, "kvturn-test-etcd3", FILES)
    stack.down()
    try:
        stack.compose("up", "-d", *NODES, "lease-1")
        assert when(stack, "init", "FinishedAt") <= when(stack, "etcd", "StartedAt")
        # Compose starts it when etcd is healthy, which a first check tells after five seconds.
        assert when(stack, "lease-1", "StartedAt") - when(stack, "etcd", "StartedAt") >= CHECK_S
        stack.wait_healthy(*NODES, "lease-1", timeout_s=TIMEOUT_S)
        wait_leading(stack, 1)
        for times, node in enumerate(NODES, 2):
            stack.compose("stop", node)
            stack.compose("restart", "lease-1")
            wait_leading(stack, times)
            stack.compose("start", node)
            stack.wait_healthy(node, timeout_s=TIMEOUT_S)
        members = stack.inside("etcd", "etcdctl", "member", "list")
        assert members.count("started") == len(NODES)
    finally:
        stack.down()


def when(stack: ComposeStack, service: str, what: str) -> float:
    """Returns when something befell a service's container, in seconds since the epoch."""
    told: str = stack.state(service)["State"][what]
    return datetime.fromisoformat(told).timestamp()


def wait_leading(stack: ComposeStack, times: int) -> None:
    """Returns when lease-1 has been elected that often."""
    deadline_s = time.monotonic() + TIMEOUT_S
    while (log := stack.log("lease-1")).count(" leading: ") < times:
        assert time.monotonic() < deadline_s, log[-2000:]
        time.sleep(0.5)
