"""Three etcd nodes layered on: lease services go on leading when one node is lost."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from compose_stack import ComposeStack

if TYPE_CHECKING:
    from docker_engine import DockerEngine

NODES = ("etcd", "etcd-2", "etcd-3")
FILES = ("compose.yaml", "compose.etcd3.yaml")
TIMEOUT_S = 180


def test_one_of_three_nodes_may_be_lost(engine: DockerEngine, image_names: dict[str, str]) -> None:
    """A lease service is elected on three nodes; after one is gone another can be elected."""
    stack = ComposeStack(engine, image_names, "kvturn-test-etcd3", FILES)
    stack.down()
    try:
        stack.compose("up", "-d", *NODES, "lease-1")
        stack.wait_healthy(*NODES, "lease-1", timeout_s=TIMEOUT_S)
        stack.compose("stop", "etcd-2")
        stack.compose("restart", "lease-1")
        deadline_s = time.monotonic() + TIMEOUT_S
        while stack.log("lease-1").count(" leading: ") < 2:
            assert time.monotonic() < deadline_s, stack.log("lease-1")[-2000:]
            time.sleep(1)
        members = stack.inside("etcd", "etcdctl", "member", "list")
        assert members.count("started") == len(NODES)
    finally:
        stack.down()
