"""Real engines for the tests of this folder: vLLM, NIXL over UCX, SmolLM2, our connector.

One stack per vLLM version, shared by all tests of that version: two prefill engines, one without
and one with prefix caching of its own, one decode engine, lease service, router, OTLP receiver.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from engines import LONGEST_PROMPT_TOKENS, MODEL, READS, VERSIONS, run_dir, vllm_python

from kvturn_cli.engine import EngineConfig
from kvturn_cli.stack import Stack, StackConfig

if TYPE_CHECKING:
    from collections.abc import Iterator


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks every test of this folder."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.stack)


@pytest.fixture(scope="session", params=VERSIONS)
def stack(request: pytest.FixtureRequest) -> Iterator[Stack]:
    """The shared stack of one vLLM version."""
    version = request.param
    config = StackConfig(
        run_dir=run_dir(version),
        model=MODEL,
        vllm_python=vllm_python(version),
        max_model_len=LONGEST_PROMPT_TOKENS,
        router_args=READS,
        engines=(
            EngineConfig("prefill", "prefill-0", prefix_caching=False),
            EngineConfig("prefill", "prefill-1"),
            # It must remember responses for `previous_response_id` to go on from them.
            EngineConfig("decode", "decode-0", env={"VLLM_ENABLE_RESPONSES_API_STORE": "1"}),
        ),
    )
    with Stack(config) as running:
        yield running
