"""Drives a real prefill and decode engine turn by turn, each turn the way it is told."""

from __future__ import annotations

import http.client
import json
import random
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import grpc

from kvturn.v1 import common_pb2, lease_pb2, lease_pb2_grpc
from kvturn_cli.checkout import checkout, default_model, default_vllm_python
from kvturn_cli.engine import EngineConfig
from kvturn_cli.stack import Stack, StackConfig
from kvturn_router.choice.costs import Took
from kvturn_router.choice.plan import PlanKind

if TYPE_CHECKING:
    from collections.abc import Iterator

TIMEOUT_S = 120
GRANT_TIMEOUT_S = 5
ANSWER_TOKENS = 8
MODEL_LEN = 8192

Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class Setup:
    """How the two engines are started."""

    name: str
    block_tokens: int
    """On a CPU a multiple of 32."""
    chunk_tokens: int = 0
    """Tokens that decode computes in one step; 0: as many as prefill."""

    def stack(self, version: str) -> Stack:
        """A prefill engine without a prefix cache of its own and a decode engine; not started."""
        blocks = ("--block-size", str(self.block_tokens))
        chunks = ("--max-num-batched-tokens", str(self.chunk_tokens), "--max-num-seqs", "16")
        return Stack(
            StackConfig(
                run_dir=checkout() / "build" / "bench-local" / version,
                model=default_model(),
                vllm_python=default_vllm_python(version),
                engines=(
                    EngineConfig("prefill", "prefill-0", args=blocks, prefix_caching=False),
                    EngineConfig(
                        "decode",
                        "decode-0",
                        args=(*blocks, *chunks) if self.chunk_tokens else blocks,
                    ),
                ),
                # A conversation whose turn is long in coming keeps what it holds.
                lease_args=("--idle", "450"),
                router=False,
                traces=False,
                max_model_len=MODEL_LEN,
            )
        )


def text(seed: str, tokens: int) -> str:
    """About so many tokens that no other seed begins with."""
    numbers = random.Random(seed)
    # Three digits and what stands between them are four tokens.
    return f"{seed}: " + " ".join(
        str(numbers.randrange(100, 1000)) for _ in range(max(tokens // 4, 1))
    )


@dataclass(frozen=True, slots=True)
class Held:
    """What the lease service knows of a conversation before a turn."""

    lease_id: str
    token_count: int
    http_address: str


@dataclass(frozen=True, slots=True)
class Served:
    """One turn."""

    first_token_ms: float
    """From the turn's beginning to its first token."""
    took: Took
    reply: str


class Chat:
    """One conversation on a stack, driven as a router drives it."""

    def __init__(self, stack: Stack, conversation_id: str) -> None:
        self._stack = stack
        self._said = {
            "tenant": "",
            "model": stack.served_model_name,
            "conversation": conversation_id,
        }
        self._turn = 0
        channel = grpc.insecure_channel(stack.lease_address, [("grpc.enable_http_proxy", 0)])
        self._leases = lease_pb2_grpc.LeaseServiceStub(channel)

    def held(self) -> Held:
        """Waits for the last turn's grant and returns it."""
        request = lease_pb2.ResolveConversationRequest(
            conversation=common_pb2.ConversationKey(
                model=self._said["model"], conversation_id=self._said["conversation"]
            ),
            expected_turn=self._turn,
        )
        request.wait.FromSeconds(1)
        answer = self._leases.ResolveConversation(request, timeout=GRANT_TIMEOUT_S)
        assert answer.lease_id, f"nothing is held: {answer}"
        return Held(answer.lease_id, answer.token_count, answer.http_address)

    def serve(self, way: PlanKind, messages: list[Message], lease_id: str = "") -> Served:
        """Serves one turn; `lease_id` is for PULL."""
        self._turn += 1
        said: dict[str, Any] = {**self._said, "turn": self._turn}
        began_s = time.perf_counter()
        params: dict[str, Any] = {}
        report: dict[str, Any] = {}
        prefill_ms = 0.0
        if way is not PlanKind.LOCAL:
            leg = {**said, "lease_id": lease_id} if way is PlanKind.PULL else said
            params = self._prefill(messages, leg)
            report = params.pop("kvturn")
            prefill_ms = (time.perf_counter() - began_s) * 1e3
            if way is PlanKind.PULL:
                assert report["reused_tokens"] > 0, report
        sent_s = time.perf_counter()
        first_s, usage, reply = self._decode(messages, {**params, "kvturn": said})
        cached = (usage["prompt_tokens_details"] or {}).get("cached_tokens", 0)
        took = Took(
            prompt_tokens=usage["prompt_tokens"],
            reused_tokens=report.get("reused_tokens", 0),
            cached_tokens=report["local_tokens"] if report else cached,
            prefill_ms=prefill_ms,
            decode_ms=(first_s - sent_s) * 1e3,
            generated_tokens=0,
        )
        return Served((first_s - began_s) * 1e3, took, reply)

    def _prefill(self, messages: list[Message], said: dict[str, Any]) -> dict[str, Any]:
        body = {
            "model": self._said["model"],
            "messages": messages,
            "max_tokens": 1,
            "temperature": 0,
            "kv_transfer_params": {"do_remote_decode": True, "kvturn": said},
        }
        answer: dict[str, Any] = json.loads(b"".join(_post(self._stack.prefill_url, body)))
        params: dict[str, Any] = answer["kv_transfer_params"]
        return params

    def _decode(
        self, messages: list[Message], params: dict[str, Any]
    ) -> tuple[float, dict[str, Any], str]:
        """Returns when the first token came, the usage and the reply."""
        body = {
            "model": self._said["model"],
            "messages": messages,
            "max_tokens": ANSWER_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "kv_transfer_params": params,
        }
        first_s = 0.0
        usage: dict[str, Any] = {}
        reply = ""
        for line in _post(self._stack.decode_url, body):
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            first_s = first_s or time.perf_counter()
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                reply += choice["delta"].get("content") or ""
        return first_s, usage, reply


def _post(url: str, body: dict[str, Any]) -> Iterator[bytes]:
    """Yields an answer's lines. Raises AssertionError if it is not 200."""
    parts = urlsplit(url)
    assert parts.hostname is not None
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=TIMEOUT_S)
    try:
        connection.request(
            "POST",
            "/v1/chat/completions",
            json.dumps(body),
            {"Content-Type": "application/json"},
        )
        answer = connection.getresponse()
        assert answer.status == 200, answer.read()
        yield from answer
    finally:
        connection.close()
