"""What a router tells at /metrics: of turns, engines, errors and itself."""

import asyncio
import logging
import os
import signal
from pathlib import Path

import grpc.aio
import pytest
from metrics_page import MetricsPage
from router_harness import CHAT, FakeLease, Rig, router, turn_body
from router_process import Process
from stub_engine import GUARD_S, Reply, Seen
from test_workers import workers

from kvturn.metrics import PageWriter
from kvturn.tracing import Tracing
from kvturn.v1 import router_pb2, router_pb2_grpc
from kvturn_router import worker_pages
from kvturn_router.metrics import FAMILIES
from kvturn_router.turn.account import Account
from kvturn_router.turn.counts import Outcome, TurnCounts
from kvturn_router.worker_pages import WorkerPages, WorkerPlace

PATH = "/metrics"
TURNS = "kvturn_router_turns_total"
IN_FLIGHT = "kvturn_router_turns_in_flight"
REPORT = {
    "verdict": "reused",
    "prompt_tokens": 48,
    "reused_tokens": 40,
    "local_tokens": 3,
    "read_ms": 20,
    "read_bytes": 1 << 20,
}


async def page_of(rig: Rig) -> MetricsPage:
    answer = await rig.ask("GET", PATH)
    assert answer.status == 200
    assert answer.headers["content-type"].startswith("text/plain; version=")
    return MetricsPage(answer.body.decode())


async def test_a_turn_that_reused_is_counted_with_its_tokens_and_times():
    """One streamed turn under a lease: 40 tokens read, 3 found, 5 computed."""
    lease = FakeLease()
    async with router("--plan=pull", lease=lease) as rig:
        lease.lease_id, lease.http_address = "inc.1.1", rig.decode.url
        rig.prefill.report = REPORT
        assert (await rig.post(turn_body(stream=True))).status == 200
        page = await page_of(rig)
        served = {"plan": "pull", "verdict": "reused", "outcome": "ok"}
        assert page.value(TURNS) == page.value(TURNS, **served) == 1
        sources = {"reused": 40, "local": 3, "computed": 5}
        for source, tokens in sources.items():
            assert page.value("kvturn_router_prompt_tokens_total", source=source) == tokens
        for name in ("first_byte", "turn", "prefill"):
            assert page.value(f"kvturn_router_{name}_seconds_count", plan="pull") == 1
            assert 0 < page.value(f"kvturn_router_{name}_seconds_sum") < GUARD_S
        for name in ("overhead", "question", "read"):
            assert page.value(f"kvturn_router_{name}_seconds_count") == 1
        assert page.value("kvturn_router_read_seconds_sum") == pytest.approx(0.02)
        assert page.value("kvturn_router_read_bytes_sum") == 1 << 20
        assert page.value("kvturn_router_read_bytes_bucket", le="262144.0") == 0
        assert page.value("kvturn_router_read_bytes_bucket", le="1.048576e+06") == 1
        assert page.value("kvturn_router_lease_session_up") == 1
        assert page.value("kvturn_router_lease_sessions_total") == 1


async def test_only_streams_count_for_the_time_to_the_first_byte():
    """A whole answer's first byte comes with its last: it would say nothing of the way."""
    async with router() as rig:
        assert (await rig.post(turn_body())).status == 200
        page = await page_of(rig)
        assert page.value("kvturn_router_turn_seconds_count", plan="recompute") == 1
        assert page.value("kvturn_router_first_byte_seconds_count") == 0
        assert page.value("kvturn_router_output_tokens_total") == 5
        assert page.value("kvturn_router_lease_session_up") == 0


async def test_each_end_of_a_turn_is_an_outcome():
    """Refused by an engine, failed by one, left by the client: counted, without tokens or times."""

    async def refuse(seen: Seen, reply: Reply) -> None:
        await reply.json({"error": {"message": "too long"}}, 400)

    async def fail(seen: Seen, reply: Reply) -> None:
        await reply.json({"error": {"message": "broken"}}, 500)

    async def hang(seen: Seen, reply: Reply) -> None:
        await seen.gone.wait()

    async with router() as rig:
        for play in (refuse, fail):
            rig.prefill.script(CHAT, play)
            assert (await rig.post(turn_body())).status in (400, 500)
        rig.prefill.script(CHAT, hang)
        client = await rig.client()
        await client.send("POST", CHAT, b'{"model": "m", "messages": []}')
        await rig.prefill.turn(3)
        in_flight = await page_of(rig)
        assert in_flight.value("kvturn_router_turns_in_flight") == 1
        url = rig.prefill.url
        assert in_flight.value("kvturn_router_engine_requests_in_flight", engine=url) == 1
        client.close()
        await rig.until(lambda: not rig.server.in_flight)
        page = await page_of(rig)
        for outcome in ("client_error", "engine_error", "hung_up"):
            assert page.value(TURNS, outcome=outcome) == 1, outcome
        assert page.value(TURNS) == 3
        assert page.value("kvturn_router_errors_total", front="http", reason="ENGINE_REFUSED") == 2
        assert page.value("kvturn_router_turn_seconds_count") == 0
        assert page.value("kvturn_router_turns_in_flight") == 0
        assert page.value("kvturn_router_engine_requests_total", engine=url) == 3


async def test_a_leg_that_was_sent_again_is_a_retry_and_no_overhead():
    """Prefill fails under the lease, and computes without: the second attempt is not the router's
    own time."""
    lease = FakeLease()
    async with router("--plan=pull", lease=lease) as rig:
        lease.lease_id, lease.http_address = "inc.1.1", rig.decode.url

        async def fail_once(seen: Seen, reply: Reply) -> None:
            rig.prefill.script(CHAT, rig.prefill.prefill)
            await reply.json({"error": {"message": "broken"}}, 500)

        rig.prefill.script(CHAT, fail_once)
        assert (await rig.post(turn_body())).status == 200
        page = await page_of(rig)
        assert page.value("kvturn_router_retries_total", leg="prefill") == 1
        assert page.value("kvturn_router_retries_total", leg="decode") == 0
        assert page.value("kvturn_router_overhead_seconds_count") == 0
        assert page.value(TURNS, verdict="read_failed", outcome="ok") == 1


def test_what_reuse_saved_never_falls():
    """A turn that reuse made slower saved nothing: a counter that falls would look like a reset."""
    counts = TurnCounts()
    for saved_ms in (250.0, -90.0, None):
        counts.over(Account(1, ended_ns=2, saved_ms=saved_ms), Outcome.OK, streamed=True)
    counts.over(Account(1, ended_ns=2, saved_ms=70.0), Outcome.HUNG_UP, streamed=True)
    page = PageWriter()
    counts.write(page)
    assert page.page["kvturn_router_saved_seconds_total"] == [([], 0.25)]


async def test_who_waits_for_room_is_seen_and_how_long():
    """One turn at a time for each engine: the second waits until the first is over."""
    free = asyncio.Event()

    async def hold(seen: Seen, reply: Reply) -> None:
        await free.wait()
        await rig.decode.decode(seen, reply)

    async with router("--max-inflight-per-engine=1") as rig:
        rig.decode.script(CHAT, hold)
        turns = [asyncio.create_task(rig.post(turn_body())) for _ in range(2)]
        async with asyncio.timeout(GUARD_S):
            page = await page_of(rig)
            while not page.value("kvturn_router_queued_turns"):
                page = await page_of(rig)
        assert page.value("kvturn_router_queued_turns", role="decode") == 1
        assert page.value("kvturn_router_queued_turns_limit") == 1024
        free.set()
        assert [answer.status for answer in await asyncio.gather(*turns)] == [200, 200]
        page = await page_of(rig)
        assert page.value("kvturn_router_queue_seconds_count", role="decode") == 1
        assert page.value("kvturn_router_queued_turns") == 0


async def test_engines_are_counted_by_role_and_state():
    """Two decode engines, one of which dies and one of which drains."""
    async with router(decodes=3) as rig:
        fleet = rig.server._fleet
        fleet.drain(rig.decodes[0].url, True)
        await rig.decodes[1].stop()
        await rig.until(lambda: not all(engine.usable for engine in fleet))
        page = await page_of(rig)
        engines = "kvturn_router_engines"
        for state in ("draining", "ejected", "usable"):
            assert page.value(engines, role="decode", state=state) == 1
        assert page.value(engines, role="prefill", state="usable") == 1
        assert page.value(engines) == 4


async def test_errors_of_both_fronts_are_counted_by_reason():
    """Unknown paths and bad fields over HTTP, a bad call over gRPC, a body that is too long."""
    async with router("--max-body-mb=1") as rig:
        assert (await rig.ask("GET", "/nowhere")).status == 404
        assert (await rig.post({"messages": []})).status == 400
        assert (await rig.ask("POST", CHAT, None, [("content-length", "9999999")])).status == 413
        async with grpc.aio.insecure_channel(f"127.0.0.1:{rig.server.grpc_port}") as channel:
            with pytest.raises(grpc.aio.AioRpcError):
                await router_pb2_grpc.RouterServiceStub(channel).Complete(
                    router_pb2.CompleteRequest(body_json="{")
                )
        page = await page_of(rig)
        errors = "kvturn_router_errors_total"
        assert page.value(errors, front="http", reason="PATH_UNKNOWN") == 1
        assert page.value(errors, front="http", reason="FIELD_INVALID") == 1
        assert page.value(errors, front="http", reason="BODY_TOO_LARGE") == 1
        assert page.value(errors, front="grpc") == 1
        assert page.value(TURNS) == 0


async def test_spans_that_cannot_be_delivered_are_counted():
    """A collector that takes nothing."""

    class Nowhere:
        def export(self, spans: object) -> bool:
            return False

        def shutdown(self) -> None:
            pass

    tracing = Tracing(Nowhere(), logging.getLogger("kvturn.test"))
    async with router(tracing=tracing) as rig:
        assert (await rig.post(turn_body())).status == 200
        await asyncio.to_thread(tracing.flush)
        page = await page_of(rig)
        assert page.value("kvturn_router_spans_total", outcome="dropped") > 0
        assert page.value("kvturn_router_spans_total", outcome="sent") == 0
    tracing.shutdown()


async def test_all_families_are_there_from_the_start_and_in_both_formats():
    """So that rules find them; OpenMetrics is for whoever asks for it."""
    async with router() as rig:
        page = await page_of(rig)
        assert page.families == {family.name: (family.kind, family.about) for family in FAMILIES}
        asked = [("accept", "application/openmetrics-text; version=1.0.0")]
        answer = await rig.ask("GET", PATH, headers=asked)
        assert answer.headers["content-type"].startswith("application/openmetrics-text")
        assert answer.body.endswith(b"# EOF\n")
        assert answer.body.count(b"# EOF") == 1
        answer = await rig.ask("GET", PATH, headers=[("accept", "text/plain; version=x")])
        assert answer.headers["content-type"].startswith("text/plain")
        assert (await rig.ask("POST", PATH)).status == 405
        assert (await rig.ask("HEAD", PATH)).status == 200


async def test_where_clients_need_keys_metrics_need_an_operators(tmp_path: Path):
    """Unless the router was told that they are for anybody."""
    clients, operators = tmp_path / "clients", tmp_path / "operators"
    clients.write_text("client-0123456789\n")
    operators.write_text("operator-0123456789\n")
    keys = [f"--api-keys-file={clients}", f"--admin-keys-file={operators}"]
    async with router(*keys) as rig:

        async def status(key: str) -> int:
            headers = [("authorization", f"Bearer {key}")] if key else []
            return (await rig.ask("GET", PATH, headers=headers)).status

        assert await status("") == 401
        assert await status("client-0123456789") == 401
        assert await status("operator-0123456789") == 200
    async with router(keys[0]) as rig:
        assert (await rig.ask("GET", PATH)).status == 403
    async with router(keys[0], "--metrics-without-key") as rig:
        assert (await rig.ask("GET", PATH)).status == 200


async def pages_of(router: Process, count: int, named: int) -> list[MetricsPage]:
    """Reads the page over so many connections, which reach several workers.

    Over each it is read again while it tells of fewer than `named` workers: it does not wait for
    one that a busy machine holds up.
    """
    pages = []
    for _ in range(count):
        client = await router.client()
        async with asyncio.timeout(GUARD_S):
            while True:
                await client.send("GET", PATH)
                page = MetricsPage((await client.answer()).body.decode())
                if len(page.labels(IN_FLIGHT, "worker")) >= named:
                    break
        pages.append(page)
        client.close()
    return pages


async def test_a_page_that_is_too_long_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """No more of another worker's page is read than a page may have."""
    monkeypatch.setattr(worker_pages, "_PAGE_BYTES_MAX", 1_000)
    long = {"family": [([str(number)], 1.0) for number in range(1_000)]}
    first = WorkerPages(WorkerPlace(1, tmp_path), lambda: long)
    second = WorkerPages(WorkerPlace(2, tmp_path), dict)
    await first.start()
    await second.start()
    assert await second.all() == {"2": {}}
    monkeypatch.setattr(worker_pages, "_PAGE_BYTES_MAX", 1_000_000)
    assert await second.all() == {"1": long, "2": {}}
    first.stop()
    second.stop()


async def test_whichever_worker_is_asked_tells_of_all():
    """Three workers: each page has the same turns, by worker. One is killed: the others' pages go
    on, and the next of its number takes its place."""
    async with workers(3) as fleet:
        served = len(await fleet.serving(3))
        assert served == 3
        turns = len(fleet.decode.turns)
        for page in await pages_of(fleet.router, 12, named=3):
            assert page.labels(IN_FLIGHT, "worker") == {"1", "2", "3"}
            assert page.value(TURNS) == turns
        pids = fleet.pids
        os.kill(pids[0], signal.SIGKILL)
        await fleet.until(lambda: pids[0] not in fleet.pids)
        for page in await pages_of(fleet.router, 6, named=2):
            assert page.value(TURNS) <= turns
        await fleet.until(lambda: len(fleet.pids) == 3)
        await fleet.serving(3)
        for page in await pages_of(fleet.router, 6, named=3):
            assert page.labels(IN_FLIGHT, "worker") == {"1", "2", "3"}
        fleet.router.process.send_signal(signal.SIGTERM)
        assert (await fleet.router.end())[0] == 0
