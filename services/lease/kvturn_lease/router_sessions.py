"""Routers' sessions over gRPC, for one term: messages in, answers and news out."""

from __future__ import annotations

import contextlib
from itertools import islice
from typing import TYPE_CHECKING

from kvturn.span_wire import SERVER
from kvturn.v1 import lease_pb2
from kvturn_lease import wire
from kvturn_lease.errors import ConversationNotFound, InvalidArgument, LeaseServiceError, NotLeader
from kvturn_lease.router_stream import RouterStream
from kvturn_lease.routers import FAMILY_MAX, Begun

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvturn.span_wire import Attribute
    from kvturn.tracing import Span, Tracer
    from kvturn_lease.config import LeaseConfig
    from kvturn_lease.conversation import Conversation, ConversationKey
    from kvturn_lease.conversation_search import ConversationSearch, Wanted
    from kvturn_lease.effects import Announced
    from kvturn_lease.lessor import Lessor
    from kvturn_lease.routers import Routers, RouterSession
    from kvturn_lease.turn_reports import TurnReports

_HELD_MAX = 16
"""Leases of a scope that are listed."""


class RouterSessions:
    """The shell around Routers. Its caller carries out the lessor's effects after each call."""

    def __init__(
        self,
        config: LeaseConfig,
        lessor: Lessor,
        routers: Routers,
        reports: TurnReports,
        tracer: Tracer | None = None,
    ) -> None:
        self._config = config
        self._lessor = lessor
        self._routers = routers
        self._reports = reports
        self._streams: dict[RouterSession, RouterStream] = {}
        self._named: dict[RouterSession, tuple[str, str]] = {}
        """Id and version of each session's router, as it says."""
        self._tracer = tracer
        self._spans: dict[tuple[RouterSession, int], Span] = {}
        """Of recorded turns in flight whose answer waits."""

    def routers(self) -> list[lease_pb2.Router]:
        """Returns the routers that have a session."""
        return [
            lease_pb2.Router(router_id=name, version=version, turns_in_flight=len(session.turns))
            for session, (name, version) in self._named.items()
        ]

    @property
    def count(self) -> int:
        """Sessions that are open."""
        return len(self._streams)

    @property
    def turns_in_flight(self) -> int:
        """Turns in flight of all of them."""
        return sum(len(session.turns) for session in self._streams)

    def open(
        self, request: lease_pb2.RouterSessionRequest, now_ns: int
    ) -> tuple[RouterSession, RouterStream]:
        """Opens the session that a first message asks for, and takes the rest of the message."""
        in_flight = wire.hello(request)
        welcome = lease_pb2.RouterSessionResponse(
            engines=[wire.engine(view) for view in self._lessor.list_engines(now_ns)]
        )
        welcome.welcome.longest_read.CopyFrom(wire.duration(self._lessor.config.longest_read_ns))
        session = self._routers.open(in_flight, now_ns)
        stream = RouterStream(welcome, self._config.queued_messages_max)
        self._streams[session] = stream
        self._named[session] = (request.hello.router_id, request.hello.version)
        try:
            self._take(session, stream, request, now_ns)
        except LeaseServiceError:
            self.close(session, now_ns)
            raise
        return session, stream

    def receive(
        self, session: RouterSession, request: lease_pb2.RouterSessionRequest, now_ns: int
    ) -> None:
        """Takes one more message. Raises InvalidArgument, and NotLeader when the term is over."""
        if request.HasField("hello"):
            raise InvalidArgument("hello", "must only be in the first message")
        self._take(session, self._streams[session], request, now_ns)

    def close(self, session: RouterSession, now_ns: int) -> None:
        """Ends a session; its turns in flight are over."""
        del self._streams[session], self._named[session]
        for turn_id in [turn_id for each, turn_id in self._spans if each is session]:
            del self._spans[session, turn_id]
        with contextlib.suppress(NotLeader):  # then all are over
            self._routers.close(session, now_ns)

    def end_all(self, error: LeaseServiceError) -> None:
        """Ends all streams with `error`."""
        for stream in self._streams.values():
            stream.end(error)

    def engine_changed(self, engine_id: str, now_ns: int) -> None:
        """Tells all routers of an engine that came, changed or is gone."""
        if not self._streams:
            return
        view = self._lessor.get_engine(engine_id, now_ns)
        engine = None if view is None else wire.engine(view)
        for stream in self._streams.values():
            stream.engine(engine_id, engine)

    def announced(self, announced: Announced, now_ns: int) -> None:
        """Takes a retention that an engine announced."""
        self._routers.announced(announced.retention, announced.held, now_ns)

    def next_deadline_ns(self) -> int | None:
        """Returns when to call expire() next, None if nothing is due ever."""
        return self._routers.next_deadline_ns()

    def expire(self, now_ns: int) -> None:
        """Answers turns that have waited long enough."""
        self._routers.expire(now_ns)

    def family(self, key: ConversationKey) -> Iterator[ConversationKey]:
        """Yields a conversation and all under its id or scope, as Routers does."""
        return self._routers.family(key)

    def end_conversation(self, key: ConversationKey, now_ns: int) -> int:
        """Ends a conversation, as Routers does."""
        return self._routers.end_conversation(key, now_ns)

    def keep_alive(self, key: ConversationKey, absence_ns: int | None, now_ns: int) -> int:
        """Keeps a conversation or scope alive, as Routers does."""
        return self._routers.keep_alive(key, absence_ns, now_ns)

    def tell(self) -> None:
        """Hands the core's news to the streams."""
        for session, news in self._routers.drain():
            if self._spans and isinstance(news, Begun):
                span = self._spans.pop((session, news.turn_id), None)
                if span is not None:
                    _end_span(span, news, waited=True)
            stream = self._streams.get(session)
            if stream is not None:
                stream.tell(news)

    def turns(self, key: ConversationKey, now_ns: int) -> lease_pb2.ListTurnsResponse:
        """Returns the latest reports of a conversation or scope. Raises ConversationNotFound."""
        family = list(self._routers.family(key, FAMILY_MAX))
        reports = self._reports.latest(family)
        if not reports and not any(self._lessor.knows(each, now_ns) for each in family):
            raise ConversationNotFound
        held = (self._lessor.held(each, now_ns) for each in family)
        return wire.turns(reports, list(islice(filter(None, held), _HELD_MAX)), now_ns)

    def find_conversations(self, wanted: Wanted, count_max: int, now_ns: int) -> ConversationSearch:
        """Begins a search of conversations, as Lessor does."""
        return self._lessor.find_conversations(wanted, count_max, now_ns)

    def write_conversation(
        self,
        response: lease_pb2.ListConversationsResponse,
        conversation: Conversation,
        now_ns: int,
    ) -> None:
        """Adds a conversation that a search found, with its latest turn."""
        view = self._lessor.view_conversation(conversation, now_ns)
        wire.write_conversation(response, view, self._reports.newest(view.key), now_ns)

    def _take(
        self,
        session: RouterSession,
        stream: RouterStream,
        request: lease_pb2.RouterSessionRequest,
        now_ns: int,
    ) -> None:
        # Ends first: a turn may go on from one that ends in the same message. What is not known
        # yet may begin in it.
        unknown = [end for end in request.end_turns if not self._end(session, end, now_ns)]
        for message in request.begin_turns:
            try:
                told = wire.beginning(message)
            except InvalidArgument:
                stream.tell(Begun(message.turn_id, refused="FIELD_INVALID"))
                continue
            span = None
            if told.span and self._tracer is not None:
                span = self._tracer.under(told.parent, "BeginTurn", SERVER)
            begun = self._routers.begin(session, told, now_ns)
            if begun is not None:
                if span is not None:
                    _end_span(span, begun, waited=False)
                stream.tell(begun)
            elif span is not None:
                self._spans[session, told.turn_id] = span
        for end in unknown:
            self._end(session, end, now_ns)

    def _end(self, session: RouterSession, end: lease_pb2.EndTurn, now_ns: int) -> bool:
        """Counts a turn out; False if it is not in flight."""
        turn = self._routers.end(session, end.turn_id, end.retains, now_ns)
        if turn is None:
            return False
        if self._spans:
            self._spans.pop((session, end.turn_id), None)
        if end.HasField("report"):
            report = wire.turn_report(end.report, turn.number)
            if report:
                self._reports.add(turn.key, report, now_ns)
        return True


def _end_span(span: Span, begun: Begun, *, waited: bool) -> None:
    """Ends the span of a turn that was answered; `waited`: for a grant on its way."""
    told: dict[str, Attribute] = {
        "gen_ai.conversation.id": begun.conversation_id,
        "kvturn.turn": begun.number,
        "kvturn.waited": waited,
    }
    if begun.refused:
        told["kvturn.refused"] = begun.refused
    elif begun.resolution is not None:
        found = begun.resolution
        told["kvturn.lease_id"] = "" if found.lease_id is None else str(found.lease_id)
        told["kvturn.verdict"] = found.verdict.name.lower() if found.verdict else ""
        told["kvturn.decode.engine"] = found.engine_id
        told["kvturn.retained_tokens"] = found.token_count
    span.end(told)
