"""What a lease service tells at /metrics: of leases, reads, engines, terms and its store."""

from __future__ import annotations

import asyncio
import contextlib
import re
from typing import TYPE_CHECKING

import pytest
from etcd_server import EtcdServer
from lease_rig import LASTING, Engine, LeaseProcess, lease_cluster, lease_of, until
from lessor_bench import CONFIG, READER_BOUND, TTL, Bench, Decode, S
from metrics_page import MetricsPage

from kvturn.metrics import ENGINES_NAMED_MAX, OTHER
from kvturn.metrics_page import written
from kvturn_lease.config import ConfigError, LeaseConfig, LessorConfig, parse_config
from kvturn_lease.lessor import Lessor
from kvturn_lease.metrics import FAMILIES, LeaseMetrics
from kvturn_lease.metrics_listener import CONNECTIONS_MAX, MetricsListener
from kvturn_lease.server import ListenError
from kvturn_lease.servicer import LeaseServicer
from kvturn_lease.store import MemoryStore
from kvturn_lease.telemetry import make_tracing
from kvturn_lease.verdict import ReadOutcome, ReleaseReason

if TYPE_CHECKING:
    from pathlib import Path

RELEASES = "kvturn_lease_releases_total"
READS_ENDED = "kvturn_lease_reads_ended_total"
ENGINES = "kvturn_lease_engines"


class Watched(Bench):
    """A lessor whose metrics are read."""

    def __init__(self, config: LessorConfig | None = None) -> None:
        super().__init__(config or CONFIG)
        self.servicer = LeaseServicer(
            LeaseConfig(lessor=self.lessor.config), None, None, lambda: self.now, make_tracing(None)
        )
        self.lessor = Lessor(self.lessor.config, self.lessor.term, tally=self.servicer.tally)
        self.metrics = LeaseMetrics(self.servicer, lambda: self.now)

    async def page(self) -> MetricsPage:
        _, text = await written(FAMILIES, {"": self.metrics.page()}, "")
        return MetricsPage(text.decode())

    def lead(self) -> None:
        self.servicer.lead(self.lessor, MemoryStore())


@pytest.fixture
async def bench() -> Watched:
    watched = Watched()
    watched.lead()
    return watched


async def test_leases_are_counted_by_state_and_by_how_they_end(bench: Watched):
    """One is active, one being read, one read and gone, one superseded, one withdrawn."""
    decode = Decode(bench).up()
    for number, name in enumerate(("a", "b", "c", "d", "d", "e"), 1):
        decode.grant(number, name, tokens=100, blocks=7)
    bench.begin(decode.lease_id(2), "b")
    bench.begin(decode.lease_id(3), "c")
    bench.end_read(decode.lease_id(3))
    decode.beat((6, ReleaseReason.PRESSURE))
    page = await bench.page()
    states = {"active": 2, "reading": 1, "ending": 0}
    for state, count in states.items():
        assert page.value("kvturn_lease_leases", state=state) == count, state
    assert page.value("kvturn_lease_grants_total") == 6
    for reason in ("consumed", "superseded", "pressure"):
        assert page.value(RELEASES, reason=reason) == 1, reason
    assert page.value(RELEASES) == 3
    assert page.value("kvturn_lease_reads_granted_total") == 2
    assert page.value(READS_ENDED, outcome="completed") == 1
    assert page.value("kvturn_lease_engine_leases", engine="d1") == 3
    assert page.value("kvturn_lease_engine_leased_tokens", engine="d1") == 300
    assert page.value("kvturn_lease_engine_leased_blocks", engine="d1") == 21
    uses = {"active": 10, "retained": 30, "free": 60}
    for use, blocks in uses.items():
        assert page.value("kvturn_lease_engine_kv_blocks", engine="d1", use=use) == blocks, use


async def test_a_lease_whose_release_goes_unheard_counts_once(bench: Watched):
    """The engine lists it again; one that this term sees for the first time, and ends, counts."""
    decode = Decode(bench).up()
    decode.grant(1)
    bench.end_conversation()
    decode.register((1, "c"), (2, "c"), quiet_ns=0, previous_term=bench.lessor.term)
    page = await bench.page()
    assert page.value("kvturn_lease_grants_total") == 1
    assert page.value("kvturn_lease_inherited_total") == 1
    assert page.value(RELEASES, reason="ended") == page.value(RELEASES) == 2


async def test_refusals_and_lost_reads_are_counted_by_why(bench: Watched):
    """A second reader, a reader that never speaks again, a retention over a limit."""
    decode = Decode(bench).up()
    lease_id = decode.grant(1)
    bench.begin(lease_id)
    bench.begin(lease_id)
    decode.grant(2, "b", blocks=10**6)
    bench.wait(READER_BOUND, decode)
    page = await bench.page()
    refused = "kvturn_lease_reads_refused_total"
    assert page.value(refused, verdict="read_in_progress") == page.value(refused) == 1
    assert page.value(READS_ENDED, outcome="overdue") == page.value(READS_ENDED) == 1
    assert page.value(RELEASES, reason="read_failed") == 1
    assert page.value("kvturn_lease_grants_refused_total", reason="BLOCKS_EXHAUSTED") == 1
    bench.end_read(lease_id, ReadOutcome.TOO_LONG)  # too late: it was counted
    assert (await bench.page()).value(READS_ENDED) == 1


async def test_engines_are_counted_by_state_and_sessions_by_their_end(bench: Watched):
    """One drains, one falls silent, one closes its stream, one is replaced by itself."""
    drains, silent, leaves, again = (Decode(bench, name).up() for name in ("a", "b", "c", "d"))
    bench.lessor.drain_engine("a", True, bench.now)
    leaves.drop_stream()
    again.up()
    bench.wait(TTL, drains, again)
    page = await bench.page()
    states = {"session": 1, "draining": 1, "away": 2}
    for state, count in states.items():
        assert page.value(ENGINES, state=state) == count, state
    ends = {"closed": 1, "expired": 1, "fenced": 1, "deposed": 0}
    for reason, count in ends.items():
        name = "kvturn_lease_engine_sessions_ended_total"
        assert page.value(name, reason=reason) == count, reason
    assert page.value("kvturn_lease_engine_registrations_total") == 5
    assert page.value("kvturn_lease_heartbeats_total") > 5
    assert page.labels("kvturn_lease_engine_leases", "engine") == {"a", "d"}
    assert silent.received


async def test_counts_go_on_over_terms_and_what_there_is_ends_with_its_term(bench: Watched):
    """A rate over a failover must not jump; who stands by holds nothing."""
    decode = Decode(bench).up()
    decode.grant(1)
    bench.wait(3 * S, decode)
    page = await bench.page()
    assert page.value("kvturn_lease_leading") == 1
    assert page.value("kvturn_lease_term_age_seconds") == 3
    bench.lessor.depose()
    bench.carry_out()
    bench.servicer._leading = None
    page = await bench.page()
    assert page.value("kvturn_lease_leading") == page.value("kvturn_lease_term_age_seconds") == 0
    assert page.value("kvturn_lease_grants_total") == 1
    assert page.value("kvturn_lease_leases") == page.value(ENGINES) == 0
    bench.lessor = Lessor(bench.lessor.config, 99, tally=bench.servicer.tally)
    bench.lead()
    decode.up((1, "c"))
    page = await bench.page()
    assert page.value("kvturn_lease_terms_total") == 2
    assert page.value("kvturn_lease_inherited_total") == 1
    assert page.value("kvturn_lease_grants_total") == 1
    assert page.value("kvturn_lease_engine_sessions_ended_total", reason="deposed") == 1


async def test_of_too_many_engines_the_rest_are_one():
    """Names of engines are bounded, sums are whole."""
    bench = Watched(LessorConfig(engines_max=1_000))
    bench.lead()
    count = ENGINES_NAMED_MAX + 44
    for number in range(count):
        Decode(bench, f"d{number:03}").up().grant(1, f"c{number}", tokens=10)
    page = await bench.page()
    names = page.labels("kvturn_lease_engine_leases", "engine")
    assert len(names) == ENGINES_NAMED_MAX + 1
    assert page.value("kvturn_lease_engine_leased_tokens", engine=OTHER) == 440
    assert page.value("kvturn_lease_engine_leased_tokens") == 10 * count


async def test_all_families_are_there_from_the_start(bench: Watched):
    """So that rules find them, with a sample wherever a label's values are known."""
    page = await bench.page()
    assert page.families == {family.name: (family.kind, family.about) for family in FAMILIES}
    reasons = page.labels(RELEASES, "reason")
    assert reasons == {reason.name.lower() for reason in ReleaseReason if reason}


# ---- the listener ------------------------------------------------------------------------


async def fetch(port: int, request: bytes) -> tuple[bytes, bytes]:
    """Returns head and body of the answer to a request."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    answer = b""
    async with asyncio.timeout(20):
        with contextlib.suppress(ConnectionResetError):  # closed unread
            answer = await reader.read()
    writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    return head, body


async def test_the_listener_answers_what_it_has_and_refuses_the_rest(bench: Watched):
    """Metrics in both formats, health; other paths, methods and noise get an answer or none."""
    listener = MetricsListener(bench.metrics, "127.0.0.1", 0)
    port = await listener.start()
    try:
        head, body = await fetch(port, b"GET /metrics HTTP/1.1\r\nHost: l\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 OK\r\ncontent-type: text/plain; version=")
        assert b"content-length: %d" % len(body) in head
        assert MetricsPage(body.decode()).value("kvturn_lease_leading") == 1
        accept = b"Accept: application/openmetrics-text; version=1.0.0\r\n\r\n"
        head, body = await fetch(port, b"GET /metrics?x=1 HTTP/1.1\r\n" + accept)
        assert b"application/openmetrics-text" in head
        assert body.endswith(b"# EOF\n")
        for accept in (b"text/plain; version=x", b"application/openmetrics-text; version=1.x"):
            head, _ = await fetch(port, b"GET /metrics HTTP/1.1\r\nAccept: %b\r\n\r\n" % accept)
            assert head.startswith(b"HTTP/1.1 200 OK\r\ncontent-type: text/plain; version=")
        head, body = await fetch(port, b"HEAD /metrics HTTP/1.1\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200")
        assert body == b""
        _, body = await fetch(port, b"GET /health HTTP/1.1\r\n\r\n")
        assert body == b'{"status": "ok", "leading": true}'
        refusals = {b"GET / HTTP/1.1": 404, b"PUT /metrics HTTP/1.1": 405, b"hello": 400}
        for asked, status in refusals.items():
            head, _ = await fetch(port, asked + b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 %d " % status)
        assert await fetch(port, b"x" * 20_000) == (b"", b"")
    finally:
        await listener.stop()


async def test_the_listener_takes_only_so_many_connections(bench: Watched):
    """Who says nothing keeps its place; one more is closed at once, and there is room again."""
    listener = MetricsListener(bench.metrics, "127.0.0.1", 0)
    port = await listener.start()
    silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(CONNECTIONS_MAX)]
    asked = b"GET /health HTTP/1.1\r\n\r\n"
    assert await fetch(port, asked) == (b"", b"")
    silent[0][1].close()

    async def has_room() -> bool:
        return (await fetch(port, asked))[0].startswith(b"HTTP/1.1 200")

    await until(has_room)
    for _, writer in silent:
        writer.close()
    await listener.stop()


async def test_a_port_that_is_taken_is_named(bench: Watched):
    """With the flag that mends it."""
    first = MetricsListener(bench.metrics, "127.0.0.1", 0)
    port = await first.start()
    try:
        with pytest.raises(ListenError, match=f"127.0.0.1:{port}: the port is in use; .*--metrics"):
            await MetricsListener(bench.metrics, "127.0.0.1", port).start()
    finally:
        await first.stop()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--metrics-port=x"], "--metrics-port .* must be 0 to 65535"),
        (["--metrics-port=70000"], "--metrics-port .* must be 0 to 65535"),
        (["--metrics-port=0000801234"], "--metrics-port .* must be 0 to 65535"),
        (["--metrics-host=0.0.0.0"], "--metrics-host needs --metrics-port"),
        (["--metrics-port=7600"], "--metrics-port must differ from --port"),
    ],
)
def test_wrong_settings_are_refused(flags: list[str], words: str):
    """By name, with what would be right."""
    with pytest.raises(ConfigError, match=words):
        parse_config(flags, {})
    assert parse_config([], {}).metrics_port is None
    assert parse_config([], {"KVTURN_LEASE_METRICS_PORT": "0"}).metrics_port == 0


# ---- real processes ----------------------------------------------------------------------


def metrics_port(service: LeaseProcess) -> int:
    """Returns where a service says that its metrics are."""
    found = re.search(r", metrics http://127\.0\.0\.1:(\d+)/metrics\n", service.log.read_text())
    assert found is not None
    return int(found[1])


async def page_of(service: LeaseProcess) -> MetricsPage:
    _, body = await fetch(metrics_port(service), b"GET /metrics HTTP/1.1\r\n\r\n")
    return MetricsPage(body.decode())


async def test_a_failover_shows_who_leads_and_what_etcd_did(tmp_path: Path):
    """The leader is killed: the other leads, has the engine's session, and writes to etcd."""
    async with (
        EtcdServer(tmp_path) as etcd,
        lease_cluster(tmp_path, etcd, "--metrics-port=0", "--leadership=5", *LASTING) as services,
    ):
        leader, other = services
        async with Engine([service.endpoint for service in services]) as engine:
            await engine.until_registered()
            engine.retain(1, "c")
            await lease_of(services, "c")
            page, second = await page_of(leader), await page_of(other)
            assert (page.value("kvturn_lease_leading"), second.value("kvturn_lease_leading")) == (
                1,
                0,
            )
            assert page.value("kvturn_lease_grants_total") == 1
            assert page.value("kvturn_lease_elections_total", outcome="won") == 1
            assert page.value("kvturn_lease_calls_total", answer="ok") > 0
            assert second.value("kvturn_lease_calls_total", answer="NOT_LEADER") > 0
            leader.kill()

            async def leads() -> bool:
                page = await page_of(other)
                return page.value("kvturn_lease_leading") == page.value(ENGINES) == 1

            await until(leads)
            engine.retain(2, "d")

            async def written_down() -> bool:
                page = await page_of(other)
                timed = ("store_write", "leadership_renewal")
                return all(page.value(f"kvturn_lease_{name}_seconds_count") for name in timed)

            await until(written_down)
            page = await page_of(other)
            assert page.value("kvturn_lease_grants_total") == 1
