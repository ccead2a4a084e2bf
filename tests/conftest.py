"""Where tests run: the router's on uvloop, as the router does; side by side on own ports."""

import asyncio
import os
import sys
from collections.abc import Callable, Mapping

import pytest
import uvloop

from kvturn_cli import ports

# Tests start processes while gRPC's threads run. Its fork handlers are of no use to a child that
# becomes another program at once, and now and then they kill it ("next_worker->state == KICKED").
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"

# Where this is set, each of the many processes that tests start compiles all that it imports.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Side by side with others, a test may not find a port free that another has just found, too.
_RANGES = 8
if _worker := os.environ.get("PYTEST_XDIST_WORKER"):
    _share = (ports.LAST + 1 - ports.FIRST) // _RANGES
    ports.FIRST += int(_worker.removeprefix("gw")) % _RANGES * _share
    ports.LAST = ports.FIRST + _share - 1


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Asked for each test; there is one loop for it, so its name does not grow."""
    del config
    of_the_router = ("test_router_", "test_fidelity_", "test_clients", "test_security_")
    if item.path.name.startswith(of_the_router):
        return {"uvloop": uvloop.new_event_loop}
    return {"asyncio": asyncio.new_event_loop}
