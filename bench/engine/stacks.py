"""Pairs of real engines with each connector, and one-turn conversations held on them."""

from __future__ import annotations

import json
import random
import urllib.request
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvturn_cli.checkout import checkout, default_model, default_vllm_python
from kvturn_cli.engine import STOCK_CONNECTOR, Connector, EngineConfig
from kvturn_cli.stack import Stack, StackConfig

if TYPE_CHECKING:
    from collections.abc import Mapping

TIMEOUT_S = 600
MODEL_LEN = 2048
ANSWER_TOKENS = 16
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass(frozen=True, slots=True)
class Setup:
    """One way to run the two engines."""

    name: str
    connector: Connector
    extra: Mapping[str, object]
    """Laid over kv_connector_extra_config."""
    leases: bool
    """Whether there is a lease service."""

    def stack(self, version: str, decode_args: tuple[str, ...] = ()) -> Stack:
        """One prefill and one decode engine of that vLLM version, not started."""
        folder = self.name.replace(" ", "-").replace(",", "").replace(".", "_")
        engines = (
            EngineConfig("prefill", "prefill-0", prefix_caching=False, connector_config=self.extra),
            EngineConfig("decode", "decode-0", args=decode_args, connector_config=self.extra),
        )
        return Stack(
            StackConfig(
                run_dir=checkout() / "build" / "bench-engine" / f"{version}-{folder}",
                model=default_model(),
                vllm_python=default_vllm_python(version),
                engines=engines,
                connector=self.connector,
                lease=self.leases,
                router=False,
                traces=False,
                max_model_len=MODEL_LEN,
            )
        )


def stock(name: str, **extra: object) -> Setup:
    """vLLM's own NIXL connector."""
    return Setup(name, STOCK_CONNECTOR, extra, leases=False)


def patient_stock(name: str, **extra: object) -> Setup:
    """vLLM's own, but for NIXL's progress thread, which sleeps between looks.

    That thread spins on a core for as long as an engine lives, and hides what else costs CPU.
    kvturn's connector without a lease service is the stock one with that setting.
    """
    return Setup(name, Connector(), {**extra, "kvturn_nixl_progress_delay_us": 1000}, leases=False)


def ours(name: str, **extra: object) -> Setup:
    """kvturn's."""
    return Setup(name, Connector(), extra, leases=True)


def prompt(name: str, tokens: int) -> str:
    """About so many tokens of text that begins like no other name's."""
    numbers = random.Random(name)
    # Three digits and what stands between them are four tokens.
    return f"{name}: " + " ".join(str(numbers.randrange(100, 1000)) for _ in range(tokens // 4))


def hold_turn(stack: Stack, name: str, tokens: int) -> None:
    """One turn of a new conversation, as a router without reuse drives it."""
    said = {"model": stack.served_model_name, "conversation": name, "tenant": "", "turn": 1}
    body: dict[str, Any] = {
        "model": stack.served_model_name,
        "prompt": prompt(name, tokens),
        "temperature": 0,
        "ignore_eos": True,
    }
    handed = {"do_remote_decode": True, "do_remote_prefill": False, "kvturn": said}
    first = {**body, "max_tokens": 1, "kv_transfer_params": handed}
    params = _post(f"{stack.prefill_url}/v1/completions", first)["kv_transfer_params"]
    params["kvturn"] = said
    second = {**body, "max_tokens": ANSWER_TOKENS, "kv_transfer_params": params}
    _post(f"{stack.decode_url}/v1/completions", second)


def _post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with _opener.open(request, timeout=TIMEOUT_S) as answer:
        parsed: dict[str, Any] = json.load(answer)
        return parsed
