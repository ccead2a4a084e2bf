"""Which event loop tests run on: the router's run on uvloop, as the router does."""

import asyncio
import os
from collections.abc import Callable, Mapping

import pytest
import uvloop

# Tests start processes while gRPC's threads run. Its fork handlers are of no use to a child that
# becomes another program at once, and now and then they kill it ("next_worker->state == KICKED").
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Asked for each test; there is one loop for it, so its name does not grow."""
    del config
    of_the_router = ("test_router_", "test_fidelity_", "test_clients", "test_security_")
    if item.path.name.startswith(of_the_router):
        return {"uvloop": uvloop.new_event_loop}
    return {"asyncio": asyncio.new_event_loop}
