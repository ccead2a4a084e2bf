"""The typed client against a real router: turns, errors, heartbeats, ends."""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from awake import within
from certificates import Authority
from router_harness import FakeLease, Rig, router
from stub_engine import CHAT, COMPLETIONS, Reply, Seen, chunk, event

from kvturn import client
from kvturn.client import RouterClient, RouterError, connect, verdict_name
from kvturn.v1 import common_pb2, lease_pb2

QUESTION = {"role": "user", "content": "What is the capital of France?"}
BIG = 123456789012345678901234567890


@contextlib.asynccontextmanager
async def talking(*flags: str, lease: FakeLease | None = None, **how: Any) -> AsyncIterator[Any]:
    """Yields a router and a client of it."""
    async with router(*flags, lease=lease) as rig, dial(rig, **how) as own:
        yield rig, own


def dial(rig: Rig, **how: Any) -> contextlib.AbstractAsyncContextManager[RouterClient]:
    return connect(f"127.0.0.1:{rig.server.grpc_port}", **how)


async def silent(seen: Seen, reply: Reply) -> None:
    await reply.begin_stream()
    await reply.event(chunk({"content": "The"}))
    await seen.gone.wait()


async def test_a_conversation_of_two_turns():
    """Whole and streamed; the first turn names it; numbers beyond doubles stay as they are."""

    async def play(seen: Seen, reply: Reply) -> None:
        if seen.json.get("stream"):
            await reply.begin_stream()
            await reply.send(event(chunk({"content": "é"}, seed=BIG)))
            await reply.end_stream()
        else:
            await reply.json(rig.decode.whole_answer(seen) | {"seed": BIG})

    async with talking(lease=FakeLease(), api_key="sk-1") as (rig, own):
        rig.decode.script(CHAT, play)
        async with own.conversation("m") as conversation:
            answer = await conversation.complete(messages=[QUESTION], max_tokens=16, seed=BIG)
            assert answer.body["seed"] == BIG
            assert json.loads(answer.text) == answer.body
            assert answer.verdict == "first_turn"
            assert conversation.id == answer.report.conversation_id != ""
            stream = conversation.chat(messages=[QUESTION], temperature=0.1)
            assert [part async for part in stream] == [chunk({"content": "é"}, seed=BIG)]
            assert stream.report == conversation.report
            assert stream.report.turn == 2
        first, second = [seen.json for seen in rig.decode.turns]
        assert first["seed"] == BIG
        assert (second["model"], second["temperature"]) == ("m", 0.1)
        assert {seen.header("authorization") for seen in rig.decode.turns} == {"Bearer sk-1"}


async def test_texts_are_completed_too():
    """A body with a prompt goes to the completions API."""
    async with talking() as (rig, own), own.conversation("m", reuse=False) as conversation:
        answer = await conversation.complete(prompt="The capital")
        assert answer.body["choices"][0]["text"]
        assert answer.verdict == "turned_off"
        assert rig.decode.turns[0].path == COMPLETIONS


@pytest.mark.parametrize("streamed", [False, True])
async def test_errors_are_typed(streamed):
    """An engine's refusal with its Retry-After, and a field that the router names."""

    async def refuse(seen: Seen, reply: Reply) -> None:
        await reply.json({"error": {"message": "too many"}}, 429, ("retry-after", "7"))

    async def ask(conversation: client.Conversation, **body: Any) -> RouterError:
        turn = anext(conversation.chat(**body)) if streamed else conversation.complete(**body)
        with pytest.raises(RouterError) as error:
            await turn
        return error.value

    async with talking() as (rig, own), own.conversation("m", "c1") as conversation:
        error = await ask(conversation, messages="x")
        assert (error.status, error.reason, error.field) == (400, "FIELD_INVALID", "messages")
        assert error.code is grpc.StatusCode.INVALID_ARGUMENT
        rig.prefill.script(CHAT, refuse)
        error = await ask(conversation, messages=[QUESTION])
        assert (error.status, error.reason, error.retry_after_s) == (429, "ENGINE_REFUSED", 7)
        assert json.loads(error.body) == {"error": {"message": "too many"}}
        assert "too many" in str(error)


async def test_a_router_that_cannot_be_reached_is_an_error_of_one_line(tmp_path: Path):
    """Nobody listens; it speaks TLS and we do not; we do and it does not."""
    ours = Authority(tmp_path)
    pair, ca = ours.issue(), ours.ca.read_bytes()
    flags = (f"--tls-cert={pair.cert}", f"--tls-key={pair.key}")

    async def problem(target: str, **how: Any) -> str:
        async with connect(target, **how) as own, own.conversation("m") as conversation:
            with pytest.raises(RouterError) as error:
                await conversation.complete(messages=[QUESTION], timeout_s=5)
        assert (error.value.status, error.value.reason) == (503, "")
        return str(error.value)

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        nobody = f"127.0.0.1:{taken.getsockname()[1]}"
        assert await problem(nobody) == f"no router answers at {nobody}: Connection refused"
    async with router(*flags, ready=False) as rig:
        said = await problem(f"127.0.0.1:{rig.server.grpc_port}")
        assert said.endswith("closes connections at once: if it has --tls-cert, set tls")
    async with router() as rig:
        tls = grpc.ssl_channel_credentials(ca)
        said = await problem(f"127.0.0.1:{rig.server.grpc_port}", tls=tls)
        assert "it speaks no TLS: leave tls out" in said


async def test_an_error_within_a_stream_comes_after_its_chunks():
    """What came before it was the engine's own."""

    async def die(seen: Seen, reply: Reply) -> None:
        await reply.begin_stream()
        await reply.event(chunk({"content": "The"}))
        reply.abort()

    async with talking() as (rig, own), own.conversation("m") as conversation:
        rig.decode.script(CHAT, die)
        stream = conversation.chat(messages=[QUESTION])
        assert await anext(stream) == chunk({"content": "The"})
        with pytest.raises(RouterError) as error:
            await anext(stream)
        assert (error.value.status, error.value.reason) == (502, "ENGINE_LOST")


async def test_a_router_that_is_not_there_or_not_in_time_is_an_error_without_a_reason():
    """503 and 504, by what gRPC says."""
    async with connect("127.0.0.1:1") as own, own.conversation("m") as conversation:
        with pytest.raises(RouterError) as error:
            await conversation.complete(messages=[QUESTION])
        assert (error.value.status, error.value.reason) == (503, "")
    async with talking() as (rig, own), own.conversation("m") as conversation:
        rig.decode.script(CHAT, silent)
        while not rig.decode.turns:  # on a busy machine the first ones may not come so far
            with pytest.raises(RouterError) as error:
                await conversation.complete(messages=[QUESTION], timeout_s=0.2)
            assert (error.value.status, error.value.reason) == (504, "")
        async with within(10):
            await rig.decode.turns[0].gone.wait()


@pytest.mark.parametrize("how", ["in order", "exception", "cancel", "cancel twice"])
async def test_leaving_a_conversation_ends_it(how):
    """However it is left: its turn under way stops, and the lease service hears of it."""
    async with talking(lease=FakeLease()) as (rig, own):
        rig.decode.script(CHAT, silent)

        async def talk() -> None:
            async with own.conversation("m", "c1") as conversation:
                async for _ in conversation.chat(messages=[QUESTION]):
                    if how == "in order":
                        return
                    if how == "exception":
                        raise LookupError
                    asyncio.current_task().cancel()  # type: ignore[union-attr]

        task = asyncio.create_task(talk())
        if how == "cancel twice":
            await rig.decode.turn(1)
            task.cancel()
            await asyncio.sleep(0)
            task.cancel()
        with contextlib.suppress(LookupError, asyncio.CancelledError):
            await task
        assert task.cancelled() == how.startswith("cancel")
        await rig.until(lambda: len(rig.lease.ended) == 1)
        assert rig.lease.ended[0].conversation_id == "c1"
        async with within(10):
            await rig.decode.turns[0].gone.wait()


async def test_a_conversation_may_outlive_its_client():
    """The program closes the client first: turns are refused, and leaving raises nothing."""
    async with router(lease=FakeLease()) as rig, contextlib.AsyncExitStack() as left:
        async with dial(rig) as own:
            conversation = await left.enter_async_context(own.conversation("m", "c1"))
            await conversation.complete(messages=[QUESTION])
        with pytest.raises(RouterError, match="the client was closed before"):
            await conversation.complete(messages=[QUESTION])
        with pytest.raises(RouterError, match="the client was closed before"):
            conversation.chat(messages=[QUESTION])


async def test_a_conversation_can_be_left_for_somebody_else():
    """`end=False`: nothing is ended, and its turns can be read by its id."""
    async with talking(lease=FakeLease()) as (rig, own):
        async with own.conversation("m", end=False) as conversation:
            await conversation.complete(messages=[QUESTION])
        await rig.lease.until(lambda: rig.lease.turns_ended)
        (turn,) = await own.turns("m", conversation.id)
        assert verdict_name(turn) == "first_turn"
        assert rig.lease.ended == []
        assert await own.end("m", conversation.id) == 1


async def test_a_stream_left_early_stops_its_engines():
    """`async with`: the turn ends with the block, and the conversation goes on."""
    async with talking() as (rig, own), own.conversation("m") as conversation:
        rig.decode.script(CHAT, silent)
        async with conversation.chat(messages=[QUESTION]) as stream:
            await anext(stream)
        async with within(10):
            await rig.decode.turns[0].gone.wait()
        with pytest.raises(RouterError) as error:
            await anext(stream)
        assert error.value.status == 499


class Brief(FakeLease):
    """A lease service that keeps conversations for a moment only."""

    async def KeepConversationAlive(self, request: Any, context: Any) -> Any:
        self.kept.append(request)
        answer = lease_pb2.KeepConversationAliveResponse()
        answer.kept.FromMilliseconds(300)
        return answer


async def test_a_conversation_is_kept_between_turns():
    """A caller at once with its next turn sends nothing; one that is busy sends heartbeats."""
    async with talking(lease=Brief()) as (rig, own):
        async with own.conversation("m") as conversation:
            await conversation.complete(messages=[QUESTION])
            await conversation.complete(messages=[QUESTION])
            assert rig.lease.kept == []
            await rig.until(lambda: len(rig.lease.kept) == 2)
            key = common_pb2.ConversationKey(model="m", conversation_id=conversation.id)
            assert [request.conversation for request in rig.lease.kept] == [key, key]
            rig.decode.script(CHAT, silent)
            async with conversation.chat(messages=[QUESTION]) as stream:
                await anext(stream)
                assert conversation._heartbeats is None
            assert conversation._heartbeats is not None
        assert conversation._heartbeats is None


async def test_an_absence_is_declared():
    """Heartbeats are silent until it is over."""
    async with talking(lease=FakeLease()) as (rig, own), own.conversation("m", "c1") as talk:
        assert await talk.away(90.5) == 60.0
        (kept,) = rig.lease.kept
        assert kept.absence.ToMilliseconds() == 90_500
        assert await own.keep_alive("m", "c1") == 60.0
        assert not rig.lease.kept[1].HasField("absence")


async def test_heartbeats_end_where_nothing_keeps_a_conversation():
    """A router without a lease service: one question, then silence."""
    async with talking() as (rig, own), own.conversation("m") as conversation:
        await conversation.complete(messages=[QUESTION])
        beats = conversation._heartbeats
        assert beats is not None
        await rig.until(beats.done)
        assert beats.exception() is None


async def test_heartbeats_do_not_go_on_for_ever(monkeypatch: pytest.MonkeyPatch):
    """A caller that never comes back lets its KV go."""
    monkeypatch.setattr(client, "_HEARTBEAT_MIN_S", 0.01)
    async with (
        talking(lease=Brief()) as (rig, own),
        own.conversation("m", heartbeats_max_s=0.5) as conversation,
    ):
        await conversation.complete(messages=[QUESTION])
        beats = conversation._heartbeats
        assert beats is not None
        await rig.until(beats.done)
        assert 1 <= len(rig.lease.kept) <= 6


async def test_it_speaks_tls_and_brings_its_key(tmp_path: Path):
    """A key unknown to the router is an error, and so is a certificate unknown to the client."""
    authority, strangers = Authority(tmp_path), Authority(tmp_path, "stranger")
    pair = authority.issue()
    keys = tmp_path / "keys"
    keys.write_text("sk-0123456789 team\n")
    flags = [f"--tls-cert={pair.cert}", f"--tls-key={pair.key}", f"--api-keys-file={keys}"]

    async def ask(rig: Rig, trusted: Authority, key: str) -> str:
        tls = grpc.ssl_channel_credentials(trusted.ca.read_bytes())
        async with dial(rig, tls=tls, api_key=key) as own, own.conversation("m") as conversation:
            try:
                return (await conversation.complete(messages=[QUESTION])).verdict
            except RouterError as error:
                return f"{error.status} {error.reason}"

    async with router(*flags, ready=False) as rig:
        await rig.until(lambda: not rig.server._fleet.missing())
        assert await ask(rig, authority, "sk-0123456789") == "not_offered"
        assert await ask(rig, authority, "sk-unknown-key") == "401 KEY_INVALID"
        assert await ask(rig, strangers, "sk-0123456789") == "503 "
        assert len(rig.decode.turns) == 1
