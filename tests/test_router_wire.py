"""HTTP between clients and the router: framing, limits, bad input, many clients."""

import asyncio
import gzip
import json

import pytest
from awake import within
from router_harness import Client, router, turn_body
from stub_engine import CHAT, COMPLETIONS, GUARD_S, Reply, Seen, chunk

BODY = json.dumps(turn_body()).encode()


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"{", None),
        (b"[]", None),
        (b'""', None),
        (b"", None),
        (b'{"messages":[]}', "model"),
        (b'{"model":null,"messages":[]}', "model"),
        (b'{"model":7,"messages":[]}', "model"),
        (b'{"model":"","messages":[]}', "model"),
        (b'{"model":"m"}', "messages"),
        (b'{"model":"m","messages":null}', "messages"),
        (b'{"model":"m","messages":"hi"}', "messages"),
        (b'{"model":"m","messages":[],"stream":"yes"}', "stream"),
        (b'{"model":"m","messages":[],"stream_options":[]}', "stream_options"),
        (b'{"model":"m","messages":[],"n":"2"}', "n"),
        (b'{"model":"m","messages":[],"max_tokens":"16"}', "max_tokens"),
        (b'{"model":"m","messages":[],"max_tokens":1e999}', "max_tokens"),
        (b'{"model":"m","messages":[],"n":-1e400}', "n"),
        (b'{"model":"m","messages":[],"n":1' + b"0" * 400 + b"}", "n"),
        (b'{"model":"m","messages":[],"temperature":NaN}', None),
        (b'{"model":"m","messages":[],"model":"x"}', "model"),
        (b'{"model":"m","messages":[],"conversation_id":5}', "conversation_id"),
        (b'{"model":"m","messages":[],"vllm_xargs":5}', "vllm_xargs"),
        (b'{"model":"m","messages":' + b"[" * 200 + b"]" * 200 + b"}", None),
        (b'{"model":"m","messages":["\\ud800"]}', None),
        (b'{"model":"m","messages":["\xff"]}', None),
    ],
)
async def test_a_bad_body_is_a_400_that_names_the_field_and_no_engine_sees_it(body, param):
    """OpenAI's error shape; neither leg is called."""
    async with router() as rig:
        answer = await rig.post(body)
        assert answer.status == 400
        error = answer.json["error"]
        assert error["param"] == param
        assert error["type"] == "invalid_request_error"
        assert not rig.prefill.turns
        assert not rig.decode.turns


@pytest.mark.parametrize(
    "members",
    [
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        {"unknown": {"a": [1]}},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "é"}]}]},
        {"messages": [{"role": "user", "content": "x", "extra": 1}], "temperature": None},
    ],
)
async def test_what_engines_may_accept_is_theirs_to_judge(members):
    """Tools without parameters, unknown fields, content in parts: forwarded as they are."""
    async with router() as rig:
        body = turn_body(**members)
        assert (await rig.post(body)).status == 200
        sent = rig.decode.turns[0].json
        assert {name: sent[name] for name in body} == body


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/health", 200),
        ("HEAD", "/health", 200),
        ("GET", "/ready", 200),
        ("GET", "/v1/models", 200),
        ("POST", "/health", 405),
        ("GET", CHAT, 405),
        ("GET", "/", 404),
        ("GET", "/v1/chat", 404),
        ("POST", "/v1/embeddings", 404),
        ("GET", "/%ff", 404),
        ("OPTIONS", "*", 404),
    ],
)
async def test_routes_and_methods(method, path, status):
    """Known paths answer, others are a 404 or 405 in OpenAI's shape."""
    async with router() as rig:
        answer = await rig.ask(method, path)
        assert answer.status == status
        if status >= 400:
            assert answer.json["error"]["code"] == status


async def test_models_are_an_engines_own_answer():
    """The list comes from an engine, whole."""
    async with router() as rig:
        assert (await rig.ask("GET", "/v1/models")).json["data"] == [{"id": "m", "object": "model"}]


async def test_a_form_is_not_a_turn():
    """Another content type is a 415, for no web page elsewhere is to post turns; so is a coding."""
    async with router() as rig:
        kind = [("Content-Type", "text/plain")]
        assert (await rig.post(turn_body(), headers=kind)).status == 415
        kind = [("Content-Type", "application/json; charset=utf-8")]
        assert (await rig.post(turn_body(), headers=kind)).status == 200
        coded = await rig.post(gzip.compress(BODY), headers=[("Content-Encoding", "gzip")])
        assert (coded.status, "compressed" in coded.json["error"]["message"]) == (415, True)


async def test_a_connection_serves_request_after_request_and_those_sent_ahead():
    """Three turns at once on one connection: three answers, in order."""
    async with router() as rig:
        client = await rig.client()
        for number in range(3):
            body = json.dumps(turn_body(conversation_id=f"c{number}")).encode()
            await client.send("POST", CHAT, body)
        answers = [await client.answer() for _ in range(3)]
        assert [answer.headers["x-kvturn-conversation"] for answer in answers] == ["c0", "c1", "c2"]
        await client.send("GET", "/health")
        assert (await client.answer()).json == {"status": "ok"}


async def test_requests_with_the_head_of_the_one_before_are_read_as_that_was():
    """Longer, in two pieces, three at once, too long, in another name: each is what it says."""
    bodies = [json.dumps(turn_body(user="x" * size)).encode() for size in (1, 7, 300, 2, 40, 1)]
    async with router("--max-body-mb=1") as rig:
        client = await rig.client()
        for body in bodies[:2]:
            await client.send("POST", CHAT, body)
            assert (await client.answer()).status == 200
        first, second = bodies[2][:250], bodies[2][250:]
        client.writer.write(_plain_head(len(bodies[2])) + first)
        await rig.until(lambda: any(one._reading for one in rig.server._listener.connections))
        client.writer.write(second)
        assert (await client.answer()).status == 200
        client.writer.write(b"".join(_plain_head(len(body)) + body for body in bodies[3:]))
        for _ in bodies[3:]:
            assert (await client.answer()).status == 200
        await client.send("POST", CHAT, bodies[0], [("X-Conversation-Id", "other")])
        assert (await client.answer()).headers["x-kvturn-conversation"] == "other"
        await client.send("POST", CHAT, bodies[1])
        assert (await client.answer()).headers["x-kvturn-conversation"] != "other"
        sent = [turn.json["user"] for turn in rig.decode.turns]
        assert [len(user) for user in sent] == [1, 7, 300, 2, 40, 1, 1, 7]
        await client.send("POST", CHAT, json.dumps(turn_body(user="x" * (1 << 20))).encode())
        assert (await client.answer()).status == 413


async def test_a_head_that_was_right_is_no_claim_to_room_for_a_body():
    """Nothing is left for bodies when the second request comes: it is refused as any other."""
    async with router() as rig:
        client = await rig.client()
        for _ in range(2):
            await client.send("POST", CHAT, BODY)
            assert (await client.answer()).status == 200
        bodies = rig.server._listener.bodies
        left, bodies.left = bodies.left, len(BODY) - 1
        await client.send("POST", CHAT, BODY)
        assert (await client.answer()).status == 503
        assert bodies.left == len(BODY) - 1
        bodies.left = left
        assert (await rig.post(BODY)).status == 200
        assert bodies.left == left
        assert len(rig.decode.turns) == 3


@pytest.mark.parametrize("length", [b"+2", b"2, 2", b"", b"2\r\ncontent-length: 3", b"0x2"])
async def test_a_length_that_is_none_is_refused_after_a_head_that_was_right(length):
    """The head is that of the request before, but for the digits of its length."""
    async with router() as rig:
        client = await rig.client()
        await client.send("POST", CHAT, BODY)
        assert (await client.answer()).status == 200
        client.writer.write(_plain_head(0).replace(b": 0", b": " + length) + b"{}")
        assert (await client.answer()).status == 400
        assert len(rig.decode.turns) == 1


def _plain_head(length: int) -> bytes:
    """Returns the head that the harness sends."""
    return (
        b"POST %b HTTP/1.1\r\nhost: router\r\ncontent-length: %d\r\n"
        b"content-type: application/json\r\n\r\n"
    ) % (CHAT.encode(), length)


async def test_a_client_that_asks_to_close_is_closed():
    """Connection: close, and HTTP/1.0, end the connection after the answer."""
    async with router() as rig:
        client = await rig.client()
        await client.send("GET", "/health", headers=[("Connection", "close")])
        assert (await client.answer()).headers["connection"] == "close"
        assert await client.reader.read() == b""
        client = await rig.client()
        body = json.dumps(turn_body(stream=True)).encode()
        client.writer.write(
            b"POST %b HTTP/1.0\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
            % (CHAT.encode(), len(body), body)
        )
        answer = await client.answer()
        assert "transfer-encoding" not in answer.headers
        assert answer.events[-1] == "[DONE]"


async def test_a_client_of_http_1_0_waits_for_nothing_that_does_not_come():
    """It asks to be kept, and expects a 100: it is answered once, and closed after that."""
    async with router() as rig:
        client = await rig.client()
        client.writer.write(
            b"POST %b HTTP/1.0\r\nconnection: keep-alive\r\nexpect: 100-continue\r\n"
            b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
            % (CHAT.encode(), len(BODY), BODY)
        )
        answer = await client.answer()
        assert (answer.status, answer.headers["connection"]) == (200, "close")
        async with asyncio.timeout(GUARD_S):
            assert await client.reader.read() == b""


async def test_a_body_in_chunks_and_an_expectation_are_understood():
    """Transfer-Encoding: chunked, then Expect: 100-continue with three megabytes."""
    async with router() as rig:
        client = await rig.client()
        client.writer.write(
            b"POST %b HTTP/1.1\r\ncontent-type: application/json\r\n"
            b"transfer-encoding: chunked\r\n\r\n" % CHAT.encode()
        )
        for at in range(0, len(BODY), 7):
            piece = BODY[at : at + 7]
            client.writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
        client.writer.write(b"0\r\nx-trailer: 1\r\n\r\n")
        assert (await client.answer()).status == 200
        long = json.dumps(turn_body(user="x" * (3 << 20))).encode()
        headers = [("Expect", "100-continue"), ("Content-Length", str(len(long)))]
        await client.send("POST", CHAT, None, [*headers, ("Content-Type", "application/json")])
        assert (await client.head()).status == 100
        client.writer.write(long)
        assert (await client.answer()).status == 200
        assert len(rig.decode.turns[1].body) > 3 << 20


async def test_an_offer_of_http_2_is_passed_over():
    """Some clients send Upgrade: h2c with every request; the body is not lost over it."""
    async with router() as rig:
        client = await rig.client()
        offer = [
            ("Connection", "Upgrade, HTTP2-Settings"),
            ("Upgrade", "h2c"),
            ("HTTP2-Settings", "AAMAAABkAARAAAAAAAIAAAAA"),
        ]
        for _ in range(2):
            await client.send("POST", CHAT, BODY, offer)
            assert (await client.answer()).status == 200
        assert rig.decode.turns[1].json["max_tokens"] == 16


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_above_the_limit_is_a_413_that_names_it(chunked):
    """The client that is still writing sees the answer, and no engine is called."""
    async with router("--max-body-mb=1") as rig:
        client = await rig.client()
        framing = "transfer-encoding: chunked" if chunked else f"content-length: {2 << 20}"
        client.writer.write(
            f"POST {CHAT} HTTP/1.1\r\ncontent-type: application/json\r\n{framing}\r\n\r\n".encode()
        )
        piece = b"x" * 65536
        for _ in range(32):
            client.writer.write(b"10000\r\n" + piece + b"\r\n" if chunked else piece)
        answer = await client.answer()
        assert answer.status == 413
        assert str(1 << 20) in answer.json["error"]["message"]
        assert not rig.prefill.turns


@pytest.mark.parametrize("before", [b"2\r\n{}\r\n0\r\nx: ", b"2;"], ids=["trailer", "chunk"])
async def test_what_is_around_a_body_has_the_limit_of_a_head(before):
    """A trailer, or what follows a chunk's size, never ends: a 431, and none of it is kept."""
    head = (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: router\r\ntransfer-encoding: chunked\r\n\r\n"
    )
    async with router("--max-header-kb=8") as rig:
        client = await rig.client()
        client.writer.write(head + before + b"a" * 4096)
        await rig.ask("GET", "/health")
        client.writer.write(b"a" * 10_000)
        answer = await client.answer()
        assert (answer.status, answer.headers["connection"]) == (431, "close")


async def test_a_body_in_tiny_chunks_takes_no_more_memory_than_its_bytes():
    """Three bytes a chunk: it arrives as it was sent, and is not kept piece by piece."""
    body = json.dumps(turn_body(messages=[{"role": "user", "content": "x" * 9000}])).encode()
    chunks = [b"%x\r\n%b\r\n" % (len(x), x) for x in (body[i : i + 3] for i in range(0, 9000, 3))]
    rest = body[9000:]
    async with router() as rig:
        client = await rig.client()
        client.writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: router\r\n"
            b"content-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        client.writer.write(b"".join(chunks))
        connections = rig.server._listener.connections
        await rig.until(lambda: any(each._body_bytes == 9000 for each in connections))
        (connection,) = (each for each in connections if each._body_bytes == 9000)
        assert len(connection._body) == 2
        client.writer.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(rest), rest))
        assert (await client.answer()).status == 200
        assert rig.decode.turns[0].json["messages"] == json.loads(body)["messages"]


async def test_a_head_above_the_limit_is_a_431():
    """One endless header, or very many."""
    async with router("--max-header-kb=4") as rig:
        client = await rig.client()
        await client.send("GET", "/health", headers=[("X-Long", "x" * 5000)])
        assert (await client.answer()).status == 431
        client = await rig.client()
        client.writer.write(b"GET /health HTTP/1.1\r\nX-Long: " + b"x" * 300_000)
        assert (await client.answer()).status == 431
        client = await rig.client()
        await client.send("GET", "/health", headers=[(f"a{n}", "1") for n in range(300)])
        assert (await client.answer()).status == 431


async def test_long_bodies_are_no_heads_however_often_they_come():
    """Requests far longer than a head may be, in many pieces, on one kept-alive connection."""
    body = json.dumps(turn_body(messages=[{"role": "user", "content": "x" * 300_000}])).encode()
    async with router() as rig:
        client = await rig.client()
        head = b"POST %b HTTP/1.1\r\nhost: r\r\ncontent-type: application/json\r\n" % CHAT.encode()
        for _ in range(3):
            client.writer.write(head + b"content-length: %d\r\n\r\n" % len(body))
            for start in range(0, len(body), 50_000):
                client.writer.write(body[start : start + 50_000])
                await client.writer.drain()
            assert (await client.answer()).status == 200
        assert [len(seen.json["messages"][0]["content"]) for seen in rig.decode.turns] == [
            300_000
        ] * 3


@pytest.mark.parametrize(
    "data",
    [
        b"GARBAGE\r\n\r\n",
        b"GET /health HTTP/9.9\r\n\r\n",
        b"POST / HTTP/1.1\r\ncontent-length: 3\r\ntransfer-encoding: chunked\r\n\r\n",
        b"POST / HTTP/1.1\r\ncontent-length: 3\r\ncontent-length: 4\r\n\r\n",
        b"POST / HTTP/1.1\r\ncontent-length: -1\r\n\r\n",
        b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ],
)
async def test_what_is_not_http_is_refused_and_the_connection_closed(data):
    """Ambiguous framing above all: it is how requests are smuggled."""
    async with router() as rig:
        client = await rig.client()
        client.writer.write(data)
        answer = await client.answer()
        assert answer.status in (400, 505)
        assert answer.headers["connection"] == "close"
        assert await client.reader.read() == b""
        assert (await rig.ask("GET", "/health")).status == 200


async def test_more_turns_than_the_limit_are_told_to_come_back():
    """Two at once are served, the third is a 429 with Retry-After; later there is room again."""
    async with router("--max-inflight=2") as rig:
        release = asyncio.Event()

        async def held(seen: Seen, reply: Reply) -> None:
            await release.wait()
            await reply.json(rig.prefill.prefill_answer())

        rig.prefill.script(CHAT, held)
        turns = [asyncio.create_task(rig.post(turn_body())) for _ in range(2)]
        await rig.prefill.turn(2)
        refused = await rig.post(turn_body())
        assert refused.status == 429
        assert refused.headers["retry-after"] == "1"
        assert refused.json["error"]["type"] == "rate_limit_error"
        release.set()
        assert [(await turn).status for turn in turns] == [200, 200]
        assert (await rig.post(turn_body())).status == 200


async def test_a_client_that_does_not_read_slows_the_engine():
    """Sixty-four megabytes for a client that reads nothing: the router does not hoard them."""
    total = 64 << 20
    sent = 0

    async def play(seen: Seen, reply: Reply) -> None:
        nonlocal sent
        await reply.begin_stream()
        piece = b"data: " + b"x" * 65530 + b"\n\n"
        while sent < total:
            await reply.send(piece)
            sent += len(piece)
        await reply.end_stream()

    async with router() as rig:
        rig.decode.script(CHAT, play)
        client = await rig.client()
        await client.send("POST", CHAT, json.dumps(turn_body(stream=True)).encode())
        await client.head()
        client.writer.transport.pause_reading()
        before = -1
        while before != sent:
            before = sent
            for _ in range(50):
                await asyncio.sleep(0)
            await rig.ask("GET", "/health")
        assert sent < total
        client.writer.transport.resume_reading()
        size = 0
        while (piece := await client.piece()) is not None:
            size += len(piece)
        assert size >= total


async def test_hundreds_of_streams_at_once_and_nothing_left_after():
    """Three hundred open streams; all begin before any ends, and every connection closes."""
    count = 300
    release = asyncio.Event()

    async def play(seen: Seen, reply: Reply) -> None:
        await reply.begin_stream()
        await reply.event(chunk({"content": "The"}))
        await release.wait()
        await reply.end_stream()

    async def follow(client: Client) -> int:
        await client.send("POST", CHAT, json.dumps(turn_body(stream=True)).encode())
        head = await client.head()
        assert await client.piece() is not None
        started.release()
        pieces = 0
        while await client.piece() is not None:
            pieces += 1
        client.close()
        return head.status

    async with router() as rig:
        rig.decode.script(CHAT, play)
        started = asyncio.Semaphore(0)
        streams = [asyncio.create_task(follow(await rig.client())) for _ in range(count)]
        for _ in range(count):
            await started.acquire()
        release.set()
        assert set(await asyncio.gather(*streams)) == {200}
        await rig.until(lambda: not rig.server._listener.connections)
        assert rig.server._forwarder.in_flight == 0


async def test_completions_stream_too():
    """The other path, streamed, ends with [DONE]."""
    async with router() as rig:
        body = turn_body(messages=..., prompt="x", stream=True)
        assert (await rig.post(body, COMPLETIONS)).events[-1] == "[DONE]"


async def test_requests_sent_ahead_have_limits():
    """Twenty requests while the first is served: those beyond sixteen are refused."""
    release = asyncio.Event()

    async def held(seen: Seen, reply: Reply) -> None:
        await release.wait()
        await reply.json(rig.prefill.prefill_answer())

    async with router() as rig:
        rig.prefill.script(CHAT, held)
        client = await rig.client()
        for _ in range(20):
            await client.send("POST", CHAT, BODY)
        await rig.prefill.turn(1)
        release.set()
        answers = [await client.answer() for _ in range(18)]
        assert [one.status for one in answers] == [200] * 17 + [429]
        assert answers[-1].headers["retry-after"] == "1"
        assert await client.reader.read() == b""


@pytest.mark.parametrize("whole", [False, True])
async def test_a_client_that_never_reads_is_given_up(whole):
    """It has taken nothing for the stall limit: its connection ends, and both legs if they last.

    A whole answer has ended by then for all but its client, and must not stay in memory.
    """

    async def play(seen: Seen, reply: Reply) -> None:
        if whole:
            await reply.json({"choices": [], "text": "x" * (32 << 20)})
            return
        await reply.begin_stream()
        while not seen.gone.is_set():
            await reply.send(b"data: " + b"x" * 65530 + b"\n\n")

    async with router() as rig:
        rig.decode.script(CHAT, play)
        client = await rig.client()
        await client.send("POST", CHAT, json.dumps(turn_body(stream=not whole)).encode())
        await client.head()
        client.writer.transport.pause_reading()
        listener = rig.server._listener
        (connection,) = listener.connections
        await rig.until(lambda: connection._blocked)
        transport = connection._transport
        assert transport is not None
        before = -1
        while before != (before := transport.get_write_buffer_size()):
            for _ in range(10):
                await rig.ask("GET", "/health")
        now = asyncio.get_running_loop().time()
        stall_s = listener.limits.stall_s
        for after_s in (0, stall_s - 10):
            listener.sweep(now + after_s)
        assert connection in listener.connections
        assert rig.server._forwarder.in_flight == (0 if whole else 1)
        listener.sweep(now + stall_s + 10)
        await rig.until(lambda: connection not in listener.connections)
        await rig.until(lambda: rig.server._forwarder.in_flight == 0)
        if not whole:
            async with within(10):
                await rig.decode.turns[0].gone.wait()


async def test_a_request_that_does_not_come_whole_is_a_408():
    """Half a head, half a body, or nothing at all for too long."""
    async with router() as rig:
        loop = asyncio.get_running_loop()
        listener = rig.server._listener
        half_head, half_body, idle = [await rig.client() for _ in range(3)]
        half_head.writer.write(b"POST / HTTP/1.1\r\nhost:")
        half_body.writer.write(b"POST / HTTP/1.1\r\ncontent-length: 9\r\n\r\nabc")
        await rig.until(
            lambda: sum(connection._reading for connection in listener.connections) == 2
        )
        listener.sweep(loop.time() + listener.limits.request_s + 10)
        assert (await half_head.answer()).status == 408
        assert (await half_body.answer()).status == 408
        listener.sweep(loop.time() + listener.limits.idle_s + 10)
        assert await idle.reader.read() == b""


@pytest.mark.parametrize("in_body", [False, True])
async def test_a_request_that_comes_byte_by_byte_is_a_408_in_the_end(in_body):
    """Its bytes never stop, but its head may take 30 s, and all of it 300 s."""
    async with router() as rig:
        listener = rig.server._listener
        client = await rig.client()
        client.writer.write(b"POST / HTTP/1.1\r\nx: a")
        if in_body:
            client.writer.write(b"\r\ncontent-length: 9\r\n\r\na")
        await rig.until(lambda: any(connection._reading for connection in listener.connections))
        (connection,) = (each for each in listener.connections if each._reading)
        began = connection._began
        most = listener.limits.whole_s if in_body else listener.limits.request_s
        connection._last_read = began + most - 1
        listener.sweep(began + most - 1)
        assert connection._refused is None
        connection._last_read = began + most + 1
        listener.sweep(began + most + 1)
        assert (await client.answer()).status == 408


async def test_a_refused_client_that_never_stops_sending_is_given_up():
    """What follows a refused request is dropped for a while, not for ever."""
    async with router() as rig:
        listener = rig.server._listener
        client = await rig.client()
        client.writer.write(b"no request at all\r\n\r\n")
        assert (await client.answer()).status == 400
        (connection,) = (each for each in listener.connections if each._closing)
        connection._last_read = connection._began + listener.limits.request_s + 1
        listener.sweep(connection._last_read)
        await rig.until(lambda: connection not in listener.connections)


async def test_an_expectation_sent_ahead_is_not_answered_within_another_answer():
    """While a stream is under way, the next request's Expect gets no interim answer into it."""
    async with router() as rig:
        go_on = asyncio.Event()

        async def play(seen: Seen, reply: Reply) -> None:
            await reply.begin_stream()
            await reply.event(chunk({"content": "a"}))
            await go_on.wait()
            await reply.end_stream()

        rig.decode.script(CHAT, play)
        client = await rig.client()
        await client.send("POST", CHAT, json.dumps(turn_body(stream=True)).encode())
        assert (await client.head()).status == 200
        assert await client.piece()
        await client.send("POST", CHAT, BODY, [("expect", "100-continue")])
        await client.send("GET", "/health")
        await rig.until(lambda: len(rig.decode.turns) == 1)
        go_on.set()
        assert await client.piece() == b"data: [DONE]\n\n"
        assert await client.piece() is None
        assert [(await client.answer()).status for _ in range(2)] == [200, 200]


@pytest.mark.parametrize("coding", ["gzip, chunked", "chunked, chunked", "identity"])
async def test_a_body_in_an_unknown_coding_is_refused(coding):
    """It would be read as if it were not coded."""
    async with router() as rig:
        client = await rig.client()
        head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ntransfer-encoding: {coding}\r\n\r\n"
        client.writer.write(head.encode() + b"0\r\n\r\n")
        assert (await client.answer()).status in (400, 501)


async def test_connect_is_refused():
    """The parser takes it for an upgrade that nothing can decline."""
    async with router() as rig:
        answer = await rig.ask("CONNECT", "other:443", b"{}")
        assert (answer.status, answer.json["error"]["code"]) == (405, 405)
        assert (await rig.ask("GET", "/health")).status == 200
