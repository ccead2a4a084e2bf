"""Which event loop tests run on: the router's run on uvloop, as the router does."""

import asyncio
from collections.abc import Callable, Mapping

import pytest
import uvloop


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Asked for each test; there is one loop for it, so its name does not grow."""
    del config
    if item.path.name.startswith("test_router_"):
        return {"uvloop": uvloop.new_event_loop}
    return {"asyncio": asyncio.new_event_loop}
