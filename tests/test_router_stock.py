"""Reuse with stock engines that stream their own handles (`--stock-reuse`)."""

import asyncio
import itertools
import json
from typing import Any

import pytest
from router_harness import Rig, router, turn_body
from stub_engine import CHAT, COMPLETIONS, Reply, Seen, StubEngine, chunk, event

from kvturn_router.request.conversation import ConversationKey
from kvturn_router.turn.sse import EVENT_BYTES_MAX, EventSplitter, event_ends
from kvturn_router.turn.stock import HANDLE_BYTES_MAX, Handle, HandleBook
from kvturn_router.verdict import Verdict

PROMPT_IDS = list(range(100, 140))
REPLY_IDS = [1, 2, 3, 4, 5]
# Decode holds the KV of all but the last token that it sampled.
HELD = len(PROMPT_IDS) + len(REPLY_IDS) - 1
NEXT_IDS = [*PROMPT_IDS, *REPLY_IDS, 7, 8, 9]

HANDLE = {
    "do_remote_prefill": False,
    "do_remote_decode": True,
    "remote_block_ids": [[10, 11, 12]],
    "remote_engine_id": "d-1",
    "remote_request_id": "chatcmpl-d-1",
    "remote_host": "127.0.0.1",
    "remote_port": 5601,
    "tp_size": 1,
    "dcp_size": 1,
    "pp_size": 1,
    "remote_num_tokens": HELD,
    "remote_blocks_expiry_time": 12345.678901234,
    "transfer_mode": "read",
}
READ_KEYS = {name: value for name, value in HANDLE.items() if not name.startswith("do_")}

FIRST = turn_body(conversation_id="c1", stream=True)
SECOND = turn_body(
    conversation_id="c1",
    stream=True,
    messages=[
        *turn_body()["messages"],
        {"role": "assistant", "content": "Paris."},
        {"role": "user", "content": "And of Italy?"},
    ],
)


class StockDecode:
    """Plays a stock decode engine that gives its handle in one of the places it may be."""

    def __init__(self, place: str = "finish", finish: str = "stop") -> None:
        self.place = place
        self.finish = finish
        self.handle: dict[str, Any] | None = HANDLE
        self.reply_ids = REPLY_IDS

    def events(self, ids: bool) -> list[bytes]:
        def with_ids(value: dict[str, Any], token: int | None) -> dict[str, Any]:
            value["choices"][0]["token_ids"] = [token] if ids and token is not None else None
            return value

        first = chunk({"role": "assistant", "content": ""})
        first["prompt_token_ids"] = PROMPT_IDS if ids else None
        chunks = [first]
        chunks += [
            with_ids(chunk({"content": f"t{token}"}), token) for token in self.reply_ids[:-1]
        ]
        if ids:
            # vLLM sends an empty delta for a token that shows nothing, but only
            # where token ids were asked for.
            empty = with_ids(chunk({}), None)
            empty["choices"][0]["token_ids"] = []
            chunks.append(empty)
        chunks.append(with_ids(chunk({"content": "."}, self.finish), self.reply_ids[-1]))
        chunks.append({"id": "chatcmpl-1", "choices": [], "usage": {"prompt_tokens": 40}})
        places = {"first": 0, "finish": -2, "usage": -1}
        for value in chunks:
            value["kv_transfer_params"] = None
        if self.place in places:
            chunks[places[self.place]]["kv_transfer_params"] = self.handle
        return [event(value) for value in chunks]

    def whole(self, ids: bool) -> dict[str, Any]:
        return {
            "choices": [
                {
                    "index": 0,
                    "message": {"content": "Paris."},
                    "finish_reason": self.finish,
                    "token_ids": self.reply_ids if ids else None,
                }
            ],
            "prompt_token_ids": PROMPT_IDS if ids else None,
            "kv_transfer_params": self.handle if self.place != "nowhere" else None,
        }

    async def play(self, seen: Seen, reply: Reply) -> None:
        ids = bool(seen.json.get("return_token_ids"))
        if not seen.json.get("stream"):
            await reply.json(self.whole(ids))
            return
        await reply.begin_stream()
        for data in self.events(ids):
            await reply.send(data)
        await reply.end_stream()


def tokenize(engine: StubEngine, ids: list[int] | None) -> None:
    """Has prefill render every prompt as these tokens; None: it has no /tokenize."""

    async def play(seen: Seen, reply: Reply) -> None:
        if ids is None:
            await reply.json({"detail": "Not Found"}, 404)
        else:
            await reply.json({"count": len(ids), "max_model_len": 8192, "tokens": ids})

    engine.script("/tokenize", play)


def stock(rig: Rig, decode: StockDecode | None = None) -> StockDecode:
    """Turns the rig's engines into stock ones."""
    played = decode or StockDecode()
    for engine in rig.decodes:
        engine.script(CHAT, played.play)
        engine.script(COMPLETIONS, played.play)
    tokenize(rig.prefill, NEXT_IDS)
    return played


def transfer(seen: Seen) -> dict[str, Any]:
    return dict(seen.json["kv_transfer_params"])


@pytest.mark.parametrize("place", ["first", "finish", "usage"])
async def test_a_handle_in_a_stream_is_used_by_the_next_turn(place):
    """Wherever it was, prefill gets its stock keys, and the turn goes to its engine."""
    async with router("--stock-reuse", decodes=2) as rig:
        stock(rig, StockDecode(place))
        first = await rig.post(FIRST)
        assert first.verdict == "first_turn"
        assert transfer(rig.prefill.turns[0]) == {
            "do_remote_decode": True,
            "do_remote_prefill": False,
        }
        second = await rig.post(SECOND)
        assert second.verdict == "reused"
        assert second.headers["x-kvturn-reused-tokens"] == str(HELD)
        assert transfer(rig.prefill.turns[1]) == READ_KEYS | {
            "do_remote_decode": True,
            "do_remote_prefill": False,
        }
        assert [len(engine.turns) for engine in rig.decodes] in ([2, 0], [0, 2])
        asked = next(seen for seen in rig.prefill.seen if seen.path == "/tokenize")
        assert asked.json == {"model": "m", "messages": SECOND["messages"]}


async def test_a_handle_in_a_whole_answer_is_used_too():
    """Not streamed on either turn."""
    async with router("--stock-reuse") as rig:
        stock(rig)
        await rig.post(FIRST | {"stream": False})
        assert (await rig.post(SECOND | {"stream": False})).verdict == "reused"


async def test_a_handle_is_used_once():
    """Two turns race for it: one reuses; and a third turn has the newer one."""
    async with router("--stock-reuse") as rig:
        stock(rig)
        await rig.post(FIRST)
        held = [rig.post(SECOND), rig.post(SECOND)]
        verdicts = sorted([answer.verdict for answer in await asyncio.gather(*held)])
        assert verdicts.count("reused") == 1
        used = [seen for seen in rig.prefill.turns if "remote_block_ids" in transfer(seen)]
        assert len(used) == 1


@pytest.mark.parametrize("client_asks", [False, True])
@pytest.mark.parametrize("stream", [False, True])
async def test_token_ids_are_seen_only_by_a_client_that_asked(client_asks, stream):
    """What the router asked for is taken out to the byte; what the client asked for stays."""
    async with router("--stock-reuse") as rig:
        decode = stock(rig)
        body = FIRST | {"stream": stream}
        if client_asks:
            body["return_token_ids"] = True
        answer = await rig.post(body)
        assert rig.decode.turns[0].json["return_token_ids"] is True
        assert "return_token_ids" not in rig.prefill.turns[0].json
        if stream:
            wanted = b"".join(decode.events(client_asks)) + b"data: [DONE]\n\n"
            assert answer.body == wanted
        else:
            assert answer.json == decode.whole(client_asks)


@pytest.mark.parametrize(
    ("ids", "verdict"),
    [
        ([*NEXT_IDS[:10], 0, *NEXT_IDS[11:]], "prefix_mismatch"),
        (NEXT_IDS[: HELD - 1], "prefix_mismatch"),
        (NEXT_IDS[:HELD], "prefix_mismatch"),
        ([], "prefix_mismatch"),
        (None, "not_offered"),
    ],
)
async def test_only_tokens_prove_the_prefix(ids, verdict):
    """Another token, a shorter prompt, or no way to tell: recomputed, without the handle."""
    async with router("--stock-reuse") as rig:
        stock(rig)
        await rig.post(FIRST)
        tokenize(rig.prefill, ids)
        assert (await rig.post(SECOND)).verdict == verdict
        assert "remote_block_ids" not in transfer(rig.prefill.turns[1])


@pytest.mark.parametrize(
    "members",
    [
        {"cache_salt": "other"},
        {"reasoning_effort": "high"},
        {"tool_choice": "none"},
        {"documents": [{"title": "t", "text": "x"}]},
        {"truncate_prompt_tokens": 40},
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}
                    ],
                }
            ]
        },
    ],
)
async def test_what_tokens_do_not_show_prevents_reuse(members):
    """Another salt, what shapes a prompt unseen, and images, whose tokens are all alike."""
    async with router("--stock-reuse") as rig:
        stock(rig)
        await rig.post(FIRST)
        assert (await rig.post(SECOND | members)).verdict == "prefix_mismatch"
        assert "remote_block_ids" not in transfer(rig.prefill.turns[1])


async def test_a_truncated_prompt_is_never_reused():
    """Both turns keep only the last tokens: /tokenize does not show what prefill will see."""
    async with router("--stock-reuse") as rig:
        stock(rig)
        await rig.post(FIRST | {"truncate_prompt_tokens": 40})
        answer = await rig.post(SECOND | {"truncate_prompt_tokens": 40})
        assert answer.verdict == "prefix_mismatch"


async def test_other_tenants_models_and_conversations_have_no_handle():
    """The same text elsewhere starts anew."""
    async with router("--stock-reuse") as rig:
        stock(rig)
        await rig.post(FIRST)
        for body, headers in (
            (SECOND | {"conversation_id": "c2"}, []),
            (SECOND | {"model": "other"}, []),
            (SECOND, [("Authorization", "Bearer k")]),
            ({name: value for name, value in SECOND.items() if name != "conversation_id"}, []),
        ):
            assert (await rig.post(body, headers=headers)).verdict == "first_turn"
        assert (await rig.post(SECOND)).verdict == "reused"


async def test_an_engine_that_gives_no_handle_is_said_to_and_chat_works(caplog):
    """Never a handle: one warning, not_offered, and every turn served."""
    async with router("--stock-reuse") as rig:
        stock(rig, StockDecode("nowhere"))
        verdicts = [(await rig.post(FIRST)).verdict for _ in range(3)]
        assert verdicts == ["first_turn", "not_offered", "not_offered"]
        assert sum("no handle from decode" in record.message for record in caplog.records) == 1


@pytest.mark.parametrize(
    ("finish", "tokens"), [("abort", HELD), ("error", HELD), ("stop", 0), ("stop", HELD + 2)]
)
async def test_a_turn_that_does_not_prove_what_is_held_leaves_no_handle(finish, tokens):
    """An aborted or failed answer, or a handle for more tokens than were seen."""
    async with router("--stock-reuse") as rig:
        decode = stock(rig, StockDecode(finish=finish))
        decode.handle = HANDLE | {"remote_num_tokens": tokens}
        await rig.post(FIRST)
        assert (await rig.post(SECOND)).verdict == "not_offered"


async def test_an_old_handle_is_not_used():
    """Its time is below the engine's; after it prefill recomputes."""
    async with router("--stock-reuse", "--stock-ttl-s=1") as rig:
        stock(rig)
        await rig.post(FIRST)
        reuse = rig.server._forwarder.stock
        assert reuse is not None
        clock = reuse._clock_ns
        reuse._clock_ns = lambda: clock() + 1_100_000_000
        assert (await rig.post(SECOND)).verdict == "expired"


async def test_a_prefill_that_fails_with_a_handle_is_asked_once_more_without():
    """A stock engine answers 500 to a handle that has expired on its side."""
    async with router("--stock-reuse") as rig:
        stock(rig)
        await rig.post(FIRST)

        async def play(seen: Seen, reply: Reply) -> None:
            if "remote_block_ids" in transfer(seen):
                await reply.json({"error": "expired"}, 500)
            else:
                await reply.json(rig.prefill.prefill_answer())

        rig.prefill.script(CHAT, play)
        answer = await rig.post(SECOND)
        assert (answer.status, answer.verdict) == (200, "read_failed")
        assert "remote_block_ids" not in transfer(rig.prefill.turns[2])


async def test_prefills_own_count_tells_what_it_had():
    """Prefill counts 50 cached tokens: the handle's and six of its own; 10: it read nothing."""
    async with router("--stock-reuse") as rig:
        stock(rig)
        await rig.post(FIRST)
        rig.prefill.cached_tokens = HELD + 3
        answer = await rig.post(SECOND)
        assert answer.headers["x-kvturn-reused-tokens"] == str(HELD)
        assert answer.headers["x-kvturn-local-tokens"] == "3"
        rig.prefill.cached_tokens = 10
        answer = await rig.post(SECOND)
        assert answer.verdict == "below_threshold"
        assert answer.headers["x-kvturn-reused-tokens"] == "0"
        assert answer.headers["x-kvturn-local-tokens"] == "10"


async def test_a_turn_with_reuse_off_neither_uses_nor_leaves_a_handle():
    """And decode is not asked for token ids."""
    async with router("--stock-reuse") as rig:
        stock(rig)
        off = [("X-Kvturn-Reuse", "off")]
        assert (await rig.post(FIRST, headers=off)).verdict == "turned_off"
        assert "return_token_ids" not in rig.decode.turns[0].json
        assert (await rig.post(SECOND)).verdict == "no_lease"


async def test_an_ended_conversation_has_no_handle():
    """DELETE drops it."""
    async with router("--stock-reuse") as rig:
        stock(rig)
        await rig.post(FIRST)
        await rig.ask("DELETE", "/kvturn/v1/conversations/c1?model=m")
        assert (await rig.post(SECOND)).verdict == "no_lease"


async def test_completions_with_text_and_with_token_ids_reuse():
    """Text is tokenised by prefill; token ids are the tokens."""
    text = {"model": "m", "max_tokens": 5, "conversation_id": "c1"}
    async with router("--stock-reuse") as rig:
        stock(rig)
        await rig.post(text | {"prompt": "first"}, COMPLETIONS)
        assert (await rig.post(text | {"prompt": "next"}, COMPLETIONS)).verdict == "reused"
        asked = [seen for seen in rig.prefill.seen if seen.path == "/tokenize"]
        assert [seen.json for seen in asked] == [{"model": "m", "prompt": "next"}]
        assert (await rig.post(text | {"prompt": NEXT_IDS}, COMPLETIONS)).verdict == "reused"
        assert (await rig.post(text | {"prompt": [1, 2]}, COMPLETIONS)).verdict == "prefix_mismatch"
        assert len([seen for seen in rig.prefill.seen if seen.path == "/tokenize"]) == 1


async def test_without_the_flag_handles_are_left_alone():
    """No token ids are asked for, no handle is used."""
    async with router() as rig:
        stock(rig)
        for body in (FIRST, SECOND):
            assert (await rig.post(body)).verdict == "not_offered"
        assert all("return_token_ids" not in seen.json for seen in rig.decode.turns)
        assert json.dumps(HANDLE) not in json.dumps([transfer(s) for s in rig.prefill.turns])


_LONG = event({"choices": [], "x": "x" * (EVENT_BYTES_MAX + 1)})
_DEEP = b'data: {"choices":[],"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}\n\n"


@pytest.mark.parametrize(
    "answered",
    [
        _LONG,
        _DEEP,
        b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"st\xff"}]}\n\n',
        b'data: {"choices":[],"kv_transfer_params":{"\xff":1}}\n\n',
        event({"choices": [], "kv_transfer_params": {**HANDLE, "remote_num_tokens": 10**40}}),
        event({"choices": [], "kv_transfer_params": {**HANDLE, "x": "x" * HANDLE_BYTES_MAX}}),
    ],
    ids=["long", "deep", "finish", "name", "count", "handle"],
)
async def test_what_cannot_be_read_is_passed_on_and_leaves_no_handle(answered):
    """The turn is served, and the next one recomputes."""

    async def play(seen: Seen, reply: Reply) -> None:
        await reply.begin_stream()
        await reply.send(answered)
        await reply.end_stream()

    async with router("--stock-reuse") as rig:
        stock(rig)
        rig.decode.script(CHAT, play)
        answer = await rig.post(FIRST)
        assert answer.whole
        assert answer.body == answered + b"data: [DONE]\n\n"
        assert (await rig.post(SECOND)).verdict == "not_offered"


@pytest.mark.parametrize("ids", [[1, 2, 1 << 70, 4, 5], [1, 2, -3, 4, 5]])
async def test_ids_that_no_token_has_leave_no_handle(ids):
    """An engine's, and then a client's: each turn is served."""
    async with router("--stock-reuse") as rig:
        played = stock(rig)
        played.reply_ids = ids
        assert (await rig.post(FIRST)).whole
        assert (await rig.post(SECOND)).verdict == "not_offered"
        played.reply_ids = REPLY_IDS
        prompt = {"model": "m", "max_tokens": 16, "stream": True, "conversation_id": "p"}
        first = await rig.post({**prompt, "prompt": PROMPT_IDS}, COMPLETIONS)
        tokenize(rig.prefill, None)
        second = await rig.post({**prompt, "prompt": ids * 20}, COMPLETIONS)
        assert (first.status, second.status, second.verdict) == (200, 200, "not_offered")


async def test_a_handle_that_grows_old_before_prefill_is_asked_is_not_used():
    """The turn took it in time, and then the question after its tokens took too long."""
    async with router("--stock-reuse", "--stock-ttl-s=400") as rig:
        stock(rig)
        await rig.post(FIRST)
        reuse = rig.server._forwarder.stock
        now_ns = reuse._clock_ns

        async def late(seen: Seen, reply: Reply) -> None:
            reuse._clock_ns = lambda: now_ns() + 401 * 10**9
            await reply.json({"tokens": NEXT_IDS})

        rig.prefill.script("/tokenize", late)
        assert (await rig.post(SECOND)).verdict == "expired"
        assert "remote_block_ids" not in transfer(rig.prefill.turns[-1])


def test_handles_have_a_limit_in_bytes_and_in_number():
    """The least recent go first; one that replaces another, and one that is used, make room."""
    book = HandleBook(handles_max=3, ttl_ns=10, bytes_max=250)

    def keep(name: str, size: int) -> None:
        transfer = {"x": b"1" * (size - 1)}
        book.keep(key(name), Handle(transfer, 1, b"", b"", "http://d", 0))

    def key(name: str) -> ConversationKey:
        return ConversationKey("", "m", name)

    keep("a", 100)
    keep("b", 100)
    keep("b", 150)
    assert len(book) == 2
    keep("c", 100)
    assert book.take(key("a"), 0) is Verdict.NO_LEASE
    assert isinstance(book.take(key("b"), 0), Handle)
    keep("d", 150)
    assert len(book) == 2
    for name in "efg":
        book.keep(key(name), None)
    assert len(book) == 3
    assert book.take(key("g"), 0) is Verdict.NOT_OFFERED
    keep("h", 251)
    assert len(book) == 0
    keep("i", 250)
    assert isinstance(book.take(key("i"), 0), Handle)


def test_events_are_cut_where_they_end_however_they_are_read():
    """Whole, in any two pieces, or byte by byte: the same events, and the same rest."""
    for parts in itertools.product((b"data: x", b"\r", b"\n", b"\r\n\r\n"), repeat=4):
        text = b"".join(parts)
        ends = [0, *event_ends(text)]
        whole = [text[start:end] for start, end in itertools.pairwise(ends)]
        every = range(len(text) + 1)
        for places in (*([0, place, len(text)] for place in every), every):
            cut = EventSplitter()
            events = [
                event
                for start, end in itertools.pairwise(places)
                for event in cut.feed(text[start:end])
            ]
            assert (events, cut.rest) == (whole, text[ends[-1] :])
