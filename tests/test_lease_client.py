"""The connector's thread against a real gRPC server that does what a test tells it to."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

import grpc
import pytest
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status
from recorded_spans import Recording

from kvturn.clock import boottime_ns
from kvturn.span_wire import CLIENT
from kvturn.v1 import common_pb2, lease_pb2, lease_pb2_grpc
from kvturn_connector import lease_client, telemetry
from kvturn_connector.config import NS_PER_S, ConnectorConfig
from kvturn_connector.digest import Scope, digest_values
from kvturn_connector.lease_client import LeaseClient, Question
from kvturn_connector.reader import End
from kvturn_connector.retention import Retentions
from kvturn_connector.session import EngineSession

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kvturn_connector.reader import Answer

TIMEOUT_S = 120.0
"""Only a test that fails waits this long."""
SCOPE = Scope(tenant="t", model="m")
TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
PRESSURE = common_pb2.RELEASE_REASON_PRESSURE


T = TypeVar("T")


class Stream:
    """The server's end of one engine session."""

    def __init__(self) -> None:
        self.received: queue.Queue[lease_pb2.EngineSessionRequest] = queue.Queue()
        self.to_send: queue.Queue[lease_pb2.EngineSessionResponse | None] = queue.Queue()
        self.sequence = 0
        self.number = 0

    def next(self, kind: str) -> lease_pb2.EngineSessionRequest:
        """The next message of a kind, passing over heartbeats."""
        while True:
            request = take(self.received)
            if request.WhichOneof("message") == kind:
                return request
            assert request.WhichOneof("message") == "heartbeat"

    def send(self, **message: object) -> None:
        self.sequence += 1
        self.to_send.put(
            lease_pb2.EngineSessionResponse(
                term=7,
                sequence=self.sequence,
                session_number=self.number,
                **message,  # type: ignore[arg-type]
            )
        )

    def registered(self) -> None:
        answer = lease_pb2.Registered()
        answer.session_ttl.FromSeconds(5)
        answer.longest_read.FromSeconds(3)
        answer.heartbeat_interval.FromSeconds(1)
        self.send(registered=answer)

    def end(self) -> None:
        self.to_send.put(None)


class Service(lease_pb2_grpc.LeaseServiceServicer, health_pb2_grpc.HealthServicer):
    """A lease service without a mind of its own.

    On threads, not on an event loop: grpc.aio shares one queue among all event loops of a process,
    and the connector's thread has one already.
    """

    def __init__(self) -> None:
        self.streams: queue.Queue[Stream] = queue.Queue()
        self.questions: queue.Queue[tuple[lease_pb2.BeginReadRequest, dict[str, str]]]
        self.questions = queue.Queue()
        self.ends: queue.Queue[lease_pb2.EndReadRequest] = queue.Queue()
        self.answer: lease_pb2.BeginReadResponse | None = None
        """What BeginRead answers; None: never anything."""
        self.refused: queue.Queue[str] = queue.Queue()
        """Sessions that were refused."""
        self.end_failures = 0
        """How many EndReads fail before one is taken."""
        self.refusal = ""
        """Reason of the ErrorInfo with which everything is refused; empty: it leads."""
        self.leader = ""
        """Whom it names then."""
        self.code = grpc.StatusCode.UNAVAILABLE
        self.port = 0
        self._server: grpc.Server

    def start(self) -> None:
        self._server = grpc.server(ThreadPoolExecutor(8))
        lease_pb2_grpc.add_LeaseServiceServicer_to_server(self, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port(f"127.0.0.1:{self.port}")
        self._server.start()

    def stop(self) -> None:
        self._server.stop(grace=None).wait(TIMEOUT_S)

    def stream(self) -> Stream:
        """The next session's stream."""
        return take(self.streams)

    def session(self) -> tuple[Stream, lease_pb2.RegisterEngine]:
        """The next session, registered; its first heartbeat is still in `received`."""
        stream = self.stream()
        request = stream.next("register")
        stream.number = request.session_number
        stream.registered()
        return stream, request.register

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def Check(
        self, request: health_pb2.HealthCheckRequest, context: grpc.ServicerContext
    ) -> health_pb2.HealthCheckResponse:
        assert request.service == "kvturn.v1.LeaseService"
        states = health_pb2.HealthCheckResponse
        leads = not self.refusal or self.code is not grpc.StatusCode.UNAVAILABLE
        return states(status=states.SERVING if leads else states.NOT_SERVING)

    def _refuse(self, context: grpc.ServicerContext) -> None:
        if self.refusal:
            info = error_details_pb2.ErrorInfo(reason=self.refusal, domain="kvturn.v1")
            info.metadata["leader"] = self.leader
            detail = any_pb2.Any()
            detail.Pack(info)
            rich = status_pb2.Status(code=self.code.value[0], details=[detail])
            context.abort_with_status(rpc_status.to_status(rich))

    def EngineSession(
        self,
        request_iterator: Iterator[lease_pb2.EngineSessionRequest],
        context: grpc.ServicerContext,
    ) -> Iterator[lease_pb2.EngineSessionResponse]:
        if self.refusal:
            next(request_iterator)
            self.refused.put("EngineSession")
        self._refuse(context)
        stream = Stream()
        if not context.add_callback(stream.end):
            stream.end()  # Over already.

        def receive() -> None:
            with contextlib.suppress(grpc.RpcError):
                for request in request_iterator:
                    stream.received.put(request)

        threading.Thread(target=receive, daemon=True).start()
        self.streams.put(stream)
        yield from iter(stream.to_send.get, None)
        self._refuse(context)

    def BeginRead(
        self, request: lease_pb2.BeginReadRequest, context: grpc.ServicerContext
    ) -> lease_pb2.BeginReadResponse:
        over = threading.Event()
        if not context.add_callback(over.set):
            over.set()
        metadata = {str(key): str(value) for key, value in context.invocation_metadata()}
        self.questions.put((request, metadata))
        self._refuse(context)
        if self.answer is None:
            over.wait()
            return lease_pb2.BeginReadResponse()
        return self.answer

    def EndRead(
        self, request: lease_pb2.EndReadRequest, context: grpc.ServicerContext
    ) -> lease_pb2.EndReadResponse:
        self.ends.put(request)
        if self.end_failures:
            self.end_failures -= 1
            context.abort(grpc.StatusCode.UNAVAILABLE, "not now")
        return lease_pb2.EndReadResponse()


class Clock:
    """Real time, and what a test adds to it."""

    def __init__(self) -> None:
        self.ahead_ns = 0

    def __call__(self) -> int:
        return boottime_ns() + self.ahead_ns


def config_for(ports: Sequence[int], deadline_ms: float = 50.0) -> ConnectorConfig:
    return ConnectorConfig.from_extra(
        {
            "kvturn_lease_endpoint": ",".join(f"127.0.0.1:{port}" for port in ports),
            "bidirectional_kv_xfer": True,
            "kvturn_question_deadline_ms": deadline_ms,
        }
    )


def engine_session(
    memory: Callable[[], lease_pb2.KvMemory] = lease_pb2.KvMemory,
) -> EngineSession:
    return EngineSession(
        lease_pb2.EngineDescription(engine_id="engine-0", incarnation="inc"),
        Retentions("inc", 100, 480 * NS_PER_S),
        memory,
    )


def client_threads() -> list[str]:
    names = (thread.name for thread in threading.enumerate())
    return [name for name in names if name.startswith("kvturn")]


@contextlib.contextmanager
def running(
    *ports: int,
    clock: Callable[[], int] = boottime_ns,
    session: EngineSession | None = None,
    deadline_ms: float = 10_000.0,
) -> Iterator[LeaseClient]:
    """A client, shut down at the end; afterwards its thread is gone."""
    config = config_for(ports, deadline_ms)
    client = LeaseClient(config, "engine-0", session or engine_session(), clock)
    try:
        yield client
    finally:
        client.shutdown()
    assert client_threads() == []


@pytest.fixture
def service() -> Iterator[Service]:
    service = Service()
    service.start()
    yield service
    service.stop()


@pytest.fixture
def another() -> Iterator[Service]:
    """A second one."""
    service = Service()
    service.start()
    yield service
    service.stop()


@contextlib.contextmanager
def silent_socket() -> Iterator[int]:
    """A port whose owner is frozen: the kernel accepts connections, nobody answers."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening.getsockname()[1]


def take(items: queue.Queue[T]) -> T:
    return items.get(timeout=TIMEOUT_S)


def until(condition: Callable[[], bool]) -> None:
    """Returns when something that other threads bring about has come true."""
    limit_s = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < limit_s
        time.sleep(0.002)


def question(request_id: str = "r", prompt: list[int] | None = None) -> Question:
    return Question(
        request_id=request_id,
        lease_id="inc.1.1",
        conversation=common_pb2.ConversationKey(tenant="t", model="m", conversation_id="c"),
        prompt_ids=prompt if prompt is not None else list(range(100)),
        scope=SCOPE,
        traceparent=TRACEPARENT,
    )


def answer_to(client: LeaseClient) -> Answer | int:
    answers: list[tuple[Question, Answer | int]] = []
    until(lambda: bool(answers.extend(client.take_answers()) or answers))
    ((_, answer),) = answers
    return answer


def retain(client: LeaseClient, number: int, tokens: list[int] | None = None) -> None:
    tokens = tokens if tokens is not None else list(range(40))
    client.retain(number, common_pb2.Retention(token_count=len(tokens)), tokens, SCOPE, TRACEPARENT)


def freed_numbers(client: LeaseClient, count: int) -> list[int]:
    numbers: list[int] = []

    def enough() -> bool:
        numbers.extend(freed.number for freed in client.take_freed())
        return len(numbers) >= count

    until(enough)
    return numbers


def test_registers_and_heartbeats_at_once(service: Service) -> None:
    """The first session of an engine."""
    with running(service.port) as client:
        stream, register = service.session()
        assert register.engine.engine_id == "engine-0"
        assert len(register.inventory) == 0
        heartbeat = take(stream.received).heartbeat
        assert (heartbeat.echo_term, heartbeat.echo_sequence) == (7, 1)
        until(lambda: client.registered)


def test_without_a_lease_service_retentions_run_out() -> None:
    """Nobody can be told, so nobody is; trying to connect vouches for nothing."""
    clock, engine = Clock(), engine_session()
    with silent_socket() as port, running(port, clock=clock, session=engine) as client:
        retain(client, 1)
        until(lambda: len(engine.retentions) == 1)
        clock.ahead_ns += 30 * NS_PER_S
        assert freed_numbers(client, 1) == [1]
        assert not client.registered


def test_lease_service_that_comes_late_is_found(caplog: pytest.LogCaptureFixture) -> None:
    """Down at start: one line says so; what was retained meanwhile is offered when it is there.

    Number 1: failed attempts to connect opened no session, so they vouched for nothing.
    """
    service = Service()
    service.start()
    service.stop()
    with running(service.port) as client:
        retain(client, 1)
        until(lambda: "no session with the lease service" in caplog.text)
        service.start()
        stream, register = service.session()
        assert stream.number == 1
        assert [one.lease_id for one in register.inventory] == ["inc.1.1"]
        until(lambda: client.registered)
    service.stop()


# --- BeginRead and EndRead -----------------------------------------------------------------------


def granted_response(tokens: list[int], **digests: object) -> lease_pb2.BeginReadResponse:
    response = lease_pb2.BeginReadResponse(
        granted=True,
        retention=common_pb2.Retention(
            token_count=len(tokens),
            digests=common_pb2.TokenDigests(
                stride_tokens=16,
                digest_bytes=16,
                values=digest_values(tokens, SCOPE, b""),
            ),
        ),
        nixl=common_pb2.NixlAddress(nixl_engine_id="decode-0", port=5600),
    )
    response.longest_read.FromSeconds(3)
    for name, value in digests.items():
        setattr(response.retention.digests, name, value)
    return response


def test_question_carries_lease_conversation_and_trace(service: Service) -> None:
    """And who asks; the trace crosses also when the connector makes no spans itself."""
    service.answer = granted_response([])
    with running(service.port) as client:
        client.ask(question())
        request, metadata = take(service.questions)
        assert request == lease_pb2.BeginReadRequest(
            lease_id="inc.1.1",
            conversation=common_pb2.ConversationKey(tenant="t", model="m", conversation_id="c"),
            reader_engine_id="engine-0",
        )
        assert metadata["traceparent"] == TRACEPARENT
        answer_to(client)


def test_grant_is_compared_with_the_prompt(service: Service) -> None:
    """The longest prefix of the prompt that the digests prove."""
    service.answer = granted_response([*range(80), 7, 7, 7])
    with running(service.port) as client:
        client.ask(question(prompt=list(range(100))))
        answer = answer_to(client)
        assert not isinstance(answer, int)
        assert answer.granted
        assert answer.common_tokens == 80
        assert answer.longest_read_ns == 3 * NS_PER_S
        assert answer.retention == service.answer.retention
        assert answer.nixl == service.answer.nixl


def test_refusal_brings_its_verdict(service: Service) -> None:
    """An answer, not an error."""
    service.answer = lease_pb2.BeginReadResponse(verdict=common_pb2.VERDICT_CONSUMED)
    with running(service.port) as client:
        client.ask(question())
        answer = answer_to(client)
        assert not isinstance(answer, int)
        assert (answer.granted, answer.verdict) == (False, common_pb2.VERDICT_CONSUMED)


@pytest.mark.parametrize(
    ("prompt", "digests"),
    [
        (list(range(100)), {"values": b"short"}),
        (list(range(100)), {"stride_tokens": 32}),
        ([-1] * 100, {}),
    ],
)
def test_grant_that_cannot_be_compared_is_still_a_grant(
    service: Service, prompt: list[int], digests: dict[str, object]
) -> None:
    """It proves nothing, but the reader has to give it back, so it must hear of it."""
    service.answer = granted_response(list(range(100)), **digests)
    with running(service.port) as client:
        client.ask(question(prompt=prompt))
        answer = answer_to(client)
        assert not isinstance(answer, int)
        assert (answer.granted, answer.common_tokens) == (True, 0)


# --- retentions ----------------------------------------------------------------------------------


def test_grant_brings_the_digests_of_the_tokens(service: Service) -> None:
    """What another engine's BeginRead will be compared with."""
    with running(service.port) as client:
        stream, _ = service.session()
        retain(client, 1, list(range(40)))
        retention = stream.next("grant").grant.retention
        assert retention.lease_id == "inc.1.1"
        assert (retention.digests.stride_tokens, retention.digests.digest_bytes) == (16, 16)
        assert retention.digests.values == digest_values(list(range(40)), SCOPE, b"")


def test_release_and_refusal_free(service: Service) -> None:
    """The lease service has the say; the scheduler thread hears of it on its next pass."""
    with running(service.port) as client:
        stream, _ = service.session()
        for number in (1, 2, 3):
            retain(client, number)
            stream.next("grant")
        stream.send(release=lease_pb2.Release(lease_id="inc.1.1", reason=PRESSURE))
        stream.send(grant_refused=lease_pb2.GrantRefused(lease_id="inc.3.1"))
        assert freed_numbers(client, 2) == [1, 3]
        assert client.take_freed() == []


def test_notice_frees_and_is_told(service: Service) -> None:
    """All ranks have been told that the blocks were read."""
    with running(service.port) as client:
        stream, _ = service.session()
        retain(client, 1)
        stream.next("grant")
        client.notice("inc.1.1")
        freed = stream.next("freed").freed
        assert (freed.lease_id, freed.reason) == ("inc.1.1", common_pb2.RELEASE_REASON_CONSUMED)
        assert freed_numbers(client, 1) == [1]


def test_retention_that_cannot_be_digested_goes_back(
    service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody would ever release it; the next one is offered as ever."""
    with running(service.port) as client:
        stream, _ = service.session()
        retain(client, 1, [-1])
        retain(client, 2)
        assert stream.next("grant").grant.retention.lease_id == "inc.2.1"
        assert freed_numbers(client, 1) == [1]
        assert "its blocks go back" in caplog.text


class Gate(list[int]):
    """Tokens that cannot be read before they are let."""

    def __init__(self, tokens: list[int]) -> None:
        super().__init__(tokens)
        self.reading = threading.Event()
        self.opened = threading.Event()

    def __getitem__(self, index: Any) -> Any:
        self.reading.set()
        assert self.opened.wait(TIMEOUT_S)
        return super().__getitem__(index)


def test_scheduler_thread_is_never_kept_waiting(service: Service) -> None:
    """Every call returns while the client's thread is stuck in the middle of something."""
    with running(service.port) as client:
        stream, _ = service.session()
        gate = Gate(list(range(40)))
        retain(client, 1, gate)
        assert gate.reading.wait(TIMEOUT_S)
        client.ask(question())
        client.end_read(End(lease_pb2.EndReadRequest(lease_id="x")))
        client.withdraw(1, PRESSURE)
        client.notice("inc.9.9")
        assert (client.take_answers(), client.take_freed()) == ([], [])
        assert client.vouching
        gate.opened.set()
        stream.next("grant")


def test_withdrawals_that_are_waiting_go_out_together(service: Service) -> None:
    """The scheduler thread gives up many at once: one heartbeat names them all."""
    with running(service.port) as client:
        stream, _ = service.session()
        for number in range(1, 51):
            retain(client, number)
            stream.next("grant")
        gate = Gate(list(range(40)))
        retain(client, 51, gate)
        assert gate.reading.wait(TIMEOUT_S)
        for number in range(1, 51):
            client.withdraw(number, PRESSURE)
        gate.opened.set()
        stream.next("grant")
        named: list[list[str]] = [[]]
        while not named[-1]:
            heartbeat = take(stream.received).heartbeat
            named.append([one.lease_id for one in heartbeat.withdrawn])
        assert named[-1] == [f"inc.{number}.1" for number in range(1, 51)]


# --- what goes wrong -----------------------------------------------------------------------------


def test_registers_again_after_a_restart_on_the_same_port(service: Service) -> None:
    """A higher session number, and all that is held under its new names."""
    with running(service.port) as client:
        stream, _ = service.session()
        retain(client, 1)
        stream.next("grant")
        until(lambda: client.registered)
        service.stop()
        until(lambda: not client.registered)
        retain(client, 2)
        service.start()
        stream, register = service.session()
        assert stream.number == 2
        assert [one.lease_id for one in register.inventory] == ["inc.1.2", "inc.2.2"]
        assert register.previous_term == 7
        until(lambda: client.registered)


@pytest.mark.parametrize("broken_by", ["end", "gap", "refusal"])
def test_registers_again_when_a_session_ends(service: Service, broken_by: str) -> None:
    """Ended by the lease service, by a message that got lost, or by an answer without sense."""
    with running(service.port) as client:
        stream = service.stream()
        stream.number = stream.next("register").session_number
        if broken_by == "refusal":
            stream.send(registered=lease_pb2.Registered())
        else:
            stream.registered()
            until(lambda: client.registered)
            stream.sequence += broken_by == "gap"
            stream.send(heartbeat_ack=lease_pb2.HeartbeatAck())
            if broken_by == "end":
                stream.end()
        stream, _ = service.session()
        assert stream.number == 2
        until(lambda: client.registered)


def test_frozen_lease_service_is_left_after_a_ttl(service: Service) -> None:
    """The stream stands, the heartbeats go out, and nothing comes back."""
    clock = Clock()
    with running(service.port, clock=clock) as client:
        service.session()
        until(lambda: client.registered)
        clock.ahead_ns += 5 * NS_PER_S
        stream, _ = service.session()
        assert stream.number == 2


def test_engine_that_was_fenced_frees_what_it_holds(service: Service) -> None:
    """Another process has its name. Each Register would vouch for what nobody will read."""
    clock, engine = Clock(), engine_session()
    service.code, service.refusal = grpc.StatusCode.FAILED_PRECONDITION, "SESSION_FENCED"
    with running(service.port, clock=clock, session=engine) as client:
        retain(client, 1)
        assert take(service.refused) == "EngineSession"
        with pytest.raises(queue.Empty):
            service.refused.get(timeout=1.0)
        clock.ahead_ns += engine.hold_after_vouch_ns
        assert freed_numbers(client, 1) == [1]


def test_session_that_fails_inside_is_followed_by_another(
    service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    """An error of the connector itself costs one session, not reuse for ever."""
    failures = [RuntimeError("planted")]

    def memory() -> lease_pb2.KvMemory:
        if failures:
            raise failures.pop()
        return lease_pb2.KvMemory()

    with running(service.port, session=engine_session(memory)) as client:
        service.session()
        stream, _ = service.session()
        assert stream.number == 2
        until(lambda: client.registered)
        assert "planted" in caplog.text


def test_thread_that_ends_vouches_no_more(
    service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    """Decode frees all by itself, but not before every reader is done."""
    clock, failing = Clock(), threading.Event()

    def memory() -> lease_pb2.KvMemory:
        if failing.is_set():
            raise RuntimeError("planted")
        return lease_pb2.KvMemory()

    engine = engine_session(memory)
    with running(service.port, clock=clock, session=engine) as client:
        stream, _ = service.session()
        retain(client, 1)
        stream.next("grant")
        until(lambda: client.registered)
        failing.set()
        clock.ahead_ns += NS_PER_S
        until(lambda: not client_threads())
        assert "the lease client ended" in caplog.text
        assert not client.registered
        assert client.take_freed() == []
        assert client.vouching
        client.ask(question())
        client.withdraw(1, PRESSURE)
        clock.ahead_ns += engine.hold_after_vouch_ns
        assert not client.vouching


def test_question_that_is_never_answered_ends_at_its_deadline(service: Service) -> None:
    """The reader computes; it does not know whether the lease was granted."""
    with running(service.port, deadline_ms=500) as client:
        client.ask(question())
        assert answer_to(client) == common_pb2.VERDICT_LEASE_SERVICE_UNREACHABLE
        assert service.questions.qsize() == 1


def test_question_without_a_lease_service_fails() -> None:
    """Somebody accepts the connection and never says a word."""
    with silent_socket() as port, running(port, deadline_ms=20) as client:
        client.ask(question())
        assert answer_to(client) == common_pb2.VERDICT_LEASE_SERVICE_UNREACHABLE


def test_end_of_a_read_is_told_until_it_is_heard(service: Service) -> None:
    """A restart of the lease service in between costs a second, not the whole K*R."""
    service.end_failures = 2
    end = lease_pb2.EndReadRequest(lease_id="inc.1.1", outcome=lease_pb2.READ_OUTCOME_COMPLETED)
    with running(service.port) as client:
        client.end_read(End(end, TRACEPARENT, 10**18))
        for _ in range(3):
            assert take(service.ends) == end


@pytest.mark.parametrize("frozen", ["stream", "socket", "nobody"])
def test_shutdown_does_not_wait_for_a_frozen_lease_service(service: Service, frozen: str) -> None:
    """`running` checks that the thread is gone; calls after it are harmless."""
    with silent_socket() as port:
        if frozen == "stream":
            port = service.port
        elif frozen == "nobody":
            service.stop()
            port = service.port
        with running(port) as client:
            client.ask(question())
            client.end_read(End(lease_pb2.EndReadRequest(lease_id="x")))
            if frozen == "stream":
                service.stream()
                take(service.questions)
        client.shutdown()
        client.take_answers()
        client.ask(question())
        retain(client, 1)
        assert client.take_answers() == []
        assert not client.registered


# --- several lease services ----------------------------------------------------------------------


def test_session_and_questions_go_to_the_leader(service: Service, another: Service) -> None:
    """The first stands by: it is asked at most once, and nothing is registered there."""
    service.refusal, service.leader = "NOT_LEADER", another.address
    another.answer = lease_pb2.BeginReadResponse(verdict=common_pb2.VERDICT_CONSUMED)
    with running(service.port, another.port) as client:
        another.session()
        until(lambda: client.registered)
        for _ in range(3):
            client.ask(question())
            answer = answer_to(client)
            assert not isinstance(answer, int)
        assert (service.questions.qsize(), another.questions.qsize()) == (0, 3)
        assert service.streams.empty()


def test_question_is_passed_on_within_its_deadline(service: Service, another: Service) -> None:
    """The leader has just become a standby: the other one answers the same question."""
    another.refusal = "NOT_LEADER"
    another.answer = lease_pb2.BeginReadResponse(verdict=common_pb2.VERDICT_CONSUMED)
    with running(service.port, another.port) as client:
        service.session()
        until(lambda: client.registered)
        service.refusal, another.refusal = "NOT_LEADER", ""
        client.ask(question())
        assert not isinstance(answer_to(client), int)
        assert (service.questions.qsize(), another.questions.qsize()) == (1, 1)


@pytest.mark.parametrize(
    ("refusals", "verdict"),
    [
        (("NOT_LEADER", "NOT_LEADER"), common_pb2.VERDICT_LEASE_SERVICE_UNREACHABLE),
        (("STORE_UNAVAILABLE", "NOT_LEADER"), common_pb2.VERDICT_STORE_UNAVAILABLE),
        (("NOT_LEADER", "STORE_UNAVAILABLE"), common_pb2.VERDICT_STORE_UNAVAILABLE),
        (("SHUTTING_DOWN", "NOT_LEADER"), common_pb2.VERDICT_LEASE_SERVICE_UNREACHABLE),
    ],
)
def test_question_without_a_leader_has_a_verdict(
    service: Service, another: Service, refusals: tuple[str, str], verdict: int
) -> None:
    """Each was asked, once, and none leads."""
    service.refusal, another.refusal = refusals
    service.leader, another.leader = another.address, service.address
    with running(service.port, another.port) as client:
        client.ask(question())
        assert answer_to(client) == verdict
        assert (service.questions.qsize(), another.questions.qsize()) == (1, 1)


def test_while_nobody_leads_what_is_held_runs_out(service: Service) -> None:
    """Standbys that answer are told nothing: a Register would vouch for it, again and again."""
    clock, engine = Clock(), engine_session()
    service.refusal = "STORE_UNAVAILABLE"
    with running(service.port, clock=clock, session=engine) as client:
        retain(client, 1)
        until(lambda: len(engine.retentions) == 1)
        clock.ahead_ns += engine.hold_after_vouch_ns
        assert freed_numbers(client, 1) == [1]
        assert service.refused.empty()
        assert service.streams.empty()
        service.refusal = ""
        service.session()
        until(lambda: client.registered)


def test_session_moves_to_the_leader_that_deposed_its_own(
    service: Service, another: Service
) -> None:
    """Its stream ends with NOT_LEADER: a higher number, and the term it had before."""
    another.refusal = "NOT_LEADER"
    with running(service.port, another.port) as client:
        stream, _ = service.session()
        until(lambda: client.registered)
        retain(client, 1)
        stream.next("grant")
        service.refusal, service.leader, another.refusal = "NOT_LEADER", another.address, ""
        stream.end()
        stream, register = another.session()
        assert (stream.number, register.previous_term) == (2, 7)
        assert [one.lease_id for one in register.inventory] == ["inc.1.2"]
        until(lambda: client.registered)


def test_session_leaves_a_silent_leader_as_soon_as_another_leads(
    service: Service, another: Service
) -> None:
    """Two heartbeats without an answer, long before its trust runs out; then it stays there."""
    clock = Clock()
    another.refusal = "NOT_LEADER"
    with running(service.port, another.port, clock=clock) as client:
        service.session()
        until(lambda: client.registered)
        service.refusal, another.refusal = "NOT_LEADER", ""
        clock.ahead_ns += 2 * NS_PER_S
        stream, _ = another.session()
        assert stream.number == 2
        until(lambda: client.registered)
        assert service.streams.empty()


def test_session_stays_with_a_silent_leader_while_nobody_else_leads(
    service: Service, another: Service
) -> None:
    """It may only be slow; that it is there is asked, and the stream goes on."""
    clock = Clock()
    another.refusal = "NOT_LEADER"
    with running(service.port, another.port, clock=clock) as client:
        stream, _ = service.session()
        until(lambda: client.registered)
        clock.ahead_ns += 2 * NS_PER_S
        for _ in range(2):
            assert take(stream.received).WhichOneof("message") == "heartbeat"
        stream.send(heartbeat_ack=lease_pb2.HeartbeatAck())
        retain(client, 1)
        stream.next("grant")
        assert client.registered
        assert service.streams.empty()
        assert another.streams.empty()


# --- spans ---------------------------------------------------------------------------------------


def test_span_belongs_to_the_turn_and_is_passed_on() -> None:
    """Same trace, a span of its own; what is in no recorded trace starts none."""
    spans = Recording().tracing
    span = spans.span(TRACEPARENT, "begin_read", CLIENT)
    (traceparent,) = (value for key, value in telemetry.metadata_of(span) if key == "traceparent")
    assert traceparent.split("-")[1] == TRACEPARENT.split("-")[1]
    assert traceparent.split("-")[2] != TRACEPARENT.split("-")[2]
    for other in ("", "nonsense"):
        assert telemetry.metadata_of(spans.span(other, "begin_read", CLIENT)) == ()
    unsampled = TRACEPARENT[:-1] + "0"
    passed_on = telemetry.metadata_of(spans.span(unsampled, "begin_read", CLIENT))
    assert passed_on == (("traceparent", unsampled),)
    spans.shutdown()


def test_spans_are_counted_by_what_became_of_them(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each once; a collector that is gone shows, and without one there is nothing to tell."""
    recording = Recording()
    monkeypatch.setattr(lease_client, "make_tracing", lambda *_: recording.tracing)
    with running(service.port) as client:

        def counted() -> list[tuple[str, int]]:
            client.gave_way(TRACEPARENT, {"kvturn.retentions": 1})
            told: list[tuple[str, int]] = []

            def look() -> bool:
                recording.tracing.flush()
                told.extend(client.take_spans())
                return bool(told)

            until(look)
            return told

        assert counted() == [("sent", 1)]
        assert counted() == [("sent", 1)]
        monkeypatch.setattr(recording, "export", lambda _: False)
        assert counted() == [("dropped", 1)]
        assert client.take_spans() == []
    monkeypatch.undo()
    with running(service.port) as client:
        assert client.take_spans() == []
