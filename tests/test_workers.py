"""Several worker processes on one pair of ports: shared load, deaths, ends, refusals."""

import asyncio
import contextlib
import errno
import json
import os
import re
import signal
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import grpc.aio
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from router_harness import Answer, Client, turn_body
from router_process import Process, process
from stub_engine import CHAT, GUARD_S, Reply, Seen, StubEngine, chunk

from kvturn.v1 import router_pb2, router_pb2_grpc
from kvturn_router.config import ConfigError, parse_config
from kvturn_router.workers import StartFault, Workers

ENGINES = ["--prefill=http://127.0.0.1:1", "--decode=http://127.0.0.1:2"]


class Fleet:
    """A router with workers, and the two engines it serves through."""

    def __init__(self, router: Process, prefill: StubEngine, decode: StubEngine) -> None:
        self.router = router
        self.prefill = prefill
        self.decode = decode

    @property
    def pids(self) -> list[int]:
        """The workers that live now."""
        pid = self.router.process.pid
        return [int(x) for x in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    async def until(self, condition) -> None:
        async with asyncio.timeout(GUARD_S):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    async def turn(self) -> Answer:
        """Has a turn served on a connection of its own."""
        client = await self.router.client()
        await client.send("POST", CHAT, json.dumps(turn_body()).encode())
        answer = await client.answer()
        client.close()
        return answer

    async def serving(self, count: int) -> set[str]:
        """Has turns served until so many workers had one since; returns who they are.

        Each worker has its own prefix of request ids.
        """
        before = len(self.decode.turns)
        async with asyncio.timeout(GUARD_S):
            while len(seen := {worker_of(x) for x in self.decode.turns[before:]}) < count:
                assert (await self.turn()).status == 200
        return seen

    async def all_ready(self, count: int) -> None:
        """Waits until `count` workers can serve turns."""
        ready = 0
        # Connections go where a hash of their ports says: many in a row reach every worker.
        async with asyncio.timeout(GUARD_S):
            while ready < 20 * count:
                client = await self.router.client()
                await client.send("GET", "/ready")
                ready = ready + 1 if (await client.answer()).status == 200 else 0
                client.close()


def worker_of(seen: Seen) -> str:
    return (seen.header("x-request-id") or "").rpartition("-")[0]


async def refusal(stub: router_pb2_grpc.RouterServiceStub) -> grpc.StatusCode:
    """Asks for a conversation without a name until that is not what is told to be wrong.

    A call that crosses the end of its connection on the wire is cancelled, unserved. Rarely it is
    heard by nobody and waits for its deadline: of 150 shutdowns of a server of gRPC alone, in one.
    """
    passing = (
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.DEADLINE_EXCEEDED,
    )
    async with asyncio.timeout(GUARD_S):
        while True:
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await stub.GetConversation(router_pb2.GetConversationRequest(), timeout=5)
            if error.value.code() not in passing:
                return error.value.code()


@contextlib.asynccontextmanager
async def workers(count: int, *flags: str) -> AsyncIterator[Fleet]:
    prefill = await StubEngine("prefill").start()
    decode = await StubEngine("decode").start()
    given = [f"--prefill={prefill.url}", f"--decode={decode.url}", "--health-interval-s=0.05"]
    ports = ["--port=0", "--grpc-port=0"]
    async with process(*given, *ports, f"--workers={count}", *flags) as router:
        fleet = Fleet(router, prefill, decode)
        try:
            await router.until_listening()
            await fleet.all_ready(count)
            yield fleet
        finally:
            with contextlib.suppress(ProcessLookupError):
                router.process.send_signal(signal.SIGTERM)
            await prefill.stop()
            await decode.stop()
            await router.end()


async def test_workers_share_the_load_and_one_that_dies_is_replaced():
    """Three serve on one port; one is killed: the others go on, and soon there are three again."""
    async with workers(3) as fleet:
        first = await fleet.serving(3)
        pids = fleet.pids
        assert len(pids) == 3
        os.kill(pids[0], signal.SIGKILL)
        await fleet.until(lambda: pids[0] not in fleet.pids)
        for _ in range(10):
            assert (await fleet.turn()).status == 200
        await fleet.until(lambda: len(fleet.pids) == 3)
        again = await fleet.serving(3)
        assert len(first & again) == 2
        fleet.router.process.send_signal(signal.SIGTERM)
        code, errors = await fleet.router.end()
        assert code == 0
        (line,) = [line for line in errors.splitlines() if "another takes its place" in line]
        assert f"(pid {pids[0]}) was ended by signal 9" in line


async def test_a_worker_that_no_longer_answers_is_replaced(caplog: pytest.LogCaptureFixture):
    """It is stopped, so it can end neither by itself nor by SIGTERM."""
    stop = asyncio.Event()
    flags = [*ENGINES, "--port=0", "--no-grpc", "--health-timeout-s=0.1"]
    router = Workers(1, flags, 0.1, still_s=1.5)
    running = asyncio.create_task(router.run(stop))

    async def worker(besides: int = 0) -> int:
        async with asyncio.timeout(GUARD_S):
            while not (pids := {one.pid for one in router._running.values()} - {besides}):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        return pids.pop()

    async with asyncio.timeout(GUARD_S):
        while not router._begun:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    stopped = await worker()
    os.kill(stopped, signal.SIGSTOP)
    assert await worker(besides=stopped) != stopped
    assert "worker 1 has not answered for 1.5 s and is killed" in caplog.text
    stop.set()
    assert await running


async def test_grpc_calls_are_shared_too():
    """Each connection of a gRPC client goes to one worker or another."""
    async with workers(2) as fleet:
        target = f"127.0.0.1:{fleet.router.grpc_port}"
        request = router_pb2.CompleteRequest(body_json=json.dumps(turn_body()))
        own = [("grpc.use_local_subchannel_pool", 1)]
        async with asyncio.timeout(GUARD_S):
            while len({worker_of(seen) for seen in fleet.decode.turns}) < 2:
                async with grpc.aio.insecure_channel(target, options=own) as channel:
                    await router_pb2_grpc.RouterServiceStub(channel).Complete(request)


@pytest.mark.parametrize("ends_in_time", [True, False])
@pytest.mark.parametrize("count", [1, 2])
async def test_sigterm_lets_the_turns_of_all_workers_end(count: int, ends_in_time: bool):
    """Three streams over HTTP, three over gRPC: whole within the grace, else ended by an error.

    So does a router that is one process.
    """
    release = asyncio.Event()

    async def play(seen: Seen, reply: Reply) -> None:
        await reply.begin_stream()
        await reply.event(chunk({"content": "The"}))
        await release.wait()
        await reply.end_stream()

    async with workers(count, f"--grace={20 if ends_in_time else 0.2}") as fleet:
        router = fleet.router
        fleet.decode.script(CHAT, play)
        streams: list[Client] = []
        request = router_pb2.ChatRequest(body_json=json.dumps(turn_body()))
        async with grpc.aio.insecure_channel(f"127.0.0.1:{router.grpc_port}") as channel:
            stub = router_pb2_grpc.RouterServiceStub(channel)
            calls = [stub.Chat(request) for _ in range(3)]
            for call in calls:
                assert (await call.read()).report.turn == 1
                assert (await call.read()).chunk_json
            for _ in range(3):
                client = await router.client()
                await client.send("POST", CHAT, json.dumps(turn_body(stream=True)).encode())
                await client.head()
                assert await client.piece() is not None
                streams.append(client)
            router.process.send_signal(signal.SIGTERM)
            assert await refusal(stub) is grpc.StatusCode.UNAVAILABLE
            with contextlib.suppress(ProcessLookupError):  # it may have ended by now
                router.process.send_signal(signal.SIGTERM)
            if ends_in_time:
                release.set()
            for call in calls:
                if ends_in_time:
                    assert await call.read() is grpc.aio.EOF
                    continue
                with pytest.raises(grpc.aio.AioRpcError) as ended:
                    await call.read()
                assert ended.value.code() is grpc.StatusCode.UNAVAILABLE
            for client in streams:
                last = await client.piece()
                assert last is not None
                assert (last == b"data: [DONE]\n\n") is ends_in_time
                assert ends_in_time or json.loads(last.removeprefix(b"data: "))["error"]
        code, errors = await router.end()
        assert (code, "Traceback" in errors) == (0, False)
        named = ["INFO worker 1 ", "INFO worker 2 "] if count == 2 else ["INFO "]
        told = re.findall(r"(INFO.*)kvturn.router: draining: (\d) turns in flight", errors)
        assert sorted(name for name, _ in told) == named
        assert sum(int(turns) for _, turns in told) == 6
    release.set()


async def test_workers_end_when_their_parent_is_gone():
    """The parent is killed: no worker is left behind."""
    async with workers(2) as fleet:
        pids = fleet.pids
        os.kill(fleet.router.process.pid, signal.SIGKILL)
        await fleet.until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))


async def test_no_other_router_can_share_the_ports():
    """Another one is refused as ever, with workers or without, also while no worker listens."""
    async with workers(1 + 1) as fleet:
        port, grpc_port = fleet.router.port, fleet.router.grpc_port
        for more in (["--workers=2"], ["--workers=1"]):
            for ports in (
                [f"--port={port}", "--grpc-port=0"],
                ["--port=0", f"--grpc-port={grpc_port}"],
            ):
                async with process(*ENGINES, *ports, *more) as other:
                    code, errors = await other.end()
                    assert (code, errors.count("\n")) == (1, 1)
                    assert "in use" in errors
        for pid in fleet.pids:
            os.kill(pid, signal.SIGKILL)
        with socket.socket() as taker:
            taker.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with pytest.raises(OSError, match="in use"):
                taker.bind(("127.0.0.1", port))


def test_stock_handles_are_not_shared_between_workers():
    """Each may be used once, and lives in one process's memory: refused by name at start."""
    with pytest.raises(ConfigError, match="--stock-reuse needs --workers 1"):
        parse_config([*ENGINES, "--stock-reuse", "--workers=2"], {})
    assert parse_config([*ENGINES, "--stock-reuse"], {}).workers == 1


async def test_workers_that_cannot_start_end_the_router(capfd: pytest.CaptureFixture[str]):
    """It is not tried for ever: the worker has said why, and its status is the router's."""
    with pytest.raises(StartFault) as fault:
        await Workers(2, ["--port=x"], 1.0).run(asyncio.Event())
    assert fault.value.status == 2
    assert "kvturn router: --port 'x' must be" in capfd.readouterr().err


SLEEPER = ("sh", "-c", "echo listening; exec sleep 60")


def full(*_: object, **__: object) -> None:
    raise BlockingIOError(errno.EAGAIN, "no room for another process")


async def test_a_worker_that_cannot_be_started_again_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """A machine without room for a process, for a time: the other worker serves on meanwhile."""
    stop = asyncio.Event()
    router = Workers(2, [], 0.1)
    router._command = SLEEPER
    start = asyncio.create_subprocess_exec
    running = asyncio.create_task(router.run(stop))

    async def until(condition) -> None:
        async with asyncio.timeout(GUARD_S):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    await until(lambda: router._begun)
    monkeypatch.setattr(asyncio, "create_subprocess_exec", full)
    router._running[0].kill()
    await until(lambda: caplog.text.count("worker 1 cannot be started") == 2)
    assert list(router._running) == [1]
    monkeypatch.setattr(asyncio, "create_subprocess_exec", start)
    await until(lambda: len(router._running) == 2)
    stop.set()
    assert await running


async def test_a_worker_that_cannot_be_started_at_first_ends_the_router(
    monkeypatch: pytest.MonkeyPatch,
):
    """With a line, for no worker could say it."""
    monkeypatch.setattr(asyncio, "create_subprocess_exec", full)
    with pytest.raises(StartFault, match=r"a worker cannot be started: .* no room for") as fault:
        await Workers(1, [], 0.1).run(asyncio.Event())
    assert fault.value.status is None


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """A collector that remembers from which worker each turn's span came."""

    def __init__(self) -> None:
        self.turns: list[bytes] = []

    async def Export(self, request, context):
        del context
        for resource in request.resource_spans:
            for scope in resource.scope_spans:
                self.turns += [span.trace_id for span in scope.spans if span.name == "turn"]
        return trace_service_pb2.ExportTraceServiceResponse()


async def test_spans_of_every_worker_arrive():
    """One span a turn, whichever worker served it."""
    collector = Collector()
    server = grpc.aio.server()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with workers(2, f"--otlp-endpoint=http://127.0.0.1:{port}") as fleet:
        await fleet.serving(2)
        sent = {(seen.header("traceparent") or "").split("-")[1] for seen in fleet.decode.turns}
        await fleet.until(lambda: {trace.hex() for trace in collector.turns} == sent)
    await server.stop(None)
