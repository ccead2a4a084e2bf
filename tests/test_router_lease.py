"""Turns under a lease service: what it is asked and told, and what it can never do to a turn."""

import asyncio
import base64
import contextlib
import hashlib
import json
import random
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from awake import within
from google.protobuf import duration_pb2
from router_harness import FakeLease, Rig, router, turn_body
from stub_engine import CHAT, COMPLETIONS, GUARD_S, Reply, Seen

from kvturn.v1 import common_pb2, lease_pb2
from kvturn_router.leases import lease_client

REPORT = {
    "verdict": "reused",
    "prompt_tokens": 48,
    "reused_tokens": 40,
    "local_tokens": 3,
    "read_ms": 1.5,
    "read_bytes": 4096,
}


def kvturn(seen: Seen) -> dict[str, Any]:
    return dict(seen.json["kv_transfer_params"]["kvturn"])


async def leased(rig: Rig, **report: Any) -> None:
    """Has the lease service offer a lease, and prefill report on its read."""
    rig.lease.lease_id = "inc.1.1"
    rig.lease.http_address = rig.decodes[-1].url
    rig.prefill.report = REPORT | report


async def test_a_lease_goes_to_prefill_and_the_turn_to_its_holder():
    """Both legs name the conversation, only prefill the lease; decode 2 of 2 holds it."""
    async with router(decodes=2, lease=FakeLease()) as rig:
        await leased(rig)
        answer = await rig.post(turn_body(conversation_id="c1"))
        named = {"tenant": "", "model": "m", "conversation": "c1", "turn": 1}
        own = rig.lease.begun[0].points[0].hex()
        prefill = rig.prefill.turns[0].json["kv_transfer_params"]
        assert prefill == {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "kvturn": named | {"lease_id": "inc.1.1"},
        }
        decode = rig.decodes[1].turns[0].json["kv_transfer_params"]
        assert decode == rig.prefill.handle | {"kvturn": named | {"history": own}}
        assert {name: answer.headers[f"x-kvturn-{name}"] for name in ("conversation", "turn")} == {
            "conversation": "c1",
            "turn": "1",
        }
        assert answer.verdict == "reused"
        assert answer.headers["x-kvturn-prompt-tokens"] == "48"
        assert answer.headers["x-kvturn-reused-tokens"] == "40"
        assert answer.headers["x-kvturn-local-tokens"] == "3"
        assert float(answer.headers["x-kvturn-read-ms"]) == 1.5
        assert answer.headers["x-kvturn-read-bytes"] == "4096"
        assert float(answer.headers["x-kvturn-prefill-ms"]) > 0
        assert answer.json["usage"]["prompt_tokens_details"] == {"cached_tokens": 43}


@pytest.mark.parametrize("stream", [False, True])
async def test_the_verdict_is_the_readers_and_both_modes_tell_it(stream):
    """Prefill's connector found a shorter prefix: the headers say so before the first byte."""
    async with router(lease=FakeLease()) as rig:
        await leased(rig, verdict="partial_prefix", reused_tokens=16)
        answer = await rig.post(turn_body(stream=stream))
        assert answer.verdict == "partial_prefix"
        assert answer.headers["x-kvturn-reused-tokens"] == "16"


@pytest.mark.parametrize("report", [None, {"verdict": "nonsense"}, {"verdict": 7}, "text"])
async def test_prefill_without_our_connector_does_not_offer_reuse(report):
    """A lease was offered, nobody reports on it: not_offered, and the turn is served."""
    async with router(lease=FakeLease()) as rig:
        await leased(rig)
        rig.prefill.report = report
        answer = await rig.post(turn_body())
        assert (answer.status, answer.verdict) == (200, "not_offered")


@pytest.mark.parametrize(
    "verdict", ["FIRST_TURN", "NO_LEASE", "ENDED", "RELEASED", "CONSUMED", "STORE_UNAVAILABLE"]
)
async def test_without_a_lease_the_verdict_is_the_services(verdict):
    """Prefill gets no lease id, decode still retains under the conversation."""
    async with router(lease=FakeLease(verdict=verdict)) as rig:
        answer = await rig.post(turn_body(conversation_id="c1"))
        assert answer.verdict == verdict.lower()
        assert "lease_id" not in kvturn(rig.prefill.turns[0])
        assert kvturn(rig.decode.turns[0])["conversation"] == "c1"


async def test_a_turn_with_reuse_off_is_unknown_to_everyone():
    """X-Kvturn-Reuse: off reads nothing and retains nothing; only its being in flight is told."""
    async with router(lease=FakeLease()) as rig:
        await leased(rig)
        answer = await rig.post(turn_body(), headers=[("X-Kvturn-Reuse", "off")])
        assert answer.verdict == "turned_off"
        assert "kvturn" not in rig.prefill.turns[0].json["kv_transfer_params"]
        assert "kvturn" not in rig.decode.turns[0].json["kv_transfer_params"]
        await rig.lease.until(lambda: rig.lease.turns_ended)
        assert [(begin.reuse, len(begin.points)) for begin in rig.lease.begun] == [(False, 0)]
        assert not rig.lease.turns_ended[0].retains
        wrong = await rig.post(turn_body(), headers=[("X-Kvturn-Reuse", "maybe")])
        assert wrong.json["error"]["param"] == "X-Kvturn-Reuse"


async def test_a_turn_for_decode_alone_is_not_offered():
    """n = 2 under a lease service: plain, and the service is asked for nothing."""
    async with router(lease=FakeLease()) as rig:
        await leased(rig)
        answer = await rig.post(turn_body(n=2))
        assert answer.verdict == "not_offered"
        assert "kv_transfer_params" not in rig.decode.turns[0].json
        await rig.lease.until(lambda: rig.lease.begun)
        assert not rig.lease.begun[0].reuse


async def test_a_silent_lease_service_costs_a_turn_the_question_deadline():
    """It is frozen: the turn recomputes with a verdict; it answers again: reuse is back."""
    async with router("--question-deadline-ms=30", lease=FakeLease()) as rig:
        await leased(rig)
        rig.lease.silent = True
        answer = await rig.post(turn_body(conversation_id="c1"))
        assert (answer.status, answer.verdict) == (200, "lease_service_unreachable")
        assert kvturn(rig.prefill.turns[0])["conversation"] == "c1"
        rig.lease.silent = False
        async with asyncio.timeout(30):
            while (await rig.post(turn_body())).verdict != "reused":
                pass


async def test_an_absent_lease_service_fails_nothing():
    """Nobody listens at its address, from the start."""
    async with router("--lease=127.0.0.1:1") as rig:
        answer = await rig.post(turn_body())
        assert (answer.status, answer.verdict) == (200, "lease_service_unreachable")
        ended = await rig.ask("DELETE", "/kvturn/v1/conversations/c1?model=m")
        assert ended.status == 503


@contextlib.asynccontextmanager
async def lease_services(services: Sequence[FakeLease], *flags: str) -> AsyncIterator[Rig]:
    """A router that is given these lease services."""
    for service in services:
        if not service.address:
            await service.start()
    given = ",".join(service.address for service in services)
    try:
        async with router(f"--lease={given}", "--question-deadline-ms=5000", *flags) as rig:
            if not all(service.standby for service in services):
                await rig.until_session()
            yield rig
    finally:
        for service in services:
            await service.stop()


async def test_a_turn_follows_the_leader_that_a_standby_names():
    """The third, at once; the second is not asked."""
    first, second = FakeLease(standby="NOT_LEADER"), FakeLease()
    third = await FakeLease(verdict="CONSUMED").start()
    first.leader = third.address
    async with lease_services([first, second, third]) as rig:
        for _turn in range(2):
            assert (await rig.post(turn_body(conversation_id="c1"))).verdict == "consumed"
        assert (len(second.begun), len(third.begun)) == (0, 2)


async def test_a_leader_that_the_router_was_not_given_is_not_asked():
    """A standby names a stranger: the next one of ours is asked."""
    stranger = await FakeLease().start()
    first = FakeLease(standby="NOT_LEADER", leader=stranger.address)
    second = FakeLease(verdict="CONSUMED")
    try:
        async with lease_services([first, second]) as rig:
            assert (await rig.post(turn_body())).verdict == "consumed"
            assert stranger.hellos == []
    finally:
        await stranger.stop()


@pytest.mark.parametrize(
    ("reason", "verdict"),
    [
        ("NOT_LEADER", "lease_service_unreachable"),
        ("STORE_UNAVAILABLE", "store_unavailable"),
        ("SHUTTING_DOWN", "lease_service_unreachable"),
    ],
)
async def test_without_a_leader_a_turn_recomputes(reason, verdict):
    """Nobody leads: turns do not wait; clients that want more than a turn are told."""
    services = [FakeLease(standby=reason), FakeLease(standby=reason)]
    async with lease_services(services) as rig:
        await rig.until(lambda: all(service.refused for service in services))
        answer = await rig.post(turn_body())
        assert (answer.status, answer.verdict) == (200, verdict)
        kept = await rig.ask("POST", "/kvturn/v1/conversations/c1/keepalive?model=m", b"")
        assert kept.status == 503
        services[1].standby = ""
        await rig.until_session()
        assert (await rig.post(turn_body())).verdict == "first_turn"


async def test_the_service_hears_when_turns_begin_and_how_they_ended():
    """A turn in flight is known as such; its end brings the report that clients get."""
    async with router(lease=FakeLease()) as rig:
        await leased(rig)
        release = asyncio.Event()

        async def held(seen: Seen, reply: Reply) -> None:
            await release.wait()
            await reply.json(rig.prefill.prefill_answer())

        rig.prefill.script(CHAT, held)
        turn = asyncio.create_task(rig.post(turn_body(conversation_id="c1")))
        await rig.lease.until(lambda: rig.lease.begun)
        begun = rig.lease.begun[0]
        assert (begun.conversation.conversation_id, begun.recognise) == ("c1", False)
        assert begun.reuse
        assert rig.lease.turns_ended == []
        release.set()
        answer = await turn
        await rig.lease.until(lambda: rig.lease.turns_ended)
        ended = rig.lease.turns_ended[0]
        assert (ended.turn_id, ended.retains) == (begun.turn_id, True)
        assert ended.report.verdict == common_pb2.VERDICT_REUSED
        assert ended.report.plan == common_pb2.PLAN_KIND_PULL
        assert ended.report.reused_tokens == int(answer.headers["x-kvturn-reused-tokens"])
        assert ended.report.decode_engine == rig.decode.url


async def test_a_turn_that_fails_ends_without_a_report():
    """Prefill refuses the body: nothing was served, nothing is retained."""
    async with router(lease=FakeLease()) as rig:

        async def play(seen: Seen, reply: Reply) -> None:
            await reply.json({"error": {"message": "too long"}}, 400)

        rig.prefill.script(CHAT, play)
        await rig.post(turn_body())
        await rig.lease.until(lambda: rig.lease.turns_ended)
        ended = rig.lease.turns_ended[0]
        assert (ended.retains, ended.HasField("report")) == (False, False)


async def test_no_grant_is_announced_where_none_can_come():
    """Engines without our connector retain nothing that the next turn could wait for."""
    async with router(lease=FakeLease()) as rig:
        await rig.post(turn_body(conversation_id="c1"))
        await rig.lease.until(lambda: rig.lease.turns_ended)
        assert not rig.lease.turns_ended[0].retains


ANSWERED = [
    {"role": "user", "content": "What is the capital of France?"},
    {"role": "assistant", "content": "Paris."},
    {"role": "user", "content": "And of Italy?"},
]


async def test_equal_first_questions_are_not_taken_for_one_conversation():
    """Any number of clients may begin with the same words; none takes another's KV for its own.

    Once there is an answer in it, or where it is text without seams, the history decides.
    """
    async with router(lease=FakeLease()) as rig:
        for members in ({}, {"session_id": "S"}):
            for messages in (turn_body()["messages"], ANSWERED[:1], ANSWERED):
                await rig.post(turn_body(messages=messages) | members)
        await rig.post({"model": "m", "prompt": "Once upon a time"}, COMPLETIONS)
        told = [begun.recognise for begun in rig.lease.begun]
        assert told == [False, False, True, False, False, True, True]
        first = [begun.conversation.conversation_id for begun in rig.lease.begun if begun.points]
        assert len(set(first)) == len(first)


async def test_the_id_that_the_service_recognised_is_the_turns():
    """No id was given: what the service says goes to engines, headers and reports."""

    class Recognising(FakeLease):
        def answer_to(self, begin: lease_pb2.BeginTurn) -> lease_pb2.TurnBegun:
            begun = super().answer_to(begin)
            begun.conversation_id = "conv-known"
            return begun

    async with router(lease=Recognising()) as rig:
        answer = await rig.post(turn_body(messages=ANSWERED))
        begun = rig.lease.begun[0]
        assert begun.recognise
        assert begun.conversation.conversation_id.startswith("conv-")
        assert answer.headers["x-kvturn-conversation"] == "conv-known"
        assert kvturn(rig.decode.turns[0])["conversation"] == "conv-known"
        await rig.lease.until(lambda: rig.lease.turns_ended)
        assert rig.lease.turns_ended[0].report.conversation_id == "conv-known"


async def test_an_image_goes_to_both_legs_as_it_came_and_is_part_of_the_history():
    """A data URL of 3 MB, with escapes and odd spacing that are the client's own.

    The next turn, which repeats it, is known by it; the same words about another image are not.
    """

    question = r"""{"role": "user","content":[{"type":"text", "text":"What is this\u003F"},
        {"type": "image_url","image_url":{ "url": "data:image\/png;base64,IMAGE" }}]}"""

    def asked(image: str, *more: str) -> bytes:
        return f"[{', '.join((question.replace('IMAGE', image), *more))}]".encode()

    first, other = (base64.b64encode(random.Random(n).randbytes(3 << 20)).decode() for n in (0, 1))
    answered = '{"role": "assistant", "content": "A cat."}', '{"role":"user","content":"Its name?"}'
    histories = [asked(first), asked(first, *answered), asked(other, *answered)]
    async with router(lease=FakeLease()) as rig:
        for history in histories:
            body = b'{"model":"m","messages":%b,"stream":true,"max_tokens":9}' % history
            assert (await rig.post(body)).status == 200
            assert rig.decode.turns[-1].body.startswith(body[:-1] + b',"kv_transfer_params":{')
            sent = b'{"model":"m","messages":%b,"stream":false,"max_tokens":1,"kv_' % history
            assert rig.prefill.turns[-1].body.startswith(sent)
        one, repeated, another = (begun.points for begun in rig.lease.begun)
        assert one[0] in repeated[1:]
        assert not {*one, *repeated} & {*another}


async def test_a_short_suffix_is_computed_by_the_holder_alone():
    """The holder has all but a few tokens: no prefill leg, verdict local, tokens by its grant."""

    class Holding(FakeLease):
        def answer_to(self, begin: lease_pb2.BeginTurn) -> lease_pb2.TurnBegun:
            begun = super().answer_to(begin)
            begun.token_count, begun.prompt_tokens, begun.extends = 4000, 3900, True
            return begun

    async with router("--plan=local", lease=Holding()) as rig:
        await leased(rig)
        answer = await rig.post(turn_body(conversation_id="c1"))
        assert (answer.status, answer.verdict) == (200, "local")
        assert answer.headers["x-kvturn-plan"] == "local"
        assert rig.prefill.turns == []
        transfer = rig.decode.turns[0].json["kv_transfer_params"]
        assert list(transfer) == ["kvturn"]
        assert transfer["kvturn"]["conversation"] == "c1"
        assert "lease_id" not in transfer["kvturn"]
        # The engine's own number says what it did not compute.
        assert answer.json["usage"]["prompt_tokens_details"] == {"cached_tokens": 48}
        assert answer.headers["x-kvturn-local-tokens"] == "48"
        turn_id = rig.lease.begun[0].turn_id
        tokens = {"token_count": 4021, "prompt_tokens": 4010, "local_cached_tokens": 3984}
        await rig.lease.push(retained=[lease_pb2.TurnRetained(turn_id=turn_id, **tokens)])
        await rig.lease.until(lambda: rig.lease.turns_ended)
        ended = rig.lease.turns_ended[0]
        assert ended.retains
        assert ended.report.local_tokens == 48


async def test_a_holder_that_refuses_a_local_turn_is_done_without():
    """Its port is closed by then: another decode engine serves, prefill computes, engine_lost."""
    async with router("--plan=local", decodes=2, lease=FakeLease()) as rig:
        await leased(rig)
        await rig.decodes[1].stop()
        answer = await rig.post(turn_body())
        assert (answer.status, answer.verdict) == (200, "engine_lost")
        assert len(rig.prefill.turns) == 1
        assert "lease_id" not in kvturn(rig.prefill.turns[0])
        assert len(rig.decodes[0].turns) == 1


async def test_a_holder_that_dies_after_the_head_of_a_local_turn_is_done_without():
    """As one that refuses it: nothing of an answer had come."""

    async def play(seen: Seen, reply: Reply) -> None:
        del seen
        await reply.begin_stream()
        reply.abort()

    async with router("--plan=local", decodes=2, lease=FakeLease()) as rig:
        await leased(rig)
        rig.decodes[1].script(CHAT, play)
        answer = await rig.post(turn_body(stream=True))
        assert (answer.status, answer.verdict) == (200, "engine_lost")
        assert answer.whole
        assert len(rig.prefill.turns) == len(rig.decodes[0].turns) == 1


@pytest.mark.parametrize("failure", ["500", "abort"])
async def test_a_prefill_that_fails_under_a_lease_is_asked_once_more_without(failure):
    """The second request has another id and no lease; the verdict says that the read failed."""
    async with router(lease=FakeLease()) as rig:
        await leased(rig)

        async def play(seen: Seen, reply: Reply) -> None:
            if "lease_id" not in kvturn(seen):
                rig.prefill.report = None
                await reply.json(rig.prefill.prefill_answer())
            elif failure == "500":
                await reply.json({"error": "load failed"}, 500)
            else:
                reply.abort()

        rig.prefill.script(CHAT, play)
        answer = await rig.post(turn_body())
        assert (answer.status, answer.verdict) == (200, "read_failed")
        ids = [seen.header("x-request-id") for seen in rig.prefill.turns]
        assert len(set(ids)) == len(ids)
        assert "lease_id" not in kvturn(rig.prefill.turns[-1])


async def test_a_bad_request_under_a_lease_is_not_asked_again():
    """Prefill refuses the prompt: the client is told, after one call."""
    async with router(lease=FakeLease()) as rig:
        await leased(rig)

        async def play(seen: Seen, reply: Reply) -> None:
            await reply.json({"error": {"message": "too long"}}, 400)

        rig.prefill.script(CHAT, play)
        assert (await rig.post(turn_body())).status == 400
        assert len(rig.prefill.turns) == 1


async def test_a_prefill_that_fails_without_its_lease_too_is_an_error():
    """Two attempts, no more."""
    async with router(lease=FakeLease()) as rig:
        await leased(rig)

        async def play(seen: Seen, reply: Reply) -> None:
            await reply.json({"error": "broken"}, 500)

        rig.prefill.script(CHAT, play)
        assert (await rig.post(turn_body())).status == 500
        assert len(rig.prefill.turns) == 2


async def test_a_stuck_read_is_given_up_and_the_turn_sent_again():
    """Past the longest read the service still counts it as reading: the leg ends, another goes."""
    async with router("--read-margin-ms=20", lease=FakeLease(longest_read_ms=50)) as rig:
        await leased(rig)
        rig.lease.reading_ms = 200

        async def play(seen: Seen, reply: Reply) -> None:
            if "lease_id" in kvturn(seen):
                await seen.gone.wait()
            else:
                rig.prefill.report = None
                await reply.json(rig.prefill.prefill_answer())

        rig.prefill.script(CHAT, play)
        answer = await rig.post(turn_body())
        assert (answer.status, answer.verdict) == (200, "read_too_long")
        stuck, again = rig.prefill.turns
        async with within(2):
            await stuck.gone.wait()
        assert stuck.header("x-request-id") != again.header("x-request-id")
        assert rig.lease.asked[0] == "inc.1.1"


async def test_a_slow_prefill_whose_read_is_over_is_left_alone():
    """Long after the longest read prefill still computes: nobody reads, so nothing is given up."""
    async with router("--read-margin-ms=20", lease=FakeLease(longest_read_ms=50)) as rig:
        await leased(rig)

        async def play(seen: Seen, reply: Reply) -> None:
            await rig.until(lambda: len(rig.lease.asked) >= 3)
            await reply.json(rig.prefill.prefill_answer())

        rig.prefill.script(CHAT, play)
        assert (await rig.post(turn_body())).verdict == "reused"
        assert len(rig.prefill.turns) == 1


@pytest.mark.parametrize(("failover", "forgotten"), [(False, True), (True, True), (True, False)])
async def test_a_read_that_nobody_knows_is_over_unless_another_leads_by_now(
    failover, forgotten, monkeypatch
):
    """The leader that granted it would know of a stuck one; its successor at most the lease."""
    # An answer that a busy machine brings late would be asked for again.
    monkeypatch.setattr(lease_client, "_CALL_DEADLINE_S", GUARD_S)
    first = FakeLease(lease_id="inc.1.1", longest_read_ms=50, forgotten=True)
    second = FakeLease(forgotten=forgotten)
    async with lease_services([first, second], "--read-margin-ms=20") as rig:
        first.http_address = rig.decode.url
        rig.prefill.report = REPORT

        async def play(seen: Seen, reply: Reply) -> None:
            if "lease_id" not in kvturn(seen):
                rig.prefill.report = None
                await reply.json(rig.prefill.prefill_answer())
            elif failover:
                first.standby, first.leader = "NOT_LEADER", second.address
                await seen.gone.wait()
            else:
                await rig.until(lambda: first.asked)
                await reply.json(rig.prefill.prefill_answer())

        rig.prefill.script(CHAT, play)
        answer = await rig.post(turn_body())
        assert answer.verdict == ("read_too_long" if failover else "reused")
        assert (len(first.asked), len(second.asked)) == ((0, 1) if failover else (1, 0))


async def test_a_lost_holder_is_not_read_from():
    """The holder was taken out: the other decode serves, recomputed, engine_lost."""
    async with router("--health-failures=1", decodes=2, lease=FakeLease()) as rig:
        await leased(rig)
        rig.decodes[1].healthy = False
        holder = rig.server._fleet.holder(rig.decodes[1].url)
        await rig.until(lambda: not holder.usable)
        answer = await rig.post(turn_body())
        assert (answer.status, answer.verdict) == (200, "engine_lost")
        assert len(rig.decodes[0].turns) == 1
        assert "lease_id" not in kvturn(rig.prefill.turns[0])


async def test_tenants_are_told_apart_by_key_and_the_key_stays_unknown():
    """Two keys are two tenants, named by a digest; no key is the tenant without a name."""
    async with router(lease=FakeLease()) as rig:
        for key in ("secret-a", "secret-b"):
            await rig.post(turn_body(), headers=[("Authorization", f"Bearer {key}")])
        await rig.post(turn_body())
        tenants = [begin.conversation.tenant for begin in rig.lease.begun]
        digest = hashlib.sha256(b"secret-a").hexdigest()[:16]
        assert tenants[0] == f"key-{digest}"
        assert len(set(tenants)) == 3
        assert tenants[2] == ""
        assert "secret" not in json.dumps([kvturn(seen) for seen in rig.prefill.turns])


async def test_a_conversation_tells_whose_its_turns_are_and_what_is_held():
    """Each turn with its conversation and its plan's reason; each lease with engine and time."""
    being_read = lease_pb2.Lease(
        conversation=common_pb2.ConversationKey(model="m", conversation_id="s~2"),
        engine_id="d2",
        token_count=7,
        state=lease_pb2.Lease.STATE_READING,
    )
    idle = lease_pb2.Lease(
        conversation=common_pb2.ConversationKey(model="m", conversation_id="s~1"),
        engine_id="d1",
        token_count=640,
        state=lease_pb2.Lease.STATE_ACTIVE,
        idle_in=duration_pb2.Duration(seconds=41, nanos=500_000_000),
    )
    async with router(lease=FakeLease(leases=[idle, being_read])) as rig:
        answer = await rig.post(turn_body(conversation_id="c1"))
        await rig.lease.until(lambda: rig.lease.turns_ended)
        told = (await rig.ask("GET", "/kvturn/v1/conversations/c1?model=m")).json
        (turn,) = told["turns"]
        assert turn["conversation_id"] == "c1"
        assert turn["plan_reason"] == answer.headers["x-kvturn-plan-reason"] != ""
        one, two = ("s~1", "d1", 640, False, 41.5), ("s~2", "d2", 7, True, None)
        names = ("conversation_id", "engine_id", "token_count", "being_read", "kept_s")
        assert told["held"] == [dict(zip(names, each, strict=True)) for each in (one, two)]
        unknown = await rig.ask("GET", "/kvturn/v1/conversations/other?model=m")
        assert unknown.status == 404
        assert "x-kvturn-conversation" in unknown.json["error"]["message"]
        nowhere = await rig.ask("GET", "/kvturn/v1/conversation/c1")
        assert nowhere.status == 404
        assert "/kvturn/v1/conversations/{id}?model=M" in nowhere.json["error"]["message"]


async def test_without_a_lease_service_a_conversation_tells_the_router_s_own_turns():
    """Nothing is held; of the reason the words are remembered."""
    async with router() as rig:
        await rig.post(turn_body(conversation_id="c1"))
        told = (await rig.ask("GET", "/kvturn/v1/conversations/c1?model=m")).json
        (turn,) = told["turns"]
        assert (turn["conversation_id"], turn["plan_reason"]) == ("c1", "not_offered no_holder")
        assert told["held"] == []


async def test_a_configured_header_names_the_tenant():
    """A gateway's header counts, over the key."""
    async with router("--tenant-header=X-Tenant", lease=FakeLease()) as rig:
        headers = [("x-tenant", "acme"), ("Authorization", "Bearer k")]
        await rig.post(turn_body(), headers=headers)
        assert rig.lease.begun[0].conversation.tenant == "acme"


async def test_a_conversation_can_be_seen_ended_and_kept_alive():
    """GET tells its turns to its own tenant alone; DELETE and keepalive go to the service."""
    mine = [("Authorization", "Bearer k")]
    path = "/kvturn/v1/conversations/a%2Fb?model=m"
    async with router(lease=FakeLease()) as rig:
        await leased(rig)
        await rig.post(turn_body(conversation_id="a/b"), headers=mine)
        await rig.lease.until(lambda: rig.lease.turns_ended)
        told = (await rig.ask("GET", path, headers=mine)).json
        assert told["conversation_id"] == "a/b"
        assert [turn["verdict"] for turn in told["turns"]] == ["reused"]
        assert told["turns"][0]["reused_tokens"] == 40
        assert (await rig.ask("GET", path)).status == 404
        assert (await rig.ask("DELETE", path, headers=mine)).json == {"leases_ended": 1}
        assert rig.lease.ended[0].conversation_id == "a/b"
        kept = await rig.ask(
            "POST",
            "/kvturn/v1/conversations/a%2Fb/keepalive?model=m",
            b'{"absence_s": 90.5}',
            mine,
        )
        assert kept.json == {"kept_s": 60.0}
        assert rig.lease.kept[0].absence.ToMilliseconds() == 90_500


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "param"),
    [
        ("GET", "/kvturn/v1/conversations/c1", None, 400, "model"),
        ("GET", "/kvturn/v1/conversations/?model=m", None, 400, "conversation_id"),
        ("GET", f"/kvturn/v1/conversations/{'x' * 257}?model=m", None, 400, "conversation_id"),
        ("GET", "/kvturn/v1/conversations/%ff?model=m", None, 400, None),
        ("PUT", "/kvturn/v1/conversations/c1?model=m", b"{}", 405, None),
        ("POST", "/kvturn/v1/conversations/unknown/keepalive?model=m", b"", 404, None),
        (
            "POST",
            "/kvturn/v1/conversations/c/keepalive?model=m",
            b'{"absence_s":-1}',
            400,
            "absence_s",
        ),
        (
            "POST",
            "/kvturn/v1/conversations/c/keepalive?model=m",
            b'{"absence_s":"1"}',
            400,
            "absence_s",
        ),
        (
            "POST",
            "/kvturn/v1/conversations/c/keepalive?model=m",
            b'{"absence_s":86401}',
            400,
            "absence_s",
        ),
        (
            "POST",
            "/kvturn/v1/conversations/c/keepalive?model=m",
            b'{"absence_s":0}',
            400,
            "absence_s",
        ),
        ("POST", "/kvturn/v1/conversations/c/keepalive?model=m", b"[]", 400, None),
        (
            "POST",
            "/kvturn/v1/conversations/c/keepalive?model=m",
            b'{"absence":5}',
            400,
            "absence",
        ),
    ],
)
async def test_a_wrong_request_about_a_conversation_is_refused_by_name(
    method, path, body, status, param
):
    """Missing model, empty or long ids, wrong methods, wrong absences."""
    async with router(lease=FakeLease()) as rig:
        answer = await rig.ask(method, path, body)
        assert answer.status == status
        assert answer.json["error"]["param"] == param


async def test_without_a_lease_service_nothing_can_be_kept_alive():
    """Ending a conversation is fine, for nothing is held; keeping it is not offered."""
    async with router() as rig:
        path = "/kvturn/v1/conversations/c1"
        assert (await rig.ask("DELETE", f"{path}?model=m")).json == {"leases_ended": 0}
        assert (await rig.ask("POST", f"{path}/keepalive?model=m", b"")).status == 501
