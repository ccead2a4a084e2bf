"""A turn from client to trace through the router, and what ends a retention, on real engines."""

from __future__ import annotations

import json
import os
import signal
import time
import urllib.error
import urllib.request
from http.client import HTTPConnection
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import grpc
from conversation import GRANT_TIMEOUT_S, Conversation, post
from engines import QUESTION_DEADLINE_MS
from prose import document
from routers import FOUND

from kvturn.v1 import common_pb2, lease_pb2, router_pb2, router_pb2_grpc
from kvturn_cli.leash import descendants

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvturn_cli.stack import Stack

WAIT_S = 20
POLL_S = 0.05
QUESTION_S = QUESTION_DEADLINE_MS / 1000
"""The question deadline of router and connector."""
LATE_S = QUESTION_S + 2.0
"""How much later a turn may be without the lease service: waiting for it would take longer."""
TRIES = 3


def wait_until(holds: Callable[[], bool], what: str, timeout_s: float = WAIT_S) -> None:
    """Polls until `holds`; fails naming `what` after `timeout_s`."""
    deadline_s = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline_s, f"not within {timeout_s} s: {what}"
        time.sleep(POLL_S)


def least(measure: Callable[[], float], enough: float) -> float:
    """The least of a few measurements: a busy machine makes some late, not each of them.

    The first that is not above `enough` ends them.
    """
    measured = [measure()]
    while min(measured) > enough and len(measured) < TRIES:
        measured.append(measure())
    return min(measured)


def chat(
    stack: Stack, conversation: str, messages: list[dict[str, str]], **headers: str
) -> tuple[str, dict[str, str]]:
    """One streamed turn through the router. Returns the text and the x-kvturn headers."""
    text, told, _ = timed_chat(stack, conversation, messages, **headers)
    return text, told


def timed_chat(
    stack: Stack, conversation: str, messages: list[dict[str, str]], **headers: str
) -> tuple[str, dict[str, str], float]:
    """As `chat`; returns also the time to the first token, in seconds."""
    began_s = time.monotonic()
    request = urllib.request.Request(
        f"{stack.router_url}/v1/chat/completions",
        json.dumps(
            {
                "model": stack.served_model_name,
                "messages": messages,
                "max_tokens": 12,
                "temperature": 0,
                "stream": True,
            }
        ).encode(),
        {
            "Content-Type": "application/json",
            "X-Conversation-Id": conversation,
            **{name.replace("_", "-"): value for name, value in headers.items()},
        },
    )
    text = ""
    with urllib.request.urlopen(request, timeout=120) as answer:
        told = {
            name.lower().removeprefix("x-kvturn-"): value
            for name, value in answer.headers.items()
            if name.lower().startswith("x-kvturn-")
        }
        lines = []
        for line in answer:
            if line.startswith(b"data: "):
                lines.append(line.strip())
                # The first event says that there will be an answer, the second is its beginning.
                if len(lines) == 2:
                    first_token_s = time.monotonic() - began_s
    assert lines[-1] == b"data: [DONE]"
    for line in lines[:-1]:
        for choice in json.loads(line[6:])["choices"]:
            text += choice["delta"].get("content") or ""
    return text, told, first_token_s


def holds_what_is_leased(observer: Conversation) -> bool:
    """Decode retains just the blocks of its leases, by its own count; idle, too."""
    engines = observer.leases.ListEngines(lease_pb2.ListEnginesRequest(), timeout=GRANT_TIMEOUT_S)
    held = next(one for one in engines.engines if one.description.engine_id == "decode-0")
    leased = sum(lease.block_count for lease in all_leases(observer))
    return held.memory.retained_blocks == leased > 0


def all_leases(observer: Conversation) -> list[lease_pb2.Lease]:
    """All leases, whatever their state."""
    request = lease_pb2.ListLeasesRequest(page_size=1000)
    return list(observer.leases.ListLeases(request, timeout=GRANT_TIMEOUT_S).leases)


def step(stack: Stack) -> None:
    """Lets the decode engine take a few steps."""
    body = {"model": stack.served_model_name, "prompt": "Hello", "max_tokens": 4}
    post(f"{stack.decode_url}/v1/completions", body)


def test_a_conversation_comes_home(stack: Stack) -> None:
    """Three growing turns, streamed: the second and third reuse; then the conversation ends."""
    messages = [{"role": "user", "content": document("home") + "\nWhat is the capital of France?"}]
    reply, told = chat(stack, "home", messages)
    assert told["verdict"] == "first_turn"
    for question in ("And of Italy?", "And of Spain?"):
        messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": question}]
        reply, told = chat(stack, "home", messages)
        assert told["verdict"] in FOUND
        # All but what is not worth a read (fewer than 64 tokens) and the new question.
        found = int(told["reused-tokens"]) + int(told["local-tokens"])
        assert found > int(told["prompt-tokens"]) - 100
    url = f"{stack.router_url}/kvturn/v1/conversations/home?model={stack.served_model_name}"
    with urllib.request.urlopen(urllib.request.Request(url, method="DELETE"), timeout=10):
        pass
    messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": "Thanks."}]
    _, told = chat(stack, "home", messages)
    assert told["verdict"] == "ended"
    assert told["reused-tokens"] == "0"


def test_reuse_off_reads_nothing_and_retains_nothing(stack: Stack) -> None:
    """`X-Kvturn-Reuse: off` makes a baseline turn."""
    messages = [{"role": "user", "content": document("off") + "\nWhat is the capital of France?"}]
    _, told = chat(stack, "off", messages, X_Kvturn_Reuse="off")
    assert told["verdict"] == "turned_off"
    assert Conversation(stack, "off").resolve().lease_id == ""


def whole(stack: Stack, path: str, conversation: str, body: dict[str, Any]) -> tuple[Any, Any]:
    """One turn through the router, not streamed. Returns the answer and the x-kvturn headers."""
    request = urllib.request.Request(
        f"{stack.router_url}{path}",
        json.dumps({"model": stack.served_model_name, "temperature": 0, **body}).encode(),
        {"Content-Type": "application/json", "X-Conversation-Id": conversation},
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer), answer.headers


def test_whole_answers_keep_all_that_decode_said(stack: Stack) -> None:
    """Not streamed: logprobs, finish reason and usage are there, and the second turn reuses."""
    messages = [{"role": "user", "content": document("whole") + "\nWhat is the capital of France?"}]
    body = {"messages": messages, "max_tokens": 8, "logprobs": True, "top_logprobs": 2}
    first, _ = whole(stack, "/v1/chat/completions", "whole", body)
    choice = first["choices"][0]
    assert choice["finish_reason"] in ("stop", "length")
    assert len(choice["logprobs"]["content"][0]["top_logprobs"]) == 2
    messages += [choice["message"], {"role": "user", "content": "And Italy?"}]
    second, told = whole(stack, "/v1/chat/completions", "whole", body)
    reused, local = int(told["x-kvturn-reused-tokens"]), int(told["x-kvturn-local-tokens"])
    assert reused > 0
    assert second["usage"]["prompt_tokens"] == int(told["x-kvturn-prompt-tokens"])
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == reused + local


def test_completions_reuse_like_chat(stack: Stack) -> None:
    """A growing prompt of /v1/completions."""
    prompt = document("text") + "\nIn short, this text"
    body = {"prompt": prompt, "max_tokens": 8}
    first, _ = whole(stack, "/v1/completions", "text", body)
    body["prompt"] = prompt + first["choices"][0]["text"] + " Furthermore,"
    _, told = whole(stack, "/v1/completions", "text", body)
    assert told["x-kvturn-verdict"] in ("reused", "partial_prefix")
    assert int(told["x-kvturn-reused-tokens"]) > 0


def test_grpc_chat_reuses_like_http(stack: Stack) -> None:
    """The same conversation goes on over gRPC."""
    messages = [{"role": "user", "content": document("grpc") + "\nWhat is the capital of France?"}]
    reply, _ = chat(stack, "grpc", messages)
    messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": "And Italy?"}]
    body = {"model": stack.served_model_name, "messages": messages, "max_tokens": 8}
    with grpc.insecure_channel(stack.router_grpc, [("grpc.enable_http_proxy", 0)]) as channel:
        stub = router_pb2_grpc.RouterServiceStub(channel)
        request = router_pb2.ChatRequest(conversation_id="grpc", body_json=json.dumps(body))
        parts = list(stub.Chat(request, timeout=120))
    assert parts[0].report.verdict in (
        common_pb2.VERDICT_REUSED,
        common_pb2.VERDICT_PARTIAL_PREFIX,
    )
    assert parts[0].report.reused_tokens > 0
    assert json.loads(parts[-1].chunk_json)["choices"] is not None


def test_one_trace_per_turn_from_router_to_connectors(stack: Stack) -> None:
    """A client's trace context goes through router, lease service and both connectors."""
    trace_id = os.urandom(16).hex()
    traceparent = f"00-{trace_id}-{os.urandom(8).hex()}-01"
    messages = [{"role": "user", "content": document("trace") + "\nWhat is the capital of France?"}]
    reply, _ = chat(stack, "trace", messages)
    messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": "And Italy?"}]
    _, told = chat(stack, "trace", messages, traceparent=traceparent)
    wanted = {"turn", "prefill", "decode", "begin_read", "grant", "BeginRead", "Grant"}
    if told["verdict"] != "below_threshold":  # As where prefill has it in a cache of its own.
        wanted.add("kv_read")

    def seen() -> dict[str, dict[str, Any]]:
        return {span["name"]: span for span in spans(stack) if span["traceId"] == trace_id}

    wait_until(lambda: wanted <= seen().keys(), f"spans {sorted(wanted)}")
    found = seen()
    assert found["begin_read"]["parentSpanId"] in {span["spanId"] for span in found.values()}, (
        "the connector's span hangs outside the turn"
    )
    assert found["BeginRead"]["parentSpanId"] == found["begin_read"]["spanId"]
    ids = [span["spanId"] for span in spans(stack) if span["traceId"] == trace_id]
    assert len(ids) == len(set(ids)), "two spans of one turn have the same id"
    assert found["Grant"]["parentSpanId"] == found["grant"]["spanId"]
    assert "capital" not in stack.trace_file.read_text(), "prompt text in a span"


def spans(stack: Stack) -> list[dict[str, Any]]:
    """All spans of the trace file."""
    return [
        span
        for line in stack.trace_file.read_text().splitlines()
        for resource in json.loads(line)["resourceSpans"]
        for scope in resource["scopeSpans"]
        for span in scope["spans"]
    ]


def test_turn_ended_by_a_stop_string_is_retained(stack: Stack) -> None:
    """The core sees an abort; what was computed is registered all the same."""
    turn = Conversation(stack, "stop", turn=1)
    messages = [{"role": "user", "content": document("stop") + "\nCount from one to ten in words."}]
    params = turn.prefill(messages).params
    assert (
        turn.decoded(messages, params, 60, stop=[" "], ignore_eos=True)["finish_reason"] == "stop"
    )
    assert turn.resolve(1).token_count > 180


def test_turn_of_a_client_that_hung_up_is_retained(stack: Stack) -> None:
    """The client leaves in the middle of the stream; the next turn can reuse what was computed."""
    turn = Conversation(stack, "hung-up", turn=1)
    messages = [{"role": "user", "content": document("hung-up") + "\nTell me a long story."}]
    params = turn.prefill(messages).params
    place = urlsplit(stack.decode_url)
    connection = HTTPConnection(str(place.hostname), place.port, timeout=60)
    said = {"tenant": "", "model": stack.served_model_name, "conversation": "hung-up", "turn": 1}
    body = {
        "model": stack.served_model_name,
        "messages": messages,
        "max_tokens": 1000,
        "ignore_eos": True,
        "stream": True,
        "kv_transfer_params": {**params, "kvturn": said},
    }
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
    answer = connection.getresponse()
    for _ in range(6):
        answer.readline()
    answer.close()
    connection.close()
    wait_until(lambda: bool(turn.resolve().lease_id), "a lease for the turn that was left")


def test_turn_sent_to_decode_alone_is_retained_and_freed(stack: Stack) -> None:
    """A `local` turn, which stock code would retain for ever."""
    turn = Conversation(stack, "local", turn=1)
    turn.decode([{"role": "user", "content": document("local")}], {})
    lease_id = turn.resolve(1).lease_id
    assert lease_id
    wait_until(lambda: holds_what_is_leased(turn), "decode to hold what is leased")
    turn.leases.RevokeLease(lease_pb2.RevokeLeaseRequest(lease_id=lease_id), timeout=5)
    assert turn.resolve().verdict == common_pb2.VERDICT_RELEASED
    assert lease_id not in set_of_all(turn)
    wait_until(lambda: holds_what_is_leased(turn), "decode to free the revoked blocks")


def test_request_without_a_conversation_retains_nothing(stack: Stack) -> None:
    """Neither plain requests nor P/D requests that name no conversation are retained."""
    observer = Conversation(stack, "observer")
    step(stack)
    before = set_of_leases(observer)
    messages = [{"role": "user", "content": document("nobody")}]
    params = post(
        f"{stack.prefill_url}/v1/chat/completions",
        {
            "model": stack.served_model_name,
            "messages": messages,
            "max_tokens": 1,
            "kv_transfer_params": {"do_remote_decode": True},
        },
    )["kv_transfer_params"]
    params.pop("kvturn", None)
    body = {"model": stack.served_model_name, "messages": messages, "max_tokens": 4}
    post(f"{stack.decode_url}/v1/chat/completions", {**body, "kv_transfer_params": params})
    marker = Conversation(stack, "marker")
    marker.say("Hello")  # Grants come in order: with this one there, the others would be.
    assert set_of_leases(observer) - before == {marker.resolve().lease_id}


def set_of_leases(observer: Conversation) -> set[str]:
    """All lease ids that can be read now."""
    active = lease_pb2.Lease.STATE_ACTIVE
    return {lease.lease_id for lease in all_leases(observer) if lease.state == active}


def test_read_blocks_are_freed(stack: Stack) -> None:
    """After the read nothing of the retention stays on decode."""
    turn = Conversation(stack, "consumed")
    turn.say(document("consumed") + "\nWhat is the capital of France?")
    lease_id = turn.resolve().lease_id
    warm = turn.prefill([*turn.messages, {"role": "user", "content": "And Italy?"}], 0, lease_id)
    assert warm.reused_tokens > 0
    wait_until(lambda: lease_id not in set_of_all(turn), "the lease to be gone")
    assert turn.resolve().verdict == common_pb2.VERDICT_CONSUMED
    turn.say("Tell me more.")
    wait_until(lambda: holds_what_is_leased(turn), "decode to free what was read")


def set_of_all(observer: Conversation) -> set[str]:
    """All lease ids, whatever their state."""
    return {lease.lease_id for lease in all_leases(observer)}


def test_frozen_lease_service_costs_reuse_and_nothing_else(stack: Stack) -> None:
    """The lease service stops answering: the turn recomputes; when it answers again, all heals.

    The turn comes later by no more than the question deadline, but for what a busy machine adds:
    that makes one of a few late, not each of them.
    """
    assert least(lambda: lateness_while_frozen(stack), LATE_S) <= LATE_S


def lateness_while_frozen(stack: Stack) -> float:
    """How much later a turn's first token comes while the lease service is frozen, in seconds.

    Returns when turns reuse again.
    """
    frozen = f"frozen-{time.monotonic_ns()}"
    without_s = second_turn_without_reuse(stack, f"never-asked-{frozen}")
    messages = history(stack, frozen)
    for pid in lease_pids(stack):
        os.kill(pid, signal.SIGSTOP)
    try:
        reply, told, frozen_s = timed_chat(stack, frozen, messages)
    finally:
        for pid in lease_pids(stack):
            os.kill(pid, signal.SIGCONT)
    assert told["verdict"] == "lease_service_unreachable"
    assert reply
    print(f"first token after {frozen_s:.3f} s, without reuse {without_s:.3f} s")
    healed_s = time.monotonic()
    wait_until(lambda: reuses(stack, "thawed"), "a turn that reuses")
    print(f"reuse was back {time.monotonic() - healed_s:.1f} s after the thaw")
    return frozen_s - without_s


def history(stack: Stack, name: str) -> list[dict[str, str]]:
    """Holds a first turn and returns the messages of the second one."""
    messages = [{"role": "user", "content": document(name) + "\nWhat is the capital of France?"}]
    reply, _ = chat(stack, name, messages)
    return [*messages, {"role": "assistant", "content": reply}, {"role": "user", "content": "Why?"}]


def second_turn_without_reuse(stack: Stack, name: str) -> float:
    """Time to the first token of a second turn that asks nobody anything."""
    messages = history(stack, name)
    return timed_chat(stack, name, messages, X_Kvturn_Reuse="off")[2]


def reuses(stack: Stack, name: str) -> bool:
    """Holds two turns of a new conversation. True if the second one reused."""
    name = f"{name}-{time.monotonic_ns()}"
    messages = [{"role": "user", "content": document(name) + "\nWhat is the capital of France?"}]
    reply, _ = chat(stack, name, messages)
    messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": "And Italy?"}]
    return int(chat(stack, name, messages)[1]["reused-tokens"]) > 0


def lease_pids(stack: Stack) -> list[int]:
    """Pids of the lease service, its leash not among them."""
    lease = next(process for process in stack.processes if process.name == "lease")
    assert lease.id is not None
    return descendants(lease.id.pid)
