"""Reuse without a lease service, as the stock proxy does it, but only after a token check.

vLLM 0.32 with the stream change of 0.33 applied at its start, and our connector with no lease
endpoint, which must then behave as the stock one in every way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from engines import LONGEST_PROMPT_TOKENS, MODEL, READS, own_cache, run_dir, vllm_python
from prose import document
from test_life_of_a_turn import chat

from kvturn_cli.engine import Connector, EngineConfig
from kvturn_cli.stack import Stack, StackConfig

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

VERSION = "0.32.0"
CACHE = own_cache(VERSION)


@pytest.fixture(scope="module")
def stock(request: pytest.FixtureRequest) -> Iterator[Stack]:
    """One prefill and one decode engine without leases, and a router with --stock-reuse."""
    change: Path = request.path.parent / "stream_change"
    config = StackConfig(
        run_dir=run_dir(f"{VERSION}-stock"),
        model=MODEL,
        vllm_python=vllm_python(VERSION),
        max_model_len=LONGEST_PROMPT_TOKENS,
        lease=False,
        traces=False,
        connector=Connector(load_failure_policy="fail"),
        router_args=("--stock-reuse", *READS),
        engines=(
            EngineConfig("prefill", "prefill-0", env=CACHE, prefix_caching=False),
            EngineConfig("decode", "decode-0", env={"PYTHONPATH": str(change), **CACHE}),
        ),
    )
    with Stack(config) as running:
        yield running


def test_with_bidirectional_transfer_off_plain_pd_goes_on() -> None:
    """The switch is off: a lease endpoint changes nothing, nothing is asked, read or retained."""
    off = {"bidirectional_kv_xfer": False, "kvturn_lease_endpoint": "127.0.0.1:1"}
    config = StackConfig(
        run_dir=run_dir(f"{VERSION}-off"),
        model=MODEL,
        vllm_python=vllm_python(VERSION),
        max_model_len=LONGEST_PROMPT_TOKENS,
        lease=False,
        traces=False,
        engines=(
            EngineConfig(
                *("prefill", "prefill-0"), env=CACHE, prefix_caching=False, connector_config=off
            ),
            EngineConfig("decode", "decode-0", env=CACHE, connector_config=off),
        ),
    )
    messages = [{"role": "user", "content": document("off") + "\nWhat is the capital of France?"}]
    with Stack(config) as stack:
        reply, _ = chat(stack, "off", messages)
        messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": "Italy?"}]
        reply, told = chat(stack, "off", messages)
        assert reply
        assert told["verdict"] == "not_offered"
        logs = "".join(log.read_text() for log in stack.logs.values())
    assert "kvturn: registered" not in logs
    assert "kvturn: no session" not in logs


def test_growing_history_is_reused_once(stock: Stack) -> None:
    """The second turn reuses; a repeat of it finds the handle used and recomputes."""
    messages = [{"role": "user", "content": document("grow") + "\nWhat is the capital of France?"}]
    reply, told = chat(stock, "grow", messages)
    assert told["reused-tokens"] == "0"
    messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": "And Italy?"}]
    warm, told = chat(stock, "grow", messages)
    assert told["verdict"] == "reused"
    assert int(told["reused-tokens"]) > 180
    cold, told = chat(stock, "grow", messages, X_Kvturn_Reuse="off")
    assert told["reused-tokens"] == "0"
    assert warm == cold


def test_edited_history_is_recomputed(stock: Stack) -> None:
    """Other tokens than decode holds: the handle is not used."""
    messages = [{"role": "user", "content": document("edit") + "\nWhat is the capital of France?"}]
    reply, _ = chat(stock, "edit", messages)
    messages[0]["content"] = messages[0]["content"].replace("France", "Spain")
    messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": "And Italy?"}]
    warm, told = chat(stock, "edit", messages)
    assert told["reused-tokens"] == "0"
    assert warm == chat(stock, "edit-cold", messages, X_Kvturn_Reuse="off")[0]
