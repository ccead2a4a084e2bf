"""A typed client of the router's gRPC front, for one event loop.

    async with connect("127.0.0.1:8001") as router:
        async with router.conversation("my-model") as conversation:
            question = {"role": "user", "content": "What is the capital of France?"}
            answer = await conversation.complete(messages=[question], max_tokens=64)
            print(answer.body["choices"][0]["message"]["content"], answer.verdict)
            async for chunk in conversation.chat(messages=[question]):
                print(chunk["choices"][0]["delta"].get("content") or "", end="")

Bodies and answers are OpenAI's own, as JSON values: integers stay integers, and nothing is added or
left out. The messages of a conversation are its caller's: each turn is asked with all of them.

While a conversation is open and no turn of it runs, its KV is kept by heartbeats; when it is left,
however that comes about, it is ended, and the KV is freed at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import grpc
import grpc.aio

from kvturn.lease_channels import error_info
from kvturn.tls import connection_problem
from kvturn.v1 import common_pb2, router_pb2, router_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Sequence
    from types import TracebackType

    from kvturn.v1.router_pb2_grpc import RouterServiceAsyncStub

    _ChatCall = grpc.aio.UnaryStreamCall[router_pb2.ChatRequest, router_pb2.ChatResponse]

logger = logging.getLogger("kvturn.client")

TURN_TIMEOUT_S = 600.0
CALL_TIMEOUT_S = 5.0
"""Longest that any call but a turn takes."""
HEARTBEATS_MAX_S = 600.0
"""How long after a turn heartbeats go on, unless told otherwise."""
_FIRST_HEARTBEAT_S = 0.2
"""A caller that is quicker than this sends no heartbeat. It is far below any idle time."""
_HEARTBEAT_MIN_S = 0.5
_HEARTBEAT_MAX_S = 30.0
_NOTHING_KEPT_S = 5.0
_HEARTBEATS_A_HOLD = 3

_OPTIONS = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    # Finds a router that is gone without a word while a long answer is awaited.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.enable_http_proxy", 0),
)

_digits = re.compile("[0-9]{1,9}")

# Of calls that ended without a word from the router itself.
_STATUSES = {
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.UNAUTHENTICATED: 401,
    grpc.StatusCode.PERMISSION_DENIED: 403,
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 413,
    grpc.StatusCode.UNIMPLEMENTED: 501,
    grpc.StatusCode.CANCELLED: 503,
    grpc.StatusCode.UNAVAILABLE: 503,
    grpc.StatusCode.DEADLINE_EXCEEDED: 504,
}


class RouterError(Exception):
    """A call failed; the message says why in a line."""

    def __init__(
        self,
        message: str,
        *,
        status: int,
        code: grpc.StatusCode,
        reason: str = "",
        field: str | None = None,
        body: str = "",
        retry_after_s: float | None = None,
    ) -> None:
        """`status` is what HTTP would say, 400 to 599, `code` what gRPC said.

        `reason` is the ErrorInfo reason, "" when the router itself said nothing: it could not be
        reached, or did not answer in time. `field` is the field at fault, `body` the error as the
        engine or the router wrote it, cut to 2 KiB, `retry_after_s` when to come again.
        """
        super().__init__(message)
        self.status = status
        self.code = code
        self.reason = reason
        self.field = field
        self.body = body
        self.retry_after_s = retry_after_s


class Answer(NamedTuple):
    """A whole answer: the engine's JSON as a value and as text, and how the turn was served."""

    body: Any
    text: str
    report: common_pb2.TurnReport

    @property
    def verdict(self) -> str:
        """Why KV was reused or not, as in `X-Kvturn-Verdict`."""
        return verdict_name(self.report)


def verdict_name(report: common_pb2.TurnReport) -> str:
    """Returns a report's verdict in the words of HTTP: "first_turn", "reused", ..."""
    return common_pb2.Verdict.Name(report.verdict).removeprefix("VERDICT_").lower()


@contextlib.asynccontextmanager
async def connect(
    target: str,
    *,
    api_key: str | None = None,
    tls: grpc.ChannelCredentials | None = None,
    metadata: Sequence[tuple[str, str]] = (),
) -> AsyncIterator[RouterClient]:
    """Yields a client of the router at `target`, HOST:PORT of its gRPC front.

    `tls` is what `grpc.ssl_channel_credentials` returns, None for none. `metadata` goes with each
    call: a tenant header, an agent's session header. It connects when it is first used.
    """
    sent = list(metadata)
    if api_key is not None:
        sent.append(("authorization", f"Bearer {api_key}"))
    if tls is None:
        channel = grpc.aio.insecure_channel(target, options=_OPTIONS)
    else:
        channel = grpc.aio.secure_channel(target, tls, options=_OPTIONS)
    try:
        yield RouterClient(channel, sent, target=target, tls=tls is not None)
    finally:
        await channel.close(None)


class RouterClient:
    """Calls of one router; `connect` makes it."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        metadata: Sequence[tuple[str, str]] = (),
        *,
        target: str = "",
        tls: bool = False,
    ) -> None:
        """The channel remains its maker's to close.

        `target` and `tls` say where it leads and how, for errors.
        """
        self.stub = cast("RouterServiceAsyncStub", router_pb2_grpc.RouterServiceStub(channel))
        self.metadata = tuple(metadata)
        self._target = target
        self._tls = tls

    def conversation(
        self,
        model: str,
        conversation_id: str = "",
        *,
        scope: str = "",
        reuse: bool = True,
        end: bool = True,
        heartbeats_max_s: float = HEARTBEATS_MAX_S,
        turn_timeout_s: float = TURN_TIMEOUT_S,
    ) -> Conversation:
        """Returns a conversation to be entered with `async with`.

        Without an id the first turn gives it one. `scope` is within what conversations without an
        id are told apart. With `end` false it is left as it is, for somebody to go on with it.
        """
        return Conversation(
            self,
            model,
            conversation_id,
            scope=scope,
            reuse=reuse,
            end=end,
            heartbeats_max_s=heartbeats_max_s,
            turn_timeout_s=turn_timeout_s,
        )

    async def turns(self, model: str, conversation_id: str) -> list[common_pb2.TurnReport]:
        """Returns the latest turns of a conversation, oldest first. Raises RouterError."""
        request = router_pb2.GetConversationRequest(conversation_id=conversation_id, model=model)
        with self.errors():
            answer = await self.stub.GetConversation(
                request, timeout=CALL_TIMEOUT_S, metadata=self.metadata
            )
        return list(answer.turns)

    async def end(self, model: str, conversation_id: str) -> int:
        """Ends a conversation; returns how many leases that ended. Raises RouterError."""
        request = router_pb2.RouterServiceEndConversationRequest(
            conversation_id=conversation_id, model=model
        )
        with self.errors():
            answer = await self.stub.EndConversation(
                request, timeout=CALL_TIMEOUT_S, metadata=self.metadata
            )
        return answer.leases_ended

    async def keep_alive(
        self, model: str, conversation_id: str, absence_s: float | None = None
    ) -> float:
        """Says that the client will be back, within `absence_s` if given.

        Returns for how many seconds KV is kept, 0 if none is held. Raises RouterError.
        """
        request = router_pb2.RouterServiceKeepConversationAliveRequest(
            conversation_id=conversation_id, model=model
        )
        if absence_s is not None:
            request.absence.FromMicroseconds(round(absence_s * 1e6))
        with self.errors():
            answer = await self.stub.KeepConversationAlive(
                request, timeout=CALL_TIMEOUT_S, metadata=self.metadata
            )
        return answer.kept.ToMicroseconds() / 1e6

    @contextlib.contextmanager
    def errors(self) -> Iterator[None]:
        """Turns what gRPC raises into RouterError."""
        try:
            yield
        except grpc.aio.AioRpcError as error:
            raise self._error(error) from None
        except grpc.aio.UsageError:
            # Not gRPC's own: it would take the place of the error that ended the program's work.
            message = "the client was closed before"
            raise RouterError(message, status=499, code=grpc.StatusCode.CANCELLED) from None

    def _error(self, error: grpc.aio.AioRpcError) -> RouterError:
        said = _router_error(error)
        where = f" at {self._target}" if self._target else ""
        if not said.reason and said.code is grpc.StatusCode.UNAVAILABLE:
            why = connection_problem(str(said), ("tls", "tls", "tls"), tls=self._tls)
            said.args = (f"no router answers{where}: {why}",)
        elif not said.reason and said.code is grpc.StatusCode.DEADLINE_EXCEEDED:
            said.args = (f"the router{where} has not answered in time",)
        return said


class Conversation:
    """One conversation; `RouterClient.conversation` makes it."""

    def __init__(
        self,
        client: RouterClient,
        model: str,
        conversation_id: str,
        *,
        scope: str,
        reuse: bool,
        end: bool,
        heartbeats_max_s: float,
        turn_timeout_s: float,
    ) -> None:
        self.model = model
        self.id = conversation_id
        """Its id, "" until a first turn has one."""
        self.report: common_pb2.TurnReport | None = None
        """How the latest turn is served, as far as known."""
        self._client = client
        self._scope = scope
        self._reuse = "" if reuse else "off"
        self._ends = end
        self._heartbeats_max_s = heartbeats_max_s
        self._turn_timeout_s = turn_timeout_s
        self._heartbeats: asyncio.Task[None] | None = None
        self._left = False
        self._ending: asyncio.Task[None] | None = None
        self._running = 0
        self._streams: set[ChatStream] = set()

    async def complete(self, *, timeout_s: float | None = None, **body: Any) -> Answer:
        """Asks for a turn and returns its whole answer. Raises RouterError.

        `body` is OpenAI's, of a chat (`messages`) or of a text (`prompt`); `model` is set here.
        """
        request = router_pb2.CompleteRequest(**self._request(body))
        with self._turn(), self._client.errors():
            answer = await self._client.stub.Complete(
                request,
                timeout=self._turn_timeout_s if timeout_s is None else timeout_s,
                metadata=self._client.metadata,
            )
        self._note(answer.report)
        return Answer(json.loads(answer.body_json), answer.body_json, answer.report)

    def chat(self, *, timeout_s: float | None = None, **body: Any) -> ChatStream:
        """Asks for a turn, as `complete`, and returns the stream of its chunks."""
        request = router_pb2.ChatRequest(**self._request(body))
        with self._client.errors():
            call = self._client.stub.Chat(
                request,
                timeout=self._turn_timeout_s if timeout_s is None else timeout_s,
                metadata=self._client.metadata,
            )
        return ChatStream(self, call)

    async def away(self, absence_s: float) -> float:
        """Says that the next turn comes within `absence_s`; returns how long KV is kept.

        Heartbeats stop for that long, so that the KV is freed soon after if nothing more is heard.
        Returns 0 if none is held. Raises RouterError.
        """
        if not self.id:
            return 0.0
        kept_s = await self._client.keep_alive(self.model, self.id, absence_s)
        self._beat(kept_s)
        return kept_s

    async def __aenter__(self) -> Conversation:
        """Begins it; nothing is sent yet."""
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Stops what is under way and ends the conversation, also when cancelled."""
        self._left = True
        for stream in list(self._streams):
            stream.cancel()
        self._rest()
        if self._ends and self.id:
            self._ending = asyncio.create_task(self._end())
            await asyncio.shield(self._ending)

    # --- turns ------------------------------------------------------------------------------------

    def _request(self, body: dict[str, Any]) -> dict[str, Any]:
        text = "prompt" in body and "messages" not in body
        return {
            "conversation_id": self.id,
            "scope": "" if self.id else self._scope,
            "reuse": self._reuse,
            "api": router_pb2.API_COMPLETIONS if text else router_pb2.API_CHAT_COMPLETIONS,
            "body_json": json.dumps({"model": self.model} | body, ensure_ascii=False),
        }

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        self._begin()
        try:
            yield
        finally:
            self._finish()

    def _begin(self) -> None:
        self._running += 1
        self._rest()

    def _finish(self) -> None:
        self._running -= 1
        if not self._running:
            self._beat(_FIRST_HEARTBEAT_S)

    def _note(self, report: common_pb2.TurnReport) -> None:
        self.report = report
        self.id = self.id or report.conversation_id

    # --- between turns ----------------------------------------------------------------------------

    def _beat(self, first_s: float) -> None:
        """Has heartbeats sent from `first_s` seconds on."""
        self._rest()
        if not self._running and not self._left:
            self._heartbeats = asyncio.create_task(self._keep(first_s))

    def _rest(self) -> None:
        if self._heartbeats is not None:
            self._heartbeats.cancel()
            self._heartbeats = None

    async def _keep(self, pause_s: float) -> None:
        clock = asyncio.get_running_loop().time
        last = clock() + pause_s + self._heartbeats_max_s
        while clock() + pause_s < last:
            await asyncio.sleep(pause_s)
            pause_s = _NOTHING_KEPT_S
            if not self.id:
                continue
            try:
                kept_s = await self._client.keep_alive(self.model, self.id)
            except RouterError as error:
                if error.status == 501:
                    return  # There is nothing that could keep it.
                logger.debug("a heartbeat failed: %s", error)
                continue
            if kept_s > 0:
                pause_s = min(max(kept_s / _HEARTBEATS_A_HOLD, _HEARTBEAT_MIN_S), _HEARTBEAT_MAX_S)

    async def _end(self) -> None:
        try:
            await self._client.end(self.model, self.id)
        except RouterError as error:
            # The KV is freed when it becomes idle.
            logger.debug("conversation %s could not be ended: %s", self.id, error)


class ChatStream:
    """The chunks of a turn, as values: iterate over it, or enter it to leave it early."""

    def __init__(self, conversation: Conversation, call: _ChatCall) -> None:
        self.report: common_pb2.TurnReport | None = None
        """How the turn is served; known once the first chunk is."""
        self._conversation = conversation
        self._call = call
        self._parts = call.__aiter__()
        self._left = False
        self._over = False
        conversation._begin()
        conversation._streams.add(self)
        call.add_done_callback(lambda _: self._finish())

    def __aiter__(self) -> ChatStream:
        """Returns itself: it can be read once."""
        return self

    async def __anext__(self) -> Any:
        """Returns the next chunk. Raises RouterError; the chunks before were the engine's own."""
        while True:
            part = await self._next_part()
            if part is None:
                raise StopAsyncIteration
            if part.HasField("chunk_json"):
                return json.loads(part.chunk_json)
            self.report = part.report
            self._conversation._note(part.report)

    async def _next_part(self) -> router_pb2.ChatResponse | None:
        try:
            with self._conversation._client.errors():
                return await anext(self._parts, None)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not self._left or (task is not None and task.cancelling()):
                raise
            message = "the stream was left before its end"
            raise RouterError(message, status=499, code=grpc.StatusCode.CANCELLED) from None

    async def __aenter__(self) -> ChatStream:
        """Returns itself."""
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Ends the turn if it is not over."""
        self.cancel()

    def cancel(self) -> None:
        """Ends the turn: the engines stop."""
        self._left = True
        self._call.cancel()
        self._finish()

    def _finish(self) -> None:
        if not self._over:
            self._over = True
            self._conversation._streams.discard(self)
            self._conversation._finish()


def _router_error(error: grpc.aio.AioRpcError) -> RouterError:
    code = error.code()
    reason, metadata = error_info(error)
    status = metadata.get("http_status", "")
    retry_after = metadata.get("retry_after", "")
    return RouterError(
        error.details() or code.name,
        status=int(status) if _digits.fullmatch(status) else _STATUSES.get(code, 500),
        code=code,
        reason=reason,
        field=metadata.get("field"),
        body=metadata.get("body", ""),
        retry_after_s=float(retry_after) if _digits.fullmatch(retry_after) else None,
    )
