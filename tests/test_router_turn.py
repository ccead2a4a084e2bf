"""Turns through prefill and decode: what engines are sent and what clients get."""

import asyncio
import gzip
import json
import time

import pytest
from router_harness import router, turn_body
from stub_engine import CHAT, COMPLETIONS, Reply, Seen, chunk, event

TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


async def test_a_turn_goes_through_prefill_and_then_decode():
    """Prefill computes one token and hands over; decode gets all the client asked and the KV."""
    async with router() as rig:
        answer = await rig.post(turn_body(stream=True, temperature=0.5, conversation_id="c1"))
        assert answer.status == 200
        prefill, decode = rig.prefill.turns[0].json, rig.decode.turns[0].json
        messages = turn_body()["messages"]
        assert prefill == {
            "model": "m",
            "messages": messages,
            "temperature": 0.5,
            "stream": False,
            "max_tokens": 1,
            "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False},
        }
        assert decode == {
            "model": "m",
            "messages": messages,
            "max_tokens": 16,
            "stream": True,
            "temperature": 0.5,
            "kv_transfer_params": rig.prefill.handle,
        }


async def test_a_stream_reaches_the_client_as_decode_sent_it():
    """Tool calls in forty pieces, reasoning, refusals, nulls, unknown keys, odd spacing."""
    arguments = json.dumps({"text": "x" * 12_000})
    events = [
        event(chunk({"role": "assistant", "content": None, "reasoning_content": "hm"})),
        b'data:  {"choices" : [ ] , "new": 123456789012345678901234567890, "f": 1.50}\n\n',
        b": keep-alive\n\n",
        event({"object": "no choices"}),
        event(chunk({"content": "é😀", "refusal": None}, unknown={"a": [1]})),
        *[
            event(chunk({"tool_calls": [{"index": 0, "function": {"arguments": piece}}]}))
            for piece in (arguments[at : at + 300] for at in range(0, len(arguments), 300))
        ],
        event(chunk({}, "tool_calls", stop_reason=None)),
    ]

    async def play(seen: Seen, reply: Reply) -> None:
        await reply.begin_stream()
        for data in events:
            await reply.send(data)
        await reply.end_stream()

    async with router() as rig:
        rig.decode.script(CHAT, play)
        answer = await rig.post(turn_body(stream=True, tools=TOOLS))
        assert answer.whole
        assert answer.body == b"".join(events) + b"data: [DONE]\n\n"
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert answer.headers["cache-control"] == "no-cache"


async def test_a_whole_answer_reaches_the_client_as_decode_sent_it():
    """Not streamed: tool calls, logprobs, fingerprint and unknown keys, byte for byte."""
    body = (
        b'{"id":"x","choices":[{"message":{"content":null,"tool_calls":[{"id":"1","function":'
        b'{"name":"f","arguments":"' + b"a" * 9000 + b'"}}]},"logprobs":{"content":[]},'
        b'"finish_reason":"tool_calls"}],"system_fingerprint":"fp", "usage":{"prompt_tokens":48},'
        b'"big":123456789012345678901234567890}'
    )

    async def play(seen: Seen, reply: Reply) -> None:
        await reply.whole(body)

    async with router() as rig:
        rig.decode.script(CHAT, play)
        answer = await rig.post(turn_body(tools=TOOLS))
        assert answer.body == body
        assert answer.headers["content-type"] == "application/json"
        assert answer.headers["content-length"] == str(len(body))


async def test_each_piece_of_a_stream_goes_on_when_it_comes():
    """Twenty pieces of 57 bytes, each sent only after the client has the one before."""
    stream = b"".join(event(chunk({"content": f"token {n}"})) for n in range(12))
    pieces = [stream[at : at + 57] for at in range(0, 57 * 20, 57)]
    received = asyncio.Semaphore(1)

    async def play(seen: Seen, reply: Reply) -> None:
        await reply.begin_stream()
        for piece in pieces:
            await received.acquire()
            await reply.send(piece)
        await reply.end_stream(done=False)

    async with router() as rig:
        rig.decode.script(CHAT, play)
        client = await rig.client()
        await client.send("POST", CHAT, json.dumps(turn_body(stream=True)).encode())
        await client.head()
        for piece in pieces:
            assert await client.piece() == piece
            received.release()
        assert await client.piece() is None


@pytest.mark.parametrize("reply_kind", ["null", "absent", "no blocks", "empty groups"])
async def test_prefill_that_hands_over_nothing_leaves_the_prompt_to_decode(reply_kind):
    """A prompt shorter than a block, or ended by its first token: decode is called normally."""
    async with router() as rig:
        answer = rig.prefill.prefill_answer()
        if reply_kind == "absent":
            del answer["kv_transfer_params"]
        else:
            answer["kv_transfer_params"] = {
                "null": None,
                "no blocks": rig.prefill.handle | {"remote_block_ids": []},
                "empty groups": rig.prefill.handle | {"remote_block_ids": [[], []]},
            }[reply_kind]

        async def play(seen: Seen, reply: Reply) -> None:
            await reply.json(answer)

        rig.prefill.script(CHAT, play)
        got = await rig.post(turn_body())
        assert got.status == 200
        assert "kv_transfer_params" not in rig.decode.turns[0].json
        # Decode had it all in its own cache, but prefill computed it.
        assert got.json["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("report", "cached_tokens", "told"),
    [
        ({"verdict": "reused", "prompt_tokens": 48, "reused_tokens": 30, "local_tokens": 2}, 9, 32),
        (None, 32, 32),
        (None, None, 0),
        (None, 4000, 48),
    ],
)
async def test_cached_tokens_means_what_no_engine_computed(stream, report, cached_tokens, told):
    """Equal in both modes, equal to the headers, never above the prompt."""
    async with router() as rig:
        rig.prefill.report = report
        rig.prefill.cached_tokens = cached_tokens
        body = turn_body(stream=stream)
        if stream:
            body["stream_options"] = {"include_usage": True}
        answer = await rig.post(body)
        usage = json.loads(answer.events[-2])["usage"] if stream else answer.json["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == told
        assert usage["completion_tokens"] == 5
        if report:
            headers = answer.headers
            counted = ("x-kvturn-reused-tokens", "x-kvturn-local-tokens")
            assert sum(int(headers[name]) for name in counted) == told


async def test_usage_is_shown_only_if_the_client_asked():
    """Without include_usage the stream has none, and decode is not asked for one."""
    async with router() as rig:
        answer = await rig.post(turn_body(stream=True))
        assert "usage" not in answer.body.decode()
        assert "stream_options" not in rig.decode.turns[0].json


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "members"),
    [
        (CHAT, {"n": 2}),
        (CHAT, {"prompt_logprobs": 1}),
        (COMPLETIONS, {"messages": ..., "prompt": "x", "echo": True, "logprobs": 1}),
        (COMPLETIONS, {"messages": ..., "prompt": ["x", "y"]}),
    ],
)
async def test_what_cannot_be_split_is_served_by_decode_alone(path, members, stream):
    """Prefill is not called, decode gets the request plain, and its usage stands."""
    async with router() as rig:
        body = turn_body(stream=stream, **members)
        answer = await rig.post(body, path)
        assert answer.status == 200
        assert answer.verdict == "not_offered"
        assert rig.prefill.turns == []
        assert rig.decode.turns[0].path == path
        assert rig.decode.turns[0].json == body


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_both_api_shapes_go_through_prefill_and_decode(path):
    """Each path keeps its own on both legs."""
    async with router() as rig:
        given = {} if path == CHAT else {"messages": ..., "prompt": "What"}
        answer = await rig.post(turn_body(**given), path)
        assert answer.status == 200
        assert rig.prefill.turns[0].path == rig.decode.turns[0].path == path


async def test_request_ids_are_the_routers_and_the_clients_is_echoed():
    """Fifty requests at once under one client id reach engines under a hundred, none of them its.

    Each gets the KV of its own prompt, and the answer to it.
    """

    def asked(seen: Seen) -> str:
        return str(seen.json["messages"][0]["content"])

    async def prefill(seen: Seen, reply: Reply) -> None:
        answer = rig.prefill.prefill_answer()
        answer["kv_transfer_params"]["remote_request_id"] = f"KV of {asked(seen)}"
        await reply.json(answer)

    async def decode(seen: Seen, reply: Reply) -> None:
        await reply.json({"choices": [], "text": f"Answer to {asked(seen)}"})

    prompts = [f"prompt {number}" for number in range(50)]
    async with router() as rig:
        rig.prefill.script(CHAT, prefill)
        rig.decode.script(CHAT, decode)
        bodies = [
            turn_body(request_id="mine", messages=[{"role": "user", "content": prompt}])
            for prompt in prompts
        ]
        headers = [("X-Request-Id", "mine")]
        answers = await asyncio.gather(*(rig.post(body, headers=headers) for body in bodies))
        assert {answer.headers["x-request-id"] for answer in answers} == {"mine"}
        assert [answer.json["text"] for answer in answers] == [f"Answer to {x}" for x in prompts]
        for seen in rig.decode.turns:
            transfer = seen.json["kv_transfer_params"]
            assert transfer["remote_request_id"] == f"KV of {asked(seen)}"
        seen_by_both = rig.prefill.turns + rig.decode.turns
        ids = {request.header("x-request-id") for request in seen_by_both}
        assert len(ids) == len(seen_by_both) == 100
        assert "mine" not in ids
        assert all("request_id" not in request.json for request in seen_by_both)


@pytest.mark.parametrize("stream", [False, True])
async def test_headers_about_the_engines_connection_stay_there(stream):
    """Hop-by-hop headers, those that Connection names, dates and lengths are the router's own."""
    odd = (
        ("Connection", "keep-alive, X-Foo"),
        ("X-Foo", "1"),
        ("Keep-Alive", "timeout=5"),
        ("X-Bar", "2"),
        ("Server", "uvicorn"),
    )

    async def play(seen: Seen, reply: Reply) -> None:
        if stream:
            await reply.begin_stream(*odd)
            await reply.end_stream()
        else:
            await reply.json({"ok": True}, 200, *odd)

    async with router() as rig:
        rig.decode.script(CHAT, play)
        headers = (await rig.post(turn_body(stream=stream))).headers
        assert headers["x-bar"] == "2"
        assert not {"x-foo", "keep-alive", "server", "connection"} & set(headers)


async def test_no_header_of_an_engine_says_what_a_later_byte_or_the_router_does():
    """Trailers are too late to be headers, and what the router tells of a turn it tells alone."""

    async def play(seen: Seen, reply: Reply) -> None:
        head = b"content-type: application/json\r\nx-kvturn-verdict: reused\r\nx-bar: 2\r\n"
        await reply.raw(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n" + head + b"\r\n")
        await reply.send(b"{}")
        await reply.raw(b"0\r\ncontent-type: text/html\r\nx-late: 1\r\n\r\n")

    async with router() as rig:
        rig.decode.script(CHAT, play)
        answer = await rig.post(turn_body())
        assert answer.json == {}
        assert answer.headers["content-type"] == "application/json"
        assert (answer.verdict, answer.headers["x-bar"]) == ("not_offered", "2")
        assert "x-late" not in answer.headers


async def test_a_compressed_answer_is_read_and_sent_plain():
    """The engine compressed without being asked: the body and its length are right again."""
    body = json.dumps({"usage": {"prompt_tokens_details": {"cached_tokens": 48}}}).encode()

    async def play(seen: Seen, reply: Reply) -> None:
        await reply.whole(gzip.compress(body), 200, ("Content-Encoding", "gzip"))

    async with router() as rig:
        rig.decode.script(CHAT, play)
        answer = await rig.post(turn_body(), headers=[("Accept-Encoding", "gzip, br")])
        assert answer.json == {"usage": {"prompt_tokens_details": {"cached_tokens": 0}}}
        assert "content-encoding" not in answer.headers
        assert rig.decode.turns[0].header("accept-encoding") is None


async def test_an_answer_compressed_in_pieces_is_read_whole():
    """As some proxies put it together: one gzip after the other."""
    body = json.dumps({"choices": [], "system_fingerprint": "f" * 500}).encode()

    async def play(seen: Seen, reply: Reply) -> None:
        packed = gzip.compress(body[:50]) + gzip.compress(body[50:])
        await reply.whole(packed, 200, ("Content-Encoding", "gzip"))

    async with router() as rig:
        rig.decode.script(CHAT, play)
        assert (await rig.post(turn_body())).body == body


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_of_another_type_passes_untouched(stream):
    """Decode answers with audio: type and bytes stay."""
    body = bytes(range(256)) * 40

    async def play(seen: Seen, reply: Reply) -> None:
        await reply.whole(body, 200, ("Content-Type", "audio/wav"))

    async with router() as rig:
        rig.decode.script(CHAT, play)
        answer = await rig.post(turn_body(stream=stream))
        assert answer.body == body
        assert answer.headers["content-type"] == "audio/wav"
        assert answer.headers["content-length"] == str(len(body))


@pytest.mark.parametrize("finish", ["error", "abort"])
async def test_a_failed_generation_is_passed_as_it_is(finish):
    """200 with finish_reason error and no content key: nothing is invented."""
    body = {"choices": [{"index": 0, "message": {"role": "assistant"}, "finish_reason": finish}]}

    async def play(seen: Seen, reply: Reply) -> None:
        await reply.json(body)

    async with router() as rig:
        rig.decode.script(CHAT, play)
        assert (await rig.post(turn_body())).json == body


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
async def test_max_tokens_one_is_one_token(name, stream):
    """Each leg is asked for one, and of an engine that has more to say the client gets one."""
    body = turn_body(max_tokens=..., stream=stream, stream_options={"include_usage": True})
    async with router() as rig:
        answer = await rig.post(body | {name: 1})
        legs = [seen.json for seen in rig.prefill.turns + rig.decode.turns]
        assert [leg[name] for leg in legs] == [1, 1]
        if stream:
            assert answer.events.pop() == "[DONE]"
            chunks = [json.loads(text) for text in answer.events[:-1]]
            choices = [one for part in chunks for one in part["choices"]]
            content = "".join(one["delta"]["content"] for one in choices)
            usage = chunks[-1]["usage"]
        else:
            choices = answer.json["choices"]
            content = choices[0]["message"]["content"]
            usage = answer.json["usage"]
        assert (content, choices[-1]["finish_reason"]) == ("The", "length")
        assert usage["completion_tokens"] == 1
        assert usage["total_tokens"] == usage["prompt_tokens"] + 1


async def test_engines_get_the_clients_key_or_the_configured_one(tmp_path):
    """Without a key file the client's Authorization goes on; with one, only that key does."""
    mine = [("Authorization", "Bearer u")]
    async with router() as rig:
        await rig.post(turn_body(), headers=mine)
        await rig.ask("GET", "/v1/models", headers=mine)
        asked = [*rig.prefill.turns, *rig.decode.turns, rig.decode.seen[-1]]
        assert {seen.header("authorization") for seen in asked} == {"Bearer u"}
    key = tmp_path / "key"
    key.write_text("k\n")
    async with router(f"--engine-api-key-file={key}") as rig:
        await rig.post(turn_body(), headers=mine)
        await rig.ask("GET", "/v1/models", headers=mine)
        asked = rig.prefill.seen + rig.decode.seen
        assert {"/health", "/v1/models", CHAT} == {seen.path for seen in asked}
        assert {seen.header("authorization") for seen in asked} == {"Bearer k"}


async def test_load_spreads_over_equal_engines():
    """Four turns in a row over two and two engines: each serves two."""
    async with router(prefills=2, decodes=2) as rig:
        for _ in range(4):
            await rig.post(turn_body())
        assert [len(engine.turns) for engine in rig.prefills + rig.decodes] == [2, 2, 2, 2]


@pytest.mark.parametrize("length", [5, 500])
async def test_what_an_engine_sends_beyond_an_answer_spoils_no_later_one(length):
    """The head of an answer to no request follows: its connection serves nobody any more."""
    async with router() as rig:

        async def play(seen: Seen, reply: Reply) -> None:
            body = json.dumps(rig.decode.whole_answer(seen)).encode()
            head = (
                b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
            )
            await reply.raw(head % len(body) + body + head % length)

        rig.decode.script(CHAT, play)
        for _ in range(4):
            answer = await rig.post(turn_body())
            assert (answer.status, answer.json["id"]) == (200, "chatcmpl-1")


async def test_the_time_of_a_turn_goes_on_to_its_last_byte():
    """First and last byte are told apart by as long as the engine held the rest back."""
    released = asyncio.Event()

    async def play(seen: Seen, reply: Reply) -> None:
        await reply.begin_stream()
        await reply.send(event(chunk({"content": "first"})))
        await released.wait()
        await reply.end_stream()

    async with router() as rig:
        rig.decode.script(CHAT, play)
        client = await rig.client()
        body = turn_body(stream=True, conversation_id="c1")
        await client.send("POST", CHAT, json.dumps(body).encode())
        await client.head()
        await client.piece()
        came_s = time.monotonic()
        await rig.until_ready()
        held_ms = (time.monotonic() - came_s) * 1000
        released.set()
        while await client.piece() is not None:
            pass
        (turn,) = (await rig.ask("GET", "/kvturn/v1/conversations/c1?model=m")).json["turns"]
        assert turn["total_ms"] >= turn["first_byte_ms"] + held_ms > held_ms > 0


async def test_the_first_byte_is_one_of_the_body():
    """An engine sends its head at once, and the first token when it has computed it."""
    begun, released = asyncio.Event(), asyncio.Event()

    async def play(seen: Seen, reply: Reply) -> None:
        await reply.begin_stream()
        begun.set()
        await released.wait()
        await reply.send(event(chunk({"content": "first"})))
        await reply.end_stream()

    async with router() as rig:
        rig.decode.script(CHAT, play)
        client = await rig.client()
        body = turn_body(stream=True, conversation_id="c1")
        sent_s = time.monotonic()
        await client.send("POST", CHAT, json.dumps(body).encode())
        await begun.wait()
        came_s = time.monotonic()
        while time.monotonic() - came_s < came_s - sent_s:
            await rig.until_ready()
        released.set()
        await client.head()
        while await client.piece() is not None:
            pass
        (turn,) = (await rig.ask("GET", "/kvturn/v1/conversations/c1?model=m")).json["turns"]
        assert turn["first_byte_ms"] > (came_s - sent_s) * 1000
