"""Clients that no one here wrote: the `openai` package, streaming, with tools."""

import json

import openai
import pytest
from router_harness import FakeLease, Rig, router
from stub_engine import CHAT, Reply, Seen, chunk, event

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]


def client(rig: Rig) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{rig.url}/v1", api_key="secret", max_retries=0)


async def call_weather(seen: Seen, reply: Reply) -> None:
    """Streams one tool call in pieces, as vLLM does, or answers what a tool said."""
    last = seen.json["messages"][-1]
    await reply.begin_stream()
    await reply.event(chunk({"role": "assistant", "content": ""}))
    if last["role"] == "tool":
        await reply.event(chunk({"content": f"It is {last['content']}."}, "stop"))
    else:
        call = {"index": 0, "id": "call-1", "type": "function"}
        await reply.event(
            chunk({"tool_calls": [call | {"function": {"name": "get_weather", "arguments": ""}}]})
        )
        for piece in ('{"ci', 'ty": "Par', 'is"}'):
            call_piece = {"index": 0, "function": {"arguments": piece}}
            await reply.event(chunk({"tool_calls": [call_piece]}))
        await reply.event(chunk({}, "tool_calls"))
    usage = {"prompt_tokens": 48, "completion_tokens": 9, "total_tokens": 57}
    details = {"prompt_tokens_details": {"cached_tokens": 48}}
    await reply.send(event(chunk({}) | {"choices": [], "usage": usage | details}))
    await reply.end_stream()


async def test_a_conversation_with_a_tool_streams_through():
    """A tool call in pieces, its result, and an answer: three turns' worth of the API."""
    async with router(lease=FakeLease()) as rig, client(rig) as api:
        rig.decode.script(CHAT, call_weather)
        messages: list[dict[str, object]] = [{"role": "user", "content": "Weather in Paris?"}]
        texts = []
        for _ in range(2):
            stream = await api.chat.completions.create(
                model="m",
                messages=messages,
                tools=TOOLS,
                stream=True,
                stream_options={"include_usage": True},
                extra_body={"conversation_id": "c1"},
            )
            assert stream.response.headers["x-kvturn-conversation"] == "c1"
            arguments, text, finish, usage = "", "", None, None
            async for part in stream:
                usage = part.usage or usage
                for choice in part.choices:
                    text += choice.delta.content or ""
                    finish = choice.finish_reason or finish
                    for call in choice.delta.tool_calls or []:
                        arguments += call.function.arguments or ""
            assert usage.prompt_tokens_details.cached_tokens == 0
            texts.append((text, arguments, finish))
            call = {"name": "get_weather", "arguments": arguments}
            messages += [
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [{"id": "call-1", "type": "function", "function": call}],
                },
                {"role": "tool", "tool_call_id": "call-1", "content": "sunny"},
            ]
        assert texts == [
            ("", '{"city": "Paris"}', "tool_calls"),
            ("It is sunny.", "", "stop"),
        ]
        assert rig.decode.turns[1].json["tools"] == TOOLS
        assert [begin.conversation.conversation_id for begin in rig.lease.begun] == ["c1"] * 2
        assert rig.lease.begun[0].points[0] in rig.lease.begun[1].points[1:]


async def test_a_whole_answer_models_and_completions():
    """The rest of the API that agents use."""
    async with router() as rig, client(rig) as api:
        answer = await api.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "x"}], prompt_cache_key="k"
        )
        assert answer.choices[0].message.content == "The capital is Paris."
        assert [model.id async for model in api.models.list()] == ["m"]
        completion = await api.completions.create(model="m", prompt="x", max_tokens=5)
        assert completion.choices[0].text == "The capital is Paris."


async def test_errors_are_the_packages_own_exceptions():
    """A bad request, an engine's refusal, and a stream that breaks off."""

    async def die(seen: Seen, reply: Reply) -> None:
        await reply.begin_stream()
        await reply.event(chunk({"content": "The"}))
        reply.abort()

    async def refuse(seen: Seen, reply: Reply) -> None:
        error = {"message": "too long", "type": "BadRequestError", "param": None, "code": 400}
        await reply.json({"error": error}, 400)

    messages = [{"role": "user", "content": "x"}]
    async with router() as rig, client(rig) as api:
        with pytest.raises(openai.BadRequestError) as refused:
            await api.chat.completions.create(
                model="m", messages=messages, extra_body={"conversation_id": 7}
            )
        assert refused.value.param == "conversation_id"
        rig.decode.script(CHAT, die)
        stream = await api.chat.completions.create(model="m", messages=messages, stream=True)
        with pytest.raises(openai.APIError, match="gave no answer"):
            [part async for part in stream]
        rig.prefill.script(CHAT, refuse)
        with pytest.raises(openai.BadRequestError, match="too long"):
            await api.chat.completions.create(model="m", messages=messages)
    assert json.loads(rig.prefill.turns[0].body)["model"] == "m"
