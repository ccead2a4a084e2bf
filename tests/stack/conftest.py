"""Real engines for the tests of this folder: vLLM, NIXL over UCX, SmolLM2, our connector.

One stack per vLLM version, shared by all tests of that version: two prefill engines, one without
and one with prefix caching of its own, one decode engine, lease service, router, OTLP receiver.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from engines import (
    LONGEST_PROMPT_TOKENS,
    MODEL,
    QUESTION_DEADLINE_MS,
    READS,
    TOOLS,
    VERSIONS,
    own_cache,
    run_dir,
    vllm_python,
)
from noise import measured_noise

from kvturn_cli.engine import EngineConfig
from kvturn_cli.stack import Stack, StackConfig

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator


_ON_EVERY_VERSION = ("test_life_of_a_turn.py", "test_in_engine.py")
"""Tests that never leave a version out: what the connector takes from vLLM, and what it serves."""


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Generator[None]:
    """Marks the tests of this folder, and lets those on the shared stacks run last of all.

    What fails elsewhere then shows first, and no other test runs beside three more engines.
    """
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.stack)
            if _is_of_older_version(item) and item.path.name not in _ON_EVERY_VERSION:
                item.add_marker(pytest.mark.older)
    yield
    items.sort(key=_place)


def _is_of_older_version(item: pytest.Item) -> bool:
    spec = getattr(item, "callspec", None)
    return spec is not None and not set(VERSIONS[:-1]).isdisjoint(map(str, spec.params.values()))


def _place(item: pytest.Item) -> int:
    """Tests without engines, with engines of their own, then on each version's shared stack."""
    if item.get_closest_marker("stack") is None:
        return 0
    if item.get_closest_marker("fault") or "stack" not in getattr(item, "fixturenames", ()):
        return 1
    assert isinstance(item, pytest.Function)
    return 2 + VERSIONS.index(item.callspec.params["stack"])


@pytest.fixture(scope="session", params=VERSIONS)
def stack(request: pytest.FixtureRequest) -> Iterator[Stack]:
    """The shared stack of one vLLM version."""
    version = request.param
    cache = own_cache(version)
    config = StackConfig(
        run_dir=run_dir(version),
        model=MODEL,
        vllm_python=vllm_python(version),
        max_model_len=LONGEST_PROMPT_TOKENS,
        question_deadline_ms=QUESTION_DEADLINE_MS,
        router_args=READS,
        engines=(
            EngineConfig("prefill", "prefill-0", env=cache, args=TOOLS, prefix_caching=False),
            EngineConfig("prefill", "prefill-1", env=cache, args=TOOLS),
            # It must remember responses for `previous_response_id` to go on from them.
            EngineConfig(
                *("decode", "decode-0"),
                args=TOOLS,
                env={"VLLM_ENABLE_RESPONSES_API_STORE": "1", **cache},
            ),
        ),
    )
    with Stack(config) as running:
        yield running


@pytest.fixture(scope="session")
def noise(stack: Stack) -> float:
    """How far right answers of the shared stack's engines may lie apart."""
    return measured_noise(stack)
