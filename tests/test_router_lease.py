"""Turns under a lease service: what it is asked and told, and what it can never do to a turn."""

import asyncio
import contextlib
import hashlib
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from router_harness import FakeLease, Rig, router, turn_body
from stub_engine import CHAT, Reply, Seen

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
        prefill = rig.prefill.turns[0].json["kv_transfer_params"]
        assert prefill == {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "kvturn": named | {"lease_id": "inc.1.1"},
        }
        decode = rig.decodes[1].turns[0].json["kv_transfer_params"]
        assert decode == rig.prefill.handle | {"kvturn": named}
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
    """X-Kvturn-Reuse: off reads nothing and retains nothing; the service is not even asked."""
    async with router(lease=FakeLease()) as rig:
        await leased(rig)
        answer = await rig.post(turn_body(), headers=[("X-Kvturn-Reuse", "off")])
        assert answer.verdict == "turned_off"
        assert "kvturn" not in rig.prefill.turns[0].json["kv_transfer_params"]
        assert "kvturn" not in rig.decode.turns[0].json["kv_transfer_params"]
        assert rig.lease.resolved == []
        wrong = await rig.post(turn_body(), headers=[("X-Kvturn-Reuse", "maybe")])
        assert wrong.json["error"]["param"] == "X-Kvturn-Reuse"


async def test_a_turn_for_decode_alone_is_not_offered():
    """n = 2 under a lease service: plain, and nothing is asked of the service."""
    async with router(lease=FakeLease()) as rig:
        await leased(rig)
        answer = await rig.post(turn_body(n=2))
        assert answer.verdict == "not_offered"
        assert "kv_transfer_params" not in rig.decode.turns[0].json
        assert rig.lease.resolved == []


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
async def lease_services(count: int, *flags: str) -> AsyncIterator[tuple[Rig, list[FakeLease]]]:
    """A router that is given all but the last of these lease services."""
    services = [await FakeLease().start() for _ in range(count)]
    given = ",".join(service.address for service in services[:-1])
    try:
        async with router(f"--lease={given}", "--question-deadline-ms=5000", *flags) as rig:
            yield rig, services
    finally:
        for service in services:
            await service.stop()


async def test_a_turn_follows_the_leader_that_a_standby_names():
    """The third, at once; from then on it is asked first, and hears of turns in flight."""
    async with lease_services(4) as (rig, (first, second, third, _)):
        first.standby, first.leader, third.verdict = "NOT_LEADER", third.address, "CONSUMED"
        for _turn in range(2):
            assert (await rig.post(turn_body(conversation_id="c1"))).verdict == "consumed"
        await third.until_touched(1)
        assert (len(second.resolved), len(third.resolved)) == (0, 2)
        assert len(first.resolved) <= 1


async def test_a_leader_that_the_router_was_not_given_is_not_asked():
    """A standby names a stranger: the next one of ours is asked."""
    async with lease_services(3) as (rig, (first, second, stranger)):
        first.standby, first.leader, second.verdict = "NOT_LEADER", stranger.address, "CONSUMED"
        assert (await rig.post(turn_body())).verdict == "consumed"
        assert stranger.resolved == []


@pytest.mark.parametrize(
    ("reason", "verdict"),
    [
        ("NOT_LEADER", "lease_service_unreachable"),
        ("STORE_UNAVAILABLE", "store_unavailable"),
        ("SHUTTING_DOWN", "lease_service_unreachable"),
    ],
)
async def test_without_a_leader_a_turn_recomputes(reason, verdict):
    """Everybody is asked once, nobody leads; clients that want more than a turn are told."""
    async with lease_services(3) as (rig, services):
        for service in services:
            service.standby = reason
        answer = await rig.post(turn_body())
        assert (answer.status, answer.verdict) == (200, verdict)
        assert [len(service.resolved) for service in services] == [1, 1, 0]
        kept = await rig.ask("POST", "/kvturn/v1/conversations/c1/keepalive?model=m", b"")
        assert kept.status == 503
        services[1].standby = ""
        assert (await rig.post(turn_body())).verdict == "first_turn"


async def test_the_service_hears_when_turns_begin_and_end():
    """+1 when a turn begins, -1 when it ends, in that order, also for a turn that failed."""
    async with router(lease=FakeLease()) as rig:
        release = asyncio.Event()

        async def held(seen: Seen, reply: Reply) -> None:
            await release.wait()
            await reply.json(rig.prefill.prefill_answer())

        rig.prefill.script(CHAT, held)
        turn = asyncio.create_task(rig.post(turn_body(conversation_id="c1")))
        await rig.lease.until_touched(1)
        assert rig.lease.touches == [("c1", 1)]
        release.set()
        await turn
        await rig.lease.until_touched(2)
        assert rig.lease.touches == [("c1", 1), ("c1", -1)]


async def test_the_end_of_a_turn_is_told_once_somebody_leads_again():
    """However often it was refused: a turn that never ends would keep the conversation's KV."""
    async with router(lease=FakeLease()) as rig:

        async def answers_without_leader(seen: Seen, reply: Reply) -> None:
            await rig.lease.until_touched(1)
            rig.lease.standby = "STORE_UNAVAILABLE"
            await reply.json(rig.prefill.prefill_answer())

        rig.prefill.script(CHAT, answers_without_leader)
        await rig.post(turn_body(conversation_id="c1"))
        await rig.lease.until_refused(5)
        rig.lease.standby = ""
        await rig.lease.until_touched(2)
        assert rig.lease.touches == [("c1", 1), ("c1", -1)]


async def test_a_grant_on_its_way_is_waited_for():
    """Right after turn 1 the service is asked for turn 1's grant; in a new one for none."""
    async with router(lease=FakeLease()) as rig:
        rig.prefill.report = REPORT
        await rig.post(turn_body(conversation_id="c1"))
        await rig.post(turn_body(conversation_id="c1"))
        first, second = rig.lease.resolved
        assert (first.expected_turn, first.HasField("wait")) == (0, False)
        assert second.expected_turn == 1
        assert 0 < second.wait.ToMilliseconds() < 5000
        assert kvturn(rig.prefill.turns[1])["turn"] == 2


async def test_no_grant_is_waited_for_where_none_can_come():
    """Engines without our connector, and turns that retain nothing, announce no grant."""
    async with router(lease=FakeLease()) as rig:
        await rig.post(turn_body(conversation_id="c1"))
        await rig.post(turn_body(conversation_id="c1"))
        rig.prefill.report = REPORT
        await rig.post(turn_body(conversation_id="c2"), headers=[("X-Kvturn-Reuse", "off")])
        await rig.post(turn_body(conversation_id="c2"))
        assert [request.expected_turn for request in rig.lease.resolved] == [0, 0, 0]


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
        async with asyncio.timeout(2):
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
async def test_a_read_that_nobody_knows_is_over_unless_another_leads_by_now(failover, forgotten):
    """The leader that granted it would know of a stuck one; its successor at most the lease."""
    async with lease_services(3, "--read-margin-ms=20") as (rig, (first, second, _)):
        first.lease_id, first.longest_read_ms, first.http_address = "inc.1.1", 50, rig.decode.url
        first.forgotten, second.forgotten = True, forgotten
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
        await rig.until(lambda: not rig.server._fleet.decodes[1].usable)
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
        tenants = [request.conversation.tenant for request in rig.lease.resolved]
        digest = hashlib.sha256(b"secret-a").hexdigest()[:16]
        assert tenants[0] == f"key-{digest}"
        assert len(set(tenants)) == 3
        assert tenants[2] == ""
        assert "secret" not in json.dumps([kvturn(seen) for seen in rig.prefill.turns])


async def test_a_configured_header_names_the_tenant():
    """A gateway's header counts, over the key."""
    async with router("--tenant-header=X-Tenant", lease=FakeLease()) as rig:
        headers = [("x-tenant", "acme"), ("Authorization", "Bearer k")]
        await rig.post(turn_body(), headers=headers)
        assert rig.lease.resolved[0].conversation.tenant == "acme"


async def test_a_conversation_can_be_seen_ended_and_kept_alive():
    """GET tells its turns to its own tenant alone; DELETE and keepalive go to the service."""
    mine = [("Authorization", "Bearer k")]
    path = "/kvturn/v1/conversations/a%2Fb?model=m"
    async with router(lease=FakeLease()) as rig:
        await leased(rig)
        await rig.post(turn_body(conversation_id="a/b"), headers=mine)
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
