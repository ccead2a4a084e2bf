"""The router's HTTP API: OpenAI's turns and models, conversations, health."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Final
from urllib.parse import parse_qs, unquote

import httptools
import msgspec

from kvturn.address import engine_address
from kvturn_router.engines.engine_http import ConnectFault, EngineFault, Exchange
from kvturn_router.engines.engine_key import EngineKey
from kvturn_router.engines.fleet import DECODE, Engine, Fleet
from kvturn_router.engines.health_watch import ROUTER_MARK
from kvturn_router.errors import TurnError, bad_field, shown
from kvturn_router.front.engines_front import DRAIN, ENGINES, EnginesFront
from kvturn_router.front.gate import Gate
from kvturn_router.front.http_wire import HttpAnswer, HttpRequest
from kvturn_router.front.metrics_front import METRICS, MetricsFront
from kvturn_router.front.overview_front import CONVERSATIONS, SUMMARY, OverviewFront
from kvturn_router.front.settings_front import SETTINGS, SettingsFront
from kvturn_router.front.ui_front import UI, UiFront
from kvturn_router.front.viewers import Viewers
from kvturn_router.request.body import given_number, parse
from kvturn_router.request.conversation import (
    ConversationKey,
    TurnReport,
    checked_absence_s,
    checked_name,
    header_value,
)
from kvturn_router.request.intake import (
    CHAT,
    COMPLETIONS,
    Intake,
    TurnRequest,
    client_request_id,
)
from kvturn_router.request.responses import RESPONSES, ResponseName, no_response, response_name
from kvturn_router.turn.forward import Forwarder
from kvturn_router.turn.legs import engine_error, no_engine, relayed_headers, whole_body

logger = logging.getLogger("kvturn.router.http")

_CONVERSATIONS: Final = f"{CONVERSATIONS}/"
_WITHOUT_KEY: Final = tuple(
    path.encode() for path in ("/health", "/ready", METRICS, ENGINES, SETTINGS, SUMMARY, UI)
)
"""How targets begin that need no key, or an operator's; all others are judged once more."""
_WITHOUT_KEY_BODY_MAX: Final = 1024
"""Bytes of a body there: what nobody vouches for must not take of the budget of all bodies."""
_ROUTES: Final = ", ".join(
    (
        CHAT,
        COMPLETIONS,
        RESPONSES,
        "/v1/models",
        CONVERSATIONS,
        f"{_CONVERSATIONS}{{id}}?model=M",
        f"{_CONVERSATIONS}{{id}}/keepalive?model=M",
        ENGINES,
        DRAIN,
        SETTINGS,
        SUMMARY,
        UI,
        "/health",
        "/ready",
        METRICS,
    )
)
_MODELS_SILENCE_S: Final = 10.0
Work = Callable[[], Coroutine[None, None, None]]

_JSON: Final = ((b"content-type", b"application/json"),)

_TURN_PATHS: Final = {path.encode(): path for path in (CHAT, COMPLETIONS)}


class TurnAnswer:
    """Writes a turn's answer as HTTP, with the report in its headers."""

    def __init__(self, answer: HttpAnswer, request: TurnRequest) -> None:
        self._answer = answer
        self._request = request
        # Called for each read of a stream: without a step in between.
        self.write = answer.write
        self.fail = answer.fail

    def start(
        self,
        report: TurnReport,
        status: int,
        headers: Sequence[tuple[bytes, bytes]],
        length: int | None,
        flow: Exchange | None,
    ) -> None:
        """Begins the answer."""
        lines = report_lines(self._request.key, report)
        if self._request.request_id is not None:
            lines += b"x-request-id: %b\r\n" % self._request.request_id.encode()
        if length is None and b"cache-control" not in dict(headers):
            lines += b"cache-control: no-cache\r\n"
        self._answer.begin(status, headers, length, flow, lines)


def report_lines(key: ConversationKey, report: TurnReport) -> bytes:
    """Returns a turn's report as header lines of an answer. Counts are 0 where not known."""
    saved = b"" if report.saved_ms is None else b"x-kvturn-saved-ms: %.3f\r\n" % report.saved_ms
    return saved + (
        b"x-kvturn-conversation: %b\r\n"
        b"x-kvturn-turn: %d\r\n"
        b"x-kvturn-plan: %b\r\n"
        b"x-kvturn-plan-reason: %b\r\n"
        b"x-kvturn-verdict: %b\r\n"
        b"x-kvturn-prompt-tokens: %d\r\n"
        b"x-kvturn-reused-tokens: %d\r\n"
        b"x-kvturn-local-tokens: %d\r\n"
        b"x-kvturn-prefill-ms: %.3f\r\n"
        b"x-kvturn-read-ms: %.3f\r\n"
        b"x-kvturn-read-bytes: %d\r\n"
    ) % (
        header_value(key.conversation_id),
        report.turn,
        report.plan.encode(),
        report.plan_reason.encode(),
        report.verdict.encode(),
        report.prompt_tokens,
        report.reused_tokens,
        report.local_tokens,
        report.prefill_ms,
        report.read_ms,
        report.read_bytes,
    )


class HttpFront:
    """Serves the routes."""

    def __init__(
        self,
        *,
        intake: Intake,
        forwarder: Forwarder,
        fleet: Fleet,
        engines: EnginesFront,
        metrics: MetricsFront,
        settings: SettingsFront,
        overview: OverviewFront,
        viewers: Viewers,
        gate: Gate,
        engine_key: EngineKey,
    ) -> None:
        self._intake = intake
        self._forwarder = forwarder
        self._fleet = fleet
        self._engines = engines
        self._metrics = metrics
        self._settings = settings
        self._overview = overview
        self._viewers = viewers
        self._ui = UiFront()
        self._gate = gate
        self._engine_key = engine_key
        self._tasks: set[asyncio.Task[None]] = set()

    def admit(self, target: bytes, headers: dict[str, str], length: int | None) -> TurnError | None:
        """Returns what to answer a client without a key at once; None to go on.

        `length` is its body's, None where only the body's end tells it.
        """
        if target.startswith(_WITHOUT_KEY):
            if length is not None and length <= _WITHOUT_KEY_BODY_MAX:
                return None
            return None if self._viewers.is_operator(headers) else _long_without_key()
        try:
            self._intake.tenant(headers)
        except TurnError as refusal:
            # Operators bring no client's key, and see conversations all the same.
            seen = target.startswith(CONVERSATIONS.encode()) and self._viewers.is_operator(headers)
            return None if seen else refusal
        return None

    def serve(self, answer: HttpAnswer, request: HttpRequest) -> None:
        """Begins to serve a request."""
        try:
            self._route(answer, request)
        except TurnError as error:
            answer.refuse(error, _echoed(request))
        except Exception:
            # Whatever it is, a client must not wait for ever for the answer to its request.
            logger.exception("a request could not be served")
            answer.refuse(TurnError(500, "The router failed.", reason="INTERNAL"), _echoed(request))

    def _route(self, answer: HttpAnswer, request: HttpRequest) -> None:
        turn_path = _TURN_PATHS.get(request.target)
        if turn_path is not None and request.method == "POST":
            self._turn(answer, request, turn_path)
            return
        try:
            url = httptools.parse_url(request.target)
            path = (url.path or b"/").decode()
        except (httptools.HttpParserError, UnicodeDecodeError):
            raise TurnError(400, "The path cannot be read.", reason="PATH_INVALID") from None
        query = (url.query or b"").decode("latin-1")
        if path in (CHAT, COMPLETIONS, RESPONSES):
            _allow(request, "POST")
            self._turn(answer, request, path)
        elif path.startswith(f"{RESPONSES}/"):
            self._response(answer, request, path.removeprefix(f"{RESPONSES}/"), query)
        elif path == "/v1/models":
            _allow(request, "GET")
            self._run(answer, lambda: self._models(answer, request))
        elif path == "/health":
            _allow(request, "GET")
            answer.whole(200, (*_JSON, (ROUTER_MARK, b"1")), b'{"status":"ok"}')
        elif path == "/ready":
            _allow(request, "GET")
            self._ready(answer)
        elif path == METRICS:
            _allow(request, "GET")
            self._run(answer, lambda: self._metrics.serve(answer, request))
        elif path in (ENGINES, DRAIN):
            self._engines.serve(answer, request, path, query)
        elif path == SETTINGS:
            _allow(request, "GET")
            self._settings.serve(answer, request)
        elif path == SUMMARY:
            _allow(request, "GET")
            self._run(answer, lambda: self._overview.summary(answer, request))
        elif path == CONVERSATIONS:
            _allow(request, "GET")
            self._run(answer, lambda: self._overview.conversations(answer, request, query))
        elif path == UI or path.startswith(f"{UI}/"):
            _allow(request, "GET")
            self._ui.serve(answer, request, path)
        elif path.startswith(_CONVERSATIONS):
            self._conversation(answer, request, path.removeprefix(_CONVERSATIONS), query)
        else:
            raise TurnError(
                404,
                f"There is no {shown(path)} here, but {_ROUTES}.",
                reason="PATH_UNKNOWN",
            )

    # Turns

    def _turn(self, answer: HttpAnswer, request: HttpRequest, path: str) -> None:
        _require_json(request)
        turn = self._intake.turn(path, request.body, request.headers, memo=request.memo)
        request.body = b""
        self._gate.enter()
        task = answer.loop.create_task(self._serve_turn(answer, turn))
        answer.gone = task.cancel
        task.add_done_callback(self._turn_ended)

    def _turn_ended(self, task: asyncio.Task[None]) -> None:
        del task
        self._gate.leave()

    async def _serve_turn(self, answer: HttpAnswer, turn: TurnRequest) -> None:
        try:
            await self._forwarder.serve(turn, TurnAnswer(answer, turn))
        except TurnError as error:
            headers = [(b"x-kvturn-conversation", header_value(turn.key.conversation_id))]
            if turn.request_id is not None:
                headers.append((b"x-request-id", turn.request_id.encode()))
            answer.refuse(error, headers)
        except Exception:
            _fail(answer)

    # The other routes

    def _run(self, answer: HttpAnswer, work: Work) -> None:
        """Answers a question, if there are not too many and it does not take too long."""

        async def bounded() -> None:
            async with self._gate.question():
                await work()

        task = answer.loop.create_task(self._guarded(answer, bounded))
        answer.gone = task.cancel
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _guarded(self, answer: HttpAnswer, work: Work) -> None:
        try:
            await work()
        except TurnError as error:
            answer.refuse(error)
        except Exception:
            _fail(answer)

    # Responses that an engine keeps

    def _response(self, answer: HttpAnswer, request: HttpRequest, rest: str, query: str) -> None:
        text, _, what = rest.partition("/")
        if what not in ("", "cancel"):
            raise TurnError(
                404, f"There is no {RESPONSES}/{shown(rest)} here.", reason="PATH_UNKNOWN"
            )
        _allow(request, "POST" if what else "GET")
        name = response_name(text, self._intake.tenant(request.headers))
        if name is None:
            raise no_response("response_id", text)
        engine = self._engine_of(name)
        target = f"{RESPONSES}/{rest}" + (f"?{query}" if query else "")
        self._gate.enter()  # It may be a stream as long as a turn's.
        task = answer.loop.create_task(
            self._guarded(answer, lambda: self._ask_for_response(answer, request, engine, target))
        )
        answer.gone = task.cancel
        task.add_done_callback(self._turn_ended)

    def _engine_of(self, name: ResponseName) -> Engine:
        for engine in self._fleet.decodes:
            if name.is_held_by(engine_address(engine.url).place):
                if not engine.usable:
                    raise no_engine(DECODE)
                return engine
        raise no_response("response_id", name.response_id)

    async def _ask_for_response(
        self, answer: HttpAnswer, request: HttpRequest, engine: Engine, target: str
    ) -> None:
        """Passes on what the engine says, which may be a stream of events."""
        authorization = self._authorization_of(request)
        try:
            exchange = await engine.ask(
                request.method.encode(),
                target.encode("latin-1"),
                authorization=authorization,
                silence_s=self._forwarder.limits.decode_silence_s,
            )
        except EngineFault as fault:
            raise self._lost(engine, DECODE, fault) from None
        try:
            length = exchange.header(b"content-length")
            known = int(length) if length.isdigit() else None
            headers = [*relayed_headers(exchange), *_echoed(request)]
            answer.begin(exchange.status, headers, known, exchange)
            exchange.pass_to(answer.write)
            await exchange.finished()
        except EngineFault as fault:
            answer.fail(engine_error(DECODE, fault))
        finally:
            exchange.close()

    def _authorization_of(self, request: HttpRequest) -> bytes | None:
        """Returns what engines get for a request: the router's own key, or else the client's."""
        return self._engine_key.authorization or self._intake.authorization(request.headers)

    # Models and health

    async def _models(self, answer: HttpAnswer, request: HttpRequest) -> None:
        """Passes on what the first engine says that answers."""
        self._intake.tenant(request.headers)
        authorization = self._authorization_of(request)
        lost: TurnError | None = None
        for engine in dict.fromkeys((*self._fleet.decodes, *self._fleet.prefills)):
            if not engine.usable:
                continue
            try:
                exchange = await engine.get(
                    b"/v1/models", authorization=authorization, silence_s=_MODELS_SILENCE_S
                )
                try:
                    body = await whole_body(exchange)
                finally:
                    exchange.close()
            except EngineFault as fault:
                lost = self._lost(engine, engine.role, fault)
                continue
            headers = [*relayed_headers(exchange), *_echoed(request)]
            answer.whole(exchange.status, headers, body)
            return
        raise lost or no_engine(DECODE, self._fleet.lack(DECODE))

    def _lost(self, engine: Engine, role: str, fault: EngineFault) -> TurnError:
        """Returns what a client is told of an engine that gave no answer, and takes note of it."""
        if isinstance(fault, ConnectFault):
            self._fleet.refused(engine, str(fault))
        return engine_error(role, fault)

    def _ready(self, answer: HttpAnswer) -> None:
        reason = "; ".join(map(self._fleet.lack, self._fleet.missing()))
        if self._gate.draining:
            reason = "shutting down"
        body = msgspec.json.encode({"ready": not reason, "reason": reason or None})
        headers = [*_JSON, (b"retry-after", b"1")] if reason else _JSON
        answer.whole(503 if reason else 200, headers, body)

    # Conversations

    def _conversation(
        self, answer: HttpAnswer, request: HttpRequest, rest: str, query: str
    ) -> None:
        keep_alive = rest.endswith("/keepalive")
        seen = request.method in ("GET", "HEAD") and not keep_alive
        key = self._key(request, rest.removesuffix("/keepalive"), query, seen=seen)
        if keep_alive:
            _allow(request, "POST")
            self._run(answer, lambda: self._keep_alive(answer, request, key))
        elif request.method == "DELETE":
            self._run(answer, lambda: self._end(answer, key))
        else:
            _allow(request, "GET", "DELETE")
            self._run(answer, lambda: self._tell(answer, key))

    def _key(self, request: HttpRequest, name: str, query: str, *, seen: bool) -> ConversationKey:
        """Returns the conversation that is meant; `seen` says that it is only looked at."""
        try:
            conversation_id = unquote(name, errors="strict")
            fields = parse_qs(query, keep_blank_values=True, errors="strict")
        except (UnicodeDecodeError, ValueError):
            raise TurnError(400, "The path cannot be read.", reason="PATH_INVALID") from None
        if not fields.get("model"):
            raise bad_field("model", "The query must name the model: ?model=NAME.")
        named = fields.get("tenant", [None])[0]
        if not seen and named is not None:
            raise bad_field("tenant", "tenant can be named only to look at a conversation.")
        return ConversationKey(
            self._viewers.tenant_of_one(request.headers, named)
            if seen
            else self._intake.tenant(request.headers),
            checked_name("model", fields["model"][0]),
            checked_name("conversation_id", conversation_id),
        )

    async def _tell(self, answer: HttpAnswer, key: ConversationKey) -> None:
        view = await self._forwarder.conversation(key)
        body = {
            "conversation_id": key.conversation_id,
            "model": key.model,
            "turns": [
                {"conversation_id": each, **msgspec.structs.asdict(report)}
                for each, report in view.turns
            ],
            "held": view.held,
        }
        answer.whole(200, _JSON, msgspec.json.encode(body))

    async def _end(self, answer: HttpAnswer, key: ConversationKey) -> None:
        ended = await self._forwarder.end_conversation(key)
        answer.whole(200, _JSON, msgspec.json.encode({"leases_ended": ended}))

    async def _keep_alive(
        self, answer: HttpAnswer, request: HttpRequest, key: ConversationKey
    ) -> None:
        members = parse(request.body) if request.body else {}
        for name in members:
            if name != "absence_s":
                raise bad_field(name, "Only `absence_s` can be given.")
        absence_s = given_number(members, "absence_s")
        if absence_s is not None:
            checked_absence_s("absence_s", absence_s)
        kept_s = await self._forwarder.keep_alive(key, absence_s)
        answer.whole(200, _JSON, msgspec.json.encode({"kept_s": kept_s}))


def _allow(request: HttpRequest, *methods: str) -> None:
    if request.method in methods or (request.method == "HEAD" and "GET" in methods):
        return
    raise TurnError(405, f"Use {' or '.join(methods)} here.", reason="METHOD_NOT_ALLOWED")


def _long_without_key() -> TurnError:
    return TurnError(
        413,
        f"Without an operator's key a body here has at most {_WITHOUT_KEY_BODY_MAX} bytes, and "
        "says how many by content-length.",
        reason="BODY_TOO_LARGE",
    )


def _fail(answer: HttpAnswer) -> None:
    logger.exception("a request ended in a fault of the router")
    failure = TurnError(500, "The router failed.", reason="INTERNAL")
    if answer.started:
        answer.fail(failure)
    else:
        answer.refuse(failure)


def _require_json(request: HttpRequest) -> None:
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise TurnError(415, "The body must not be compressed.", reason="MEDIA_TYPE_UNSUPPORTED")
    # As vLLM: it also keeps a web page elsewhere from posting turns unasked.
    media_type = request.headers.get("content-type", "")
    if media_type == "application/json":
        return
    if media_type.split(";")[0].strip().lower() != "application/json":
        raise TurnError(
            415, "The content type must be application/json.", reason="MEDIA_TYPE_UNSUPPORTED"
        )


def _echoed(request: HttpRequest) -> list[tuple[bytes, bytes]]:
    request_id = client_request_id(request.headers)
    return [] if request_id is None else [(b"x-request-id", request_id.encode())]
