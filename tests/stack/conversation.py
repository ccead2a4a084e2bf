"""Drives engines leg by leg, as the router does, and looks at what each leg returns."""

from __future__ import annotations

import json
import urllib.request
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import grpc

from kvturn.v1 import common_pb2, lease_pb2, lease_pb2_grpc

if TYPE_CHECKING:
    from kvturn_cli.stack import Stack

TIMEOUT_S = 120
GRANT_TIMEOUT_S = 5
MISSING_TOKEN_DISTANCE = 3.0
TOP_LOGPROBS = 20

Message = dict[str, str]


def post(url: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> dict[str, Any]:
    """POSTs JSON and returns the JSON answer."""
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json", **(headers or {})}
    )
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
        parsed: dict[str, Any] = json.load(answer)
        return parsed


@dataclass
class Prefilled:
    """What a prefill leg gave."""

    params: dict[str, Any]
    """kv_transfer_params for the decode leg, without ours."""
    report: dict[str, Any]
    """Our connector's report."""
    logprobs: dict[str, float]
    """Top `TOP_LOGPROBS` of the first token."""

    @property
    def reused_tokens(self) -> int:
        return int(self.report["reused_tokens"])

    @property
    def verdict(self) -> str:
        return str(self.report.get("verdict", ""))


def distance(one: dict[str, float], other: dict[str, float]) -> float:
    """Sum of the logprob differences of all tokens that are among the top five of either.

    Each side holds its top `TOP_LOGPROBS`, so that a near tie for the fifth place costs nothing;
    a token that the other side does not even have there costs `MISSING_TOKEN_DISTANCE`.
    """
    top = {token for side in (one, other) for token in sorted(side, key=side.__getitem__)[-5:]}
    return sum(
        abs(one[token] - other[token])
        if token in one and token in other
        else MISSING_TOKEN_DISTANCE
        for token in top
    )


@dataclass
class Conversation:
    """One conversation, driven past the router."""

    stack: Stack
    conversation_id: str
    tenant: str = ""
    turn: int = 0
    messages: list[Message] = field(default_factory=list)
    held_ids: list[int] = field(default_factory=list)
    """Tokens whose KV decode holds after `say`: all but the last one, which was never computed."""

    @cached_property
    def leases(self) -> lease_pb2_grpc.LeaseServiceStub:
        return lease_pb2_grpc.LeaseServiceStub(
            grpc.insecure_channel(self.stack.lease_address, [("grpc.enable_http_proxy", 0)])
        )

    @property
    def key(self) -> common_pb2.ConversationKey:
        return common_pb2.ConversationKey(
            tenant=self.tenant,
            model=self.stack.served_model_name,
            conversation_id=self.conversation_id,
        )

    def resolve(self, expected_turn: int = 0) -> lease_pb2.ResolveConversationResponse:
        """Asks for the lease; waits for the grant of `expected_turn` if there is one."""
        request = lease_pb2.ResolveConversationRequest(
            conversation=self.key, expected_turn=expected_turn
        )
        if expected_turn:
            request.wait.FromSeconds(1)
        return self.leases.ResolveConversation(request, timeout=GRANT_TIMEOUT_S)

    def prefill(
        self, messages: list[Message], prefill: int = 0, lease_id: str = "", **body: Any
    ) -> Prefilled:
        """Runs a prefill leg on prefill engine `prefill`."""
        said = self._said()
        if lease_id:
            said["lease_id"] = lease_id
        answer = post(
            self.stack.engine_urls("prefill")[prefill] + "/v1/chat/completions",
            {
                "model": self.stack.served_model_name,
                "messages": messages,
                "max_tokens": 1,
                "temperature": 0,
                "logprobs": True,
                "top_logprobs": TOP_LOGPROBS,
                "kv_transfer_params": {"do_remote_decode": True, "kvturn": said},
                **body,
            },
        )
        params = answer["kv_transfer_params"]
        report = params.pop("kvturn")
        top = answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
        return Prefilled(params, report, {one["token"]: one["logprob"] for one in top})

    def decode(
        self, messages: list[Message], params: dict[str, Any], max_tokens: int = 12, **body: Any
    ) -> str:
        """Runs a decode leg that belongs to this conversation. Returns the text."""
        return str(self.decoded(messages, params, max_tokens, **body)["message"]["content"])

    def decoded(
        self, messages: list[Message], params: dict[str, Any], max_tokens: int = 12, **body: Any
    ) -> dict[str, Any]:
        """As `decode`; returns the whole choice."""
        answer = post(
            self.stack.decode_url + "/v1/chat/completions",
            {
                "model": self.stack.served_model_name,
                "messages": messages,
                "max_tokens": max_tokens,
                "temperature": 0,
                "return_token_ids": True,
                "kv_transfer_params": {**params, "kvturn": self._said()},
                **body,
            },
        )
        choice: dict[str, Any] = answer["choices"][0]
        self.held_ids = [*answer["prompt_token_ids"], *choice["token_ids"]][:-1]
        return choice

    def say(self, text: str, prefill: int = 0, max_tokens: int = 12, **body: Any) -> str:
        """Holds one turn without reuse, grows the history and waits for the grant."""
        self.turn += 1
        self.messages.append({"role": "user", "content": text})
        params = self.prefill(self.messages, prefill).params
        reply = self.decode(self.messages, params, max_tokens, **body)
        self.messages.append({"role": "assistant", "content": reply})
        assert self.granted_turn() == self.turn
        return reply

    def granted_turn(self) -> int:
        """Turn of the newest lease, waiting for the one of this turn."""
        self.resolve(self.turn)
        listed = self.leases.ListLeases(
            lease_pb2.ListLeasesRequest(conversation=self.key), timeout=GRANT_TIMEOUT_S
        )
        active = (one for one in listed.leases if one.state == lease_pb2.Lease.STATE_ACTIVE)
        return self.turn if any(active) else 0

    def cold(self, messages: list[Message]) -> dict[str, float]:
        """Top of the first token, computed without any reuse or cache."""
        answer = post(
            self.stack.engine_urls("prefill")[0] + "/v1/chat/completions",
            {
                "model": self.stack.served_model_name,
                "messages": messages,
                "max_tokens": 1,
                "temperature": 0,
                "logprobs": True,
                "top_logprobs": TOP_LOGPROBS,
            },
        )
        top = answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
        return {one["token"]: one["logprob"] for one in top}

    def generate_alone(self, messages: list[Message], prefill: int, max_tokens: int) -> str:
        """Lets a prefill engine generate by itself, with no other engine in play."""
        answer = post(
            self.stack.engine_urls("prefill")[prefill] + "/v1/chat/completions",
            {
                "model": self.stack.served_model_name,
                "messages": messages,
                "max_tokens": max_tokens,
                "temperature": 0,
                "ignore_eos": True,
            },
        )
        return str(answer["choices"][0]["message"]["content"])

    def _said(self) -> dict[str, Any]:
        return {
            "tenant": self.tenant,
            "model": self.stack.served_model_name,
            "conversation": self.conversation_id,
            "turn": self.turn,
        }
