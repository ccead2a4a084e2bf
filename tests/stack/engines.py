"""The stacks of real engines that the tests of this folder run on."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

from kvturn_cli.engine import EngineConfig
from kvturn_cli.stack import Stack, StackConfig

if TYPE_CHECKING:
    from collections.abc import Iterator

CHECKOUT = Path(__file__).parents[2]
MODEL = CHECKOUT / "build" / "models" / "smollm2-135m-instruct"
VERSIONS = ("0.29.0", "0.32.0")
LONGEST_PROMPT_TOKENS = 4096
QUESTION_DEADLINE_MS = 500
"""Longer than by default: beside three engines that compute, an answer may take that long."""
READS = ("--plan", "pull")
"""A router that reads whatever can be read, as tests of reads need it."""
TOOLS = (
    *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
    *("--chat-template", str(Path(__file__).with_name("calls_tools.jinja"))),
    *("--override-generation-config", '{"temperature": 0}'),
)
"""Engines whose model calls a tool if a request has one."""
SMALL_BLOCKS = 16
SMALL_PREFILL_BLOCKS = 200
SMALL_TTL_S = 3.0
SMALL_LONGEST_READ_S = 1.5
SMALL_HOLD_S = 1.01 / 0.99 * (SMALL_TTL_S + SMALL_LONGEST_READ_S)
"""K*(TTL + R): how long decode holds what nobody releases."""


def vllm_python(version: str) -> Path:
    """Interpreter of the environment that `make setup` built for a vLLM version."""
    return CHECKOUT / ".envs" / f"vllm-{version}" / "bin" / "python"


def own_cache(version: str) -> dict[str, str]:
    """Environment of an engine that keeps what its vLLM finds out of a model to that version.

    All versions have one file for it, and each overwrites there what the others could have used:
    then every start of an engine takes up to ten seconds more.
    """
    return {"VLLM_CACHE_ROOT": str(CHECKOUT / ".envs" / f"vllm-{version}" / "cache")}


def run_dir(name: str) -> Path:
    """Where a stack's logs and traces lie after the tests."""
    return CHECKOUT / "build" / "test-stack" / name


@contextlib.contextmanager
def small_stack(name: str, version: str, **env: str) -> Iterator[Stack]:
    """One prefill engine and a decode engine whose KV memory holds five conversations.

    The times of the lease rules are short, so that what runs out runs out within seconds; an
    engine that is frozen meanwhile stays in the router's fleet.
    """
    override = "--num-gpu-blocks-override"
    env = {**own_cache(version), **env}
    config = StackConfig(
        run_dir=run_dir(f"{version}-{name}"),
        model=MODEL,
        vllm_python=vllm_python(version),
        max_model_len=1536,
        lease_args=(
            *("--session-ttl", str(SMALL_TTL_S), "--heartbeat", "0.5"),
            *("--longest-read", str(SMALL_LONGEST_READ_S)),
        ),
        router_args=("--health-failures", "100", *READS),
        engines=(
            EngineConfig(
                *("prefill", "prefill-0"),
                args=(override, str(SMALL_PREFILL_BLOCKS)),
                env=env,
                prefix_caching=False,
            ),
            EngineConfig("decode", "decode-0", args=(override, str(SMALL_BLOCKS)), env=env),
        ),
    )
    with Stack(config) as running:
        yield running
