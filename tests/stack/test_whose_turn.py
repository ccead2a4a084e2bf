"""Which conversation a turn belongs to, where the client does not say, on real engines."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import grpc
from prose import document
from routers import FOUND, Talk, turns_of
from test_life_of_a_turn import wait_until

from kvturn.client import connect, verdict_name
from kvturn.v1 import router_pb2, router_pb2_grpc

if TYPE_CHECKING:
    from kvturn_cli.stack import Stack


def test_a_client_that_tags_nothing_reuses(stack: Stack) -> None:
    """Three turns over HTTP, streamed and not, then one over gRPC: told by their history."""
    talk = Talk(stack, document("untagged"))
    first = talk.say("What is the capital of France?")
    assert first.told["verdict"] == "first_turn"
    second = talk.say("And of Italy?", stream=False)
    third = talk.say("And of Spain?")
    assert second.goes_on, second.told
    assert third.goes_on, third.told
    name = first.told["conversation"]
    assert name == second.told["conversation"] == third.told["conversation"]
    assert [int(one.told["turn"]) for one in (first, second, third)] == [1, 2, 3]

    talk.messages.append({"role": "user", "content": "And of Greece?"})
    with grpc.insecure_channel(stack.router_grpc, [("grpc.enable_http_proxy", 0)]) as channel:
        stub = router_pb2_grpc.RouterServiceStub(channel)
        parts = list(stub.Chat(router_pb2.ChatRequest(body_json=json.dumps(talk.body()))))
    told = parts[0].report
    assert (told.conversation_id, told.turn) == (name, 4)
    assert verdict_name(told) in FOUND
    assert told.reused_tokens + told.local_tokens > 120
    wait_until(lambda: numbers(stack, name) == [1, 2, 3, 4], "the report of the last turn")


def numbers(stack: Stack, name: str) -> list[int]:
    return [turn["turn"] for turn in turns_of(stack, name)]


def test_two_conversations_of_one_session_are_told_apart(stack: Stack) -> None:
    """An agent's two threads under one `session_id`, turn by turn in alternation: both reuse."""
    talks = [Talk(stack, document(f"thread {index}")) for index in range(2)]
    for talk in talks:
        talk.say("What is the capital of France?", session_id="an agent's session")
    names = set()
    for question in ("And of Italy?", "And of Spain?"):
        for talk in talks:
            answered = talk.say(question, session_id="an agent's session")
            assert answered.goes_on, answered.told
            names.add(answered.told["conversation"])
    assert len(names) == 2


async def test_the_typed_client_holds_a_conversation(stack: Stack) -> None:
    """As the documentation shows it: a whole answer, then a streamed one; left, it is ended."""
    question = {"role": "user", "content": document("typed") + "\nWhat is the capital of France?"}
    async with connect(stack.router_grpc) as router:
        async with router.conversation(stack.served_model_name) as conversation:
            answer = await conversation.complete(messages=[question], max_tokens=16)
            assert answer.verdict == "first_turn"
            reply = answer.body["choices"][0]["message"]
            assert reply["content"]
            messages = [question, reply, {"role": "user", "content": "And of Italy?"}]
            stream = conversation.chat(messages=messages, max_tokens=16)
            text = ""
            async for chunk in stream:
                text += chunk["choices"][0]["delta"].get("content") or ""
            assert text
            assert stream.report is not None
            assert verdict_name(stream.report) in FOUND
            assert await conversation.away(5) > 0
        told = await router.turns(stack.served_model_name, conversation.id)
        assert [turn.turn for turn in told] == [1, 2]
        async with router.conversation(stack.served_model_name, conversation.id) as again:
            answer = await again.complete(messages=messages, max_tokens=4)
            assert answer.verdict == "ended"
