"""The router's gRPC API: the same turns, with the same fidelity.

Cancellation and deadlines of a call end its turn, and so both legs' connections.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc

from kvturn.v1 import router_pb2, router_pb2_grpc
from kvturn_router.engines.fleet import Fleet
from kvturn_router.errors import ErrorCounts, TurnError, bad_field
from kvturn_router.front import grpc_open
from kvturn_router.front.body_budget import BodyBudget
from kvturn_router.front.gate import Gate
from kvturn_router.front.grpc_answer import GrpcAnswer
from kvturn_router.front.grpc_errors import Context, abort
from kvturn_router.leases.turn_report import duration, held_message, report_message
from kvturn_router.request.conversation import (
    ConversationKey,
    checked_absence_s,
    checked_name,
)
from kvturn_router.request.intake import CHAT, COMPLETIONS, Intake, TurnRequest
from kvturn_router.request.keys import ApiKeys
from kvturn_router.turn.forward import Forwarder

logger = logging.getLogger("kvturn.router.grpc")

_Received = tuple[Message | str, int]
"""A message, or why it is none, and its bytes."""

_SERVICE: Final = "kvturn.v1.RouterService"

_MESSAGE_S: Final = 300.0

_STALL_S: Final = 300.0
"""How long a caller may take nothing of a stream."""

_PATHS: Final = {
    router_pb2.API_UNSPECIFIED: CHAT,
    router_pb2.API_CHAT_COMPLETIONS: CHAT,
    router_pb2.API_COMPLETIONS: COMPLETIONS,
}


class RouterServicer(router_pb2_grpc.RouterServiceServicer):
    """Implements kvturn.v1.RouterService. `body_bytes_max` bounds a request's body.

    Its methods raise TurnError; `GrpcFront` tells the caller.
    """

    def __init__(
        self,
        *,
        intake: Intake,
        forwarder: Forwarder,
        gate: Gate,
        body_bytes_max: int,
    ) -> None:
        self._intake = intake
        self._forwarder = forwarder
        self._gate = gate
        self._body_bytes_max = body_bytes_max

    async def Chat(  # type: ignore[override]
        self, request: router_pb2.ChatRequest, context: Context
    ) -> None:
        """Serves one turn as a stream of the engine's own chunks."""
        turn = self._turn(request, context, stream=True)
        async with self._serving(turn) as answer:
            report = await answer.begun()
            # Apart from the first message, even if there is none: a write that is given up
            # would leave it unclear whether it was sent, and no status could follow.
            await context.send_initial_metadata(answer.metadata(turn.request_id))
            first = report_message(turn.key.conversation_id, report)
            await _write(context, router_pb2.ChatResponse(report=first))
            while (chunk := await answer.next_chunk()) is not None:
                await _write(context, router_pb2.ChatResponse(chunk_json=chunk))

    async def Complete(
        self, request: router_pb2.CompleteRequest, context: Context
    ) -> router_pb2.CompleteResponse:
        """Serves one turn as a whole answer."""
        turn = self._turn(request, context, stream=False)
        async with self._serving(turn) as answer:
            report = await answer.begun()
            body = await answer.whole()
            await _send_metadata(context, turn, answer)
            return router_pb2.CompleteResponse(
                report=report_message(turn.key.conversation_id, report), body_json=body
            )

    async def GetConversation(
        self, request: router_pb2.GetConversationRequest, context: Context
    ) -> router_pb2.GetConversationResponse:
        """Returns what the router knows of a conversation."""
        key = self._key(request.conversation_id, request.model, context)
        async with self._gate.question():
            view = await self._forwarder.conversation(key)
        return router_pb2.GetConversationResponse(
            turns=[report_message(each, report) for each, report in view.turns],
            held=map(held_message, view.held),
        )

    async def EndConversation(
        self,
        request: router_pb2.RouterServiceEndConversationRequest,
        context: Context,
    ) -> router_pb2.RouterServiceEndConversationResponse:
        """Ends a conversation; its KV is freed at once."""
        key = self._key(request.conversation_id, request.model, context)
        async with self._gate.question():
            ended = await self._forwarder.end_conversation(key)
        return router_pb2.RouterServiceEndConversationResponse(leases_ended=ended)

    async def KeepConversationAlive(
        self,
        request: router_pb2.RouterServiceKeepConversationAliveRequest,
        context: Context,
    ) -> router_pb2.RouterServiceKeepConversationAliveResponse:
        """Keeps a conversation's KV for a client that will be back."""
        key = self._key(request.conversation_id, request.model, context)
        absence_s = None
        if request.HasField("absence"):
            absence_s = request.absence.seconds + request.absence.nanos / 1e9
            checked_absence_s("absence", absence_s)
        async with self._gate.question():
            kept_s = await self._forwarder.keep_alive(key, absence_s)
        return router_pb2.RouterServiceKeepConversationAliveResponse(kept=duration(kept_s * 1000))

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
        path = _PATHS.get(request.api)
        if path is None:
            raise bad_field("api", f"api {request.api} is not known.")
        if request.reuse not in ("", "on", "off"):
            raise bad_field("reuse", 'reuse must be "off" or empty.')
        if request.scope and request.conversation_id:
            raise bad_field("scope", "scope and conversation_id exclude each other.")
        headers = _headers(context)
        if request.reuse:
            headers["x-kvturn-reuse"] = request.reuse
        return self._intake.turn(
            path,
            body,
            headers,
            conversation_id=request.conversation_id,
            scope=request.scope,
            stream=stream,
        )

    def _key(self, conversation_id: str, model: str, context: Context) -> ConversationKey:
        return ConversationKey(
            self._intake.tenant(_headers(context)),
            checked_name("model", model),
            checked_name("conversation_id", conversation_id),
        )

    @contextlib.asynccontextmanager
    async def _serving(self, turn: TurnRequest) -> AsyncIterator[GrpcAnswer]:
        """Serves a turn beside the caller, who reads its answer; ends it when the caller leaves."""
        self._gate.enter()
        answer = GrpcAnswer()
        task = asyncio.get_running_loop().create_task(self._serve(turn, answer))
        task.add_done_callback(lambda _: self._gate.leave())
        try:
            yield answer
        finally:
            task.cancel()

    async def _serve(self, turn: TurnRequest, answer: GrpcAnswer) -> None:
        try:
            await self._forwarder.serve(turn, answer)
        except TurnError as error:
            answer.finish(error)
        except Exception:
            logger.exception("a call ended in a fault of the router")
            answer.finish(TurnError(500, "The router failed.", reason="INTERNAL"))
        else:
            answer.finish(None)


class GrpcFront:
    """The gRPC listener, with health and reflection.

    The health service answers for the process under "" and, under the service's
    name, whether a turn can be served. `calls_max` is how many other calls there
    may be at once; gRPC refuses more, or has them wait at their client, unread.
    `message_s` is how long a call's message may take to come whole. `keys` are
    those of which a caller must bring one, None for none: without it a call is
    refused before its message is taken.
    """

    def __init__(
        self,
        servicer: RouterServicer,
        fleet: Fleet,
        bodies: BodyBudget,
        *,
        keys: ApiKeys | None = None,
        calls_max: int,
        message_s: float = _MESSAGE_S,
        body_bytes_max: int,
        head_bytes_max: int,
        shares_port: bool = False,
    ) -> None:
        self._fleet = fleet
        self._bodies = bodies
        self._keys = keys
        self._message_s = message_s
        self.used = False
        """Whether any call was made."""
        self.errors = ErrorCounts()
        """Errors that were answered."""
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]
        calls_max += grpc_open.CALLS_MAX * grpc_open.METHODS_MAX
        self._server = grpc.aio.server(
            maximum_concurrent_rpcs=calls_max,
            options=(
                ("grpc.max_concurrent_streams", calls_max),
                # Calls that wait for the event loop: gRPC would drop some above 1,000, and all
                # after 30 s, as CANCELLED. How long one waits is its deadline's to say.
                ("grpc.server.max_pending_requests", calls_max),
                ("grpc.server.max_pending_requests_hard_limit", calls_max + 1),
                ("grpc.server_max_unrequested_time_in_server", round(_MESSAGE_S)),
                # A message above this is refused by gRPC itself, without ErrorInfo; up to it the
                # servicer says which limit a body is above.
                ("grpc.max_receive_message_length", 2 * body_bytes_max + (1 << 20)),
                ("grpc.max_metadata_size", head_bytes_max),
                ("grpc.absolute_max_metadata_size", head_bytes_max),
                ("grpc.max_send_message_length", -1),
                # Two routers on one port must not share it unnoticed.
                ("grpc.so_reuseport", int(shares_port)),
                # Finds connections whose other end is gone without a word.
                ("grpc.keepalive_time_ms", 20_000),
                ("grpc.keepalive_timeout_ms", 10_000),
                # That of a ping that measures the way, on whose answer a keepalive may wait.
                ("grpc.http2.ping_timeout_ms", 10_000),
                ("grpc.http2.max_pings_without_data", 0),
                # Clients may ping as often as they like: never GOAWAY for it.
                ("grpc.keepalive_permit_without_calls", 1),
                ("grpc.http2.max_ping_strikes", 0),
            ),
        )
        self._server.add_generic_rpc_handlers((self._handlers(servicer),))
        services = grpc_open.OpenServices(self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, services)
        names = (_SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection_pb2_grpc.add_ServerReflectionServicer_to_server(
            reflection.aio.ReflectionServicer(names),  # type: ignore[attr-defined]
            services,
        )

    async def start(
        self, host: str, port: int, credentials: grpc.ServerCredentials | None = None
    ) -> int:
        """Listens, with `credentials` over TLS; returns the port. Raises OSError if it cannot."""
        shown = f"[{host}]" if ":" in host else host
        try:
            if credentials is None:
                bound = self._server.add_insecure_port(f"{shown}:{port}")
            else:
                bound = self._server.add_secure_port(f"{shown}:{port}", credentials)
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

    async def tell_draining(self) -> None:
        """Has the health service say from now on that nothing can be served."""
        await self._health.enter_graceful_shutdown()

    async def stop(self, grace_s: float) -> None:
        """Refuses new calls and lets those under way end within `grace_s` seconds."""
        await self._server.stop(grace_s)

    def _handlers(self, servicer: RouterServicer) -> "grpc.GenericRpcHandler[Any, Any]":
        """Returns the service's methods; a message that cannot be read is a bad body.

        The generated registration would leave that to gRPC, which calls it UNKNOWN.
        """
        handlers = {}
        for method in router_pb2.DESCRIPTOR.services_by_name["RouterService"].methods:
            # A stream of one message is the same on the wire, and how long it takes to come can
            # be bounded.
            make = (
                grpc.stream_stream_rpc_method_handler
                if method.server_streaming
                else grpc.stream_unary_rpc_method_handler
            )
            handlers[method.name] = make(
                self._checked(getattr(servicer, method.name)),
                request_deserializer=_reader(GetMessageClass(method.input_type)),
                response_serializer=GetMessageClass(method.output_type).SerializeToString,
            )
        return grpc.method_handlers_generic_handler(_SERVICE, handlers)

    def _checked(self, method: Callable[[Any, Context], Awaitable[Any]]) -> Callable[..., Any]:
        async def call(requests: object, context: Context) -> Any:
            del requests
            self.used = True
            try:
                if self._keys is not None:  # Before anything of its message is taken.
                    self._keys.name_of(_headers(context))
                request, size = await self._received(context)
                with self._bodies.holding(size):
                    return await method(request, context)
            except TurnError as error:
                self.errors.add(error)
                await abort(context, error)

        return call

    async def _received(self, context: Context) -> tuple[Message, int]:
        """Waits for a call's message; returns it and its bytes. Raises TurnError."""
        try:
            async with asyncio.timeout(self._message_s):
                received: _Received | object = await context.read()
        except TimeoutError:
            raise TurnError(408, "The message did not come whole.", reason="SLOW") from None
        if not isinstance(received, tuple):
            raise TurnError(400, "There is no message.", reason="MESSAGE_INVALID")
        request, size = received
        if isinstance(request, str):
            raise TurnError(400, f"{request}.", reason="MESSAGE_INVALID")
        return request, size


def _reader(kind: type[Message]) -> Callable[[bytes], _Received]:
    def read(data: bytes) -> _Received:
        try:
            return kind.FromString(data), len(data)
        except DecodeError as error:
            return str(error), len(data)

    return read


async def _write(context: Context, response: router_pb2.ChatResponse) -> None:
    """Writes to a stream. Raises TurnError if the caller takes nothing for too long."""
    try:
        async with asyncio.timeout(_STALL_S):
            await context.write(response)
    except TimeoutError:
        raise TurnError(408, "The answer was not taken.", reason="SLOW") from None


async def _send_metadata(context: Context, turn: TurnRequest, answer: GrpcAnswer) -> None:
    metadata = answer.metadata(turn.request_id)
    if metadata:
        await context.send_initial_metadata(metadata)


def _headers(context: Context) -> dict[str, str]:
    headers: dict[str, str] = {}
    for name, value in context.invocation_metadata() or ():
        if isinstance(value, str):
            headers[name] = f"{headers[name]}, {value}" if name in headers else value
    return headers
