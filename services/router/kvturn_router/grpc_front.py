"""The router's gRPC API: the same turns, with the same fidelity.

Cancellation and deadlines of a call end its turn, and so both legs' connections.
"""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncIterator, Sequence
from typing import Any, Final, NoReturn

import grpc
import grpc.aio
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from grpc_status import rpc_status

from kvturn.v1 import common_pb2, router_pb2, router_pb2_grpc
from kvturn_router.conversation import (
    ConversationBook,
    ConversationKey,
    TurnReport,
    checked_absence_s,
    checked_name,
)
from kvturn_router.engine_http import Exchange
from kvturn_router.errors import TurnError, bad_field
from kvturn_router.fleet import Fleet
from kvturn_router.forward import Forwarder
from kvturn_router.gate import Gate
from kvturn_router.intake import CHAT, Intake, TurnRequest
from kvturn_router.lease_client import proto_verdict
from kvturn_router.spans import find_member
from kvturn_router.sse import DONE, EventSplitter, payload

logger = logging.getLogger("kvturn.router.grpc")

Context = grpc.aio.ServicerContext[Any, Any]

ERROR_DOMAIN: Final = "kvturn.v1"
_SERVICE: Final = "kvturn.v1.RouterService"
_BODY_SHOWN_MAX: Final = 4096
_WAITING_MAX: Final = 64

_CODES: Final = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    408: grpc.StatusCode.DEADLINE_EXCEEDED,
    409: grpc.StatusCode.ABORTED,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    415: grpc.StatusCode.INVALID_ARGUMENT,
    422: grpc.StatusCode.INVALID_ARGUMENT,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    499: grpc.StatusCode.CANCELLED,
    501: grpc.StatusCode.UNIMPLEMENTED,
    502: grpc.StatusCode.UNAVAILABLE,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}


def status_code(http_status: int) -> grpc.StatusCode:
    """Returns the gRPC code of an HTTP error status."""
    code = _CODES.get(http_status)
    if code is not None:
        return code
    client = 400 <= http_status < 500
    return grpc.StatusCode.FAILED_PRECONDITION if client else grpc.StatusCode.INTERNAL


async def abort(context: Context, error: TurnError) -> NoReturn:
    """Ends a call with an error's status and ErrorInfo."""
    code = status_code(error.status)
    info = error_details_pb2.ErrorInfo(
        reason=error.reason,
        domain=ERROR_DOMAIN,
        metadata={
            "http_status": str(error.status),
            "body": error.body().decode(errors="replace")[:_BODY_SHOWN_MAX],
        },
    )
    if error.param is not None:
        info.metadata["field"] = error.param
    detail = any_pb2.Any()
    detail.Pack(info)
    number: int = code.value[0]
    rich = rpc_status.to_status(
        status_pb2.Status(code=number, message=error.message, details=[detail])
    )
    await context.abort(code, error.message, rich.trailing_metadata)
    raise AssertionError("abort raises")


class _Parts:
    """A turn's answer on its way to a gRPC stream."""

    def __init__(self) -> None:
        self.report: TurnReport | None = None
        self.status = 0
        self.error: TurnError | None = None
        self.ended = False
        self._events: bool = False
        self._pieces: list[bytes] = []
        self._splitter = EventSplitter()
        self._chunks: deque[str] = deque()
        self._flow: Exchange | None = None
        self._paused = False
        self._ready = asyncio.Event()

    # Called by the forwarder

    def start(
        self,
        report: TurnReport,
        status: int,
        headers: Sequence[tuple[bytes, bytes]],
        length: int | None,
        flow: Exchange | None,
    ) -> None:
        """Begins the answer."""
        del length
        self.report = report
        self.status = status
        self._flow = flow
        self._events = any(
            name == b"content-type" and value.startswith(b"text/event-stream")
            for name, value in headers
        )
        self._ready.set()

    def write(self, data: bytes, last: bool) -> None:
        """Takes more of the body."""
        if self._events:
            try:
                for event in self._splitter.feed(data):
                    self._take(payload(event))
            except (ValueError, UnicodeDecodeError) as fault:
                self.error = TurnError(502, f"The stream cannot be read: {fault}.", reason="STREAM")
        else:
            self._pieces.append(data)
        if last:
            self.ended = True
        if len(self._chunks) > _WAITING_MAX and self._flow is not None and not self._paused:
            self._paused = True
            self._flow.pause()
        self._ready.set()

    def fail(self, error: TurnError) -> None:
        """Ends a begun answer that will not be whole."""
        self.finish(error)

    def _take(self, text: bytes) -> None:
        if not text or text == DONE:
            return
        error = find_member(text, (0, len(text)), "error")
        if error is not None and text[error[0] : error[1]] != b"null":
            self.error = _in_stream_error(text, error)
        else:
            self._chunks.append(text.decode())

    # Called by the servicer

    def finish(self, error: TurnError | None) -> None:
        """Notes that the turn is over; `error` is what ended it early, if anything did."""
        if error is not None:
            self.error = self.error or error
        self.ended = True
        self._ready.set()

    def body(self) -> str:
        """Returns the whole body."""
        return b"".join(self._pieces).decode(errors="replace")

    async def next_chunk(self) -> str | None:
        """Returns the next chunk, None at the end. Raises TurnError."""
        while not self._chunks:
            if self.error is not None:
                raise self.error
            if self.ended:
                return None
            await self._wait()
        chunk = self._chunks.popleft()
        if self._paused and not self._chunks and self._flow is not None:
            self._paused = False
            self._flow.resume()
        return chunk

    async def begun(self) -> TurnReport:
        """Waits for the answer to begin. Raises TurnError."""
        while self.report is None:
            if self.error is not None:
                raise self.error
            await self._wait()
        return self.report

    async def whole(self) -> None:
        """Waits for the end of the answer. Raises TurnError."""
        while not self.ended:
            await self._wait()
        if self.error is not None:
            raise self.error

    async def _wait(self) -> None:
        self._ready.clear()
        await self._ready.wait()


def _in_stream_error(text: bytes, span: tuple[int, int]) -> TurnError:
    code = find_member(text, span, "code")
    digits = text[code[0] : code[1]] if code is not None else b""
    status = int(digits) if digits.isdigit() and 400 <= int(digits) <= 599 else 500
    return _StreamedError(status, text)


class _StreamedError(TurnError):
    """An error that the engine sent as an event of its stream."""

    def __init__(self, status: int, text: bytes) -> None:
        super().__init__(status, "the engine ended its stream with an error", reason="ENGINE_ERROR")
        self._text = text

    def body(self) -> bytes:
        """Returns the event's own text."""
        return self._text


class RouterServicer(router_pb2_grpc.RouterServiceServicer):
    """Implements kvturn.v1.RouterService. `body_bytes_max` bounds a request's body."""

    def __init__(
        self,
        *,
        intake: Intake,
        forwarder: Forwarder,
        book: ConversationBook,
        gate: Gate,
        body_bytes_max: int,
    ) -> None:
        self._intake = intake
        self._forwarder = forwarder
        self._book = book
        self._gate = gate
        self._body_bytes_max = body_bytes_max

    async def Chat(  # type: ignore[override]
        self, request: router_pb2.ChatRequest, context: Context
    ) -> None:
        """Serves one chat turn as a stream of the engine's own chunks."""
        try:
            turn = self._turn(request, context, stream=True)
            async with self._serving(turn) as parts:
                report = await parts.begun()
                await context.write(
                    router_pb2.ChatResponse(report=_report_message(turn.key, report))
                )
                while (chunk := await parts.next_chunk()) is not None:
                    await context.write(router_pb2.ChatResponse(chunk_json=chunk))
        except TurnError as error:
            await abort(context, error)

    async def Complete(
        self, request: router_pb2.CompleteRequest, context: Context
    ) -> router_pb2.CompleteResponse:
        """Serves one chat turn as a whole answer."""
        try:
            turn = self._turn(request, context, stream=False)
            async with self._serving(turn) as parts:
                report = await parts.begun()
                await parts.whole()
                return router_pb2.CompleteResponse(
                    report=_report_message(turn.key, report), body_json=parts.body()
                )
        except TurnError as error:
            await abort(context, error)

    async def GetConversation(
        self, request: router_pb2.GetConversationRequest, context: Context
    ) -> router_pb2.GetConversationResponse:
        """Returns what the router knows of a conversation."""
        try:
            key = self._key(request.conversation_id, request.model, context)
            reports = self._book.reports(key)
            if reports is None:
                raise TurnError(
                    404, "This router knows no such conversation.", reason="CONVERSATION_NOT_FOUND"
                )
        except TurnError as error:
            await abort(context, error)
        return router_pb2.GetConversationResponse(
            turns=[_report_message(key, report) for report in reports]
        )

    async def EndConversation(
        self,
        request: router_pb2.RouterServiceEndConversationRequest,
        context: Context,
    ) -> router_pb2.RouterServiceEndConversationResponse:
        """Ends a conversation; its KV is freed at once."""
        try:
            key = self._key(request.conversation_id, request.model, context)
            ended = await self._forwarder.end_conversation(key)
        except TurnError as error:
            await abort(context, error)
        return router_pb2.RouterServiceEndConversationResponse(leases_ended=ended)

    async def KeepConversationAlive(
        self,
        request: router_pb2.RouterServiceKeepConversationAliveRequest,
        context: Context,
    ) -> router_pb2.RouterServiceKeepConversationAliveResponse:
        """Keeps a conversation's KV for a client that will be back."""
        try:
            key = self._key(request.conversation_id, request.model, context)
            absence_s = None
            if request.HasField("absence"):
                absence_s = request.absence.seconds + request.absence.nanos / 1e9
                checked_absence_s("absence", absence_s)
            kept_s = await self._forwarder.keep_alive(key, absence_s)
        except TurnError as error:
            await abort(context, error)
        return router_pb2.RouterServiceKeepConversationAliveResponse(kept=_duration(kept_s * 1000))

    def _turn(
        self,
        request: router_pb2.ChatRequest | router_pb2.CompleteRequest,
        context: Context,
        *,
        stream: bool,
    ) -> TurnRequest:
        body = request.body_json.encode()
        if len(body) > self._body_bytes_max:
            raise TurnError(
                413,
                f"body_json has more than {self._body_bytes_max} bytes.",
                reason="BODY_TOO_LARGE",
                param="body_json",
            )
        if request.reuse not in ("", "on", "off"):
            raise bad_field("reuse", 'reuse must be "off" or empty.')
        headers = _headers(context)
        if request.reuse:
            headers["x-kvturn-reuse"] = request.reuse
        return self._intake.turn(
            CHAT, body, headers, conversation_id=request.conversation_id, stream=stream
        )

    def _key(self, conversation_id: str, model: str, context: Context) -> ConversationKey:
        return ConversationKey(
            self._intake.tenant(_headers(context)),
            checked_name("model", model),
            checked_name("conversation_id", conversation_id),
        )

    @contextlib.asynccontextmanager
    async def _serving(self, turn: TurnRequest) -> AsyncIterator[_Parts]:
        """Serves a turn beside the caller, who reads its parts; ends it when the caller leaves."""
        self._gate.enter()
        parts = _Parts()
        task = asyncio.get_running_loop().create_task(self._serve(turn, parts))
        task.add_done_callback(lambda _: self._gate.leave())
        try:
            yield parts
        finally:
            task.cancel()

    async def _serve(self, turn: TurnRequest, parts: _Parts) -> None:
        try:
            await self._forwarder.serve(turn, parts)
        except TurnError as error:
            parts.finish(error)
        except Exception:
            logger.exception("a call ended in a fault of the router")
            parts.finish(TurnError(500, "The router failed.", reason="INTERNAL"))
        else:
            parts.finish(None)


class GrpcFront:
    """The gRPC listener, with health and reflection.

    The health service answers for the process under "" and, under the service's
    name, whether a turn can be served.
    """

    def __init__(
        self,
        servicer: RouterServicer,
        fleet: Fleet,
        *,
        body_bytes_max: int,
        shares_port: bool = False,
    ) -> None:
        self._fleet = fleet
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]
        self._server = grpc.aio.server(
            options=(
                ("grpc.max_receive_message_length", body_bytes_max + (1 << 20)),
                ("grpc.max_send_message_length", -1),
                # Two routers on one port must not share it unnoticed.
                ("grpc.so_reuseport", int(shares_port)),
                # Finds connections whose other end is gone without a word.
                ("grpc.keepalive_time_ms", 20_000),
                ("grpc.keepalive_timeout_ms", 10_000),
                # Clients may ping as often as they like: never GOAWAY for it.
                ("grpc.keepalive_permit_without_calls", 1),
                ("grpc.http2.max_ping_strikes", 0),
            )
        )
        router_pb2_grpc.add_RouterServiceServicer_to_server(servicer, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = (_SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)

    async def start(self, host: str, port: int) -> int:
        """Listens; returns the port. Raises OSError if it cannot."""
        shown = f"[{host}]" if ":" in host else host
        try:
            bound = self._server.add_insecure_port(f"{shown}:{port}")
        except RuntimeError as error:
            raise OSError(str(error)) from None
        if not bound:
            raise OSError(f"cannot listen on {shown}:{port}")
        await self._server.start()
        await self._health.set("", health_pb2.HealthCheckResponse.SERVING)
        await self.tell_health()
        return bound

    async def tell_health(self) -> None:
        """Has the health service say whether a turn can be served now."""
        state = health_pb2.HealthCheckResponse
        serving = state.NOT_SERVING if self._fleet.missing() else state.SERVING
        await self._health.set(_SERVICE, serving)

    async def stop(self, grace_s: float) -> None:
        """Refuses new calls and lets those under way end within `grace_s` seconds."""
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace_s)


def _headers(context: Context) -> dict[str, str]:
    return {
        name: value for name, value in context.invocation_metadata() or () if isinstance(value, str)
    }


def _report_message(key: ConversationKey, report: TurnReport) -> common_pb2.TurnReport:
    return common_pb2.TurnReport(
        conversation_id=key.conversation_id,
        turn=report.turn,
        verdict=proto_verdict(report.verdict),
        prompt_tokens=report.prompt_tokens,
        reused_tokens=report.reused_tokens,
        local_tokens=report.local_tokens,
        prefill_time=_duration(report.prefill_ms),
        read_time=_duration(report.read_ms),
        read_bytes=report.read_bytes,
    )


def _duration(milliseconds: float) -> duration_pb2.Duration:
    duration = duration_pb2.Duration()
    duration.FromMicroseconds(round(milliseconds * 1000))
    return duration
