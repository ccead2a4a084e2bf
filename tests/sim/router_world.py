"""Routers' sessions in a seeded world: the real cores of both ends, and what must hold between.

Routers (session_turns.py) tell a lease service (routers.py, recognition.py and a lessor) of their
turns over streams that are late and break; routers crash, are cut off and come back, the lease
service fails over. One decode engine stands beside it and never fails: its part of the rules is
judged by the other world.

An independent book of who was told of which turn is compared with the cores after every message,
and once all is healed with what routers really have in flight.
"""

from __future__ import annotations

import traceback
from collections import Counter
from dataclasses import dataclass, field, replace
from random import Random

from kvturn.recognition import Recognition, minted_id
from kvturn.v1 import common_pb2, lease_pb2
from kvturn_lease.config import LessorConfig
from kvturn_lease.conversation import ConversationKey
from kvturn_lease.effects import Announced, Release, SendToEngine
from kvturn_lease.lease import LeaseId, Retention
from kvturn_lease.lessor import Lessor
from kvturn_lease.routers import Beginning, Begun, Retained, RouterLimits, Routers, RouterSession
from kvturn_lease.session import EngineInfo, KvMemory, SessionId
from kvturn_lease.verdict import ReleaseReason
from kvturn_router.leases.session_turns import SessionTurn, SessionTurns
from kvturn_router.request.conversation import ConversationKey as AskedKey
from sim.network import Network, Stream
from sim.weather import Weather
from sim.world import MS, Node, S, Violation, World

IDLE_NS = 6 * S
CHAOS_NS = 40 * S
QUESTION_MS = 100
NOTICED_NS = 3 * S
"""Within so long the lease service finds a router that is cut off without a word."""


@dataclass(frozen=True)
class RouterCores:
    """Classes to build a world from: the real ones, or mutants of one."""

    routers: type[Routers] = Routers
    lessor: type[Lessor] = Lessor
    recognition: type[Recognition] = Recognition
    turns: type[SessionTurns] = SessionTurns


@dataclass
class Book:
    """What one session was told of, by plain rules."""

    turns: dict[int, ConversationKey] = field(default_factory=dict)
    unanswered: dict[int, int] = field(default_factory=dict)
    """By turn: when, in true time, it must have been answered."""
    numbers: dict[int, int] = field(default_factory=dict)
    """By turn: its number, as its router has it."""
    retained: set[int] = field(default_factory=set)
    """Turns whose retention it was told of."""


class LeaseNode(Node):
    """The lease service: one term after the other, and one engine beside it."""

    def __init__(self, sim: RouterWorld) -> None:
        super().__init__(sim.world, "lease")
        self.sim = sim
        self.term = 0
        self.held: dict[int, Retention] = {}
        """What the engine retains, by number."""
        self.retained = 0
        self.number = 0
        self._lead()

    # ---- terms ---------------------------------------------------------------------------

    def _lead(self) -> None:
        self.term += 1
        config = LessorConfig(idle_ns=IDLE_NS, max_hold_ns=self.sim.max_hold_ns)
        self.lessor = self.sim.cores.lessor(config, self.term)
        recognition = self.sim.cores.recognition(1_000)
        self.recognition = recognition
        self.routers = self.sim.cores.routers(self.lessor, recognition, RouterLimits())
        self.books: dict[RouterSession, Book] = {}
        self.streams: dict[RouterSession, Stream] = {}
        self.begun: dict[ConversationKey, int] = {}
        """Highest number that was given in this term."""
        self.seen: set[ConversationKey] = set()
        self._register()

    def fail_over(self) -> None:
        """The term ends; another begins, which knows what the engine tells."""
        for stream in self.streams.values():
            stream.close_server(stream.client.on_closed, told=True, flushed=False)
        self.sim.count["failovers"] += 1
        self._lead()

    def _register(self) -> None:
        self.number += 1
        self.sequence = 1
        self.echo = 0
        for number, each in self.held.items():
            lease_id = LeaseId("inc", number, self.number)
            self.held[number] = _with_id(each, lease_id)
        info = EngineInfo("http://d", True, b"about", b"nixl")
        self.lessor.register(
            self.session_id,
            info,
            list(self.held.values()),
            quiet_ns=0 if self.held else None,
            hold_ns=0,
            previous_term=0,
            now_ns=self.clock_ns(),
        )
        self._carry_out()
        self.beat()

    @property
    def session_id(self) -> SessionId:
        """The engine's session."""
        return SessionId("d", "inc", self.number)

    def beat(self) -> None:
        """The engine's heartbeat."""
        self.sequence += 1
        self.lessor.heartbeat(
            self.session_id,
            self.sequence,
            echo_term=self.term,
            echo_sequence=self.echo,
            withdrawn=[],
            memory=KvMemory(100, 60, 30),
            now_ns=self.clock_ns(),
        )
        self._wake()

    def _wake(self) -> None:
        """What is due by now comes before what happens now; nothing in flight is idle."""
        leases = [
            conversation.lease
            for book in self.books.values()
            for key in book.turns.values()
            if (conversation := self.lessor._conversations.get(key)) and conversation.lease
        ]
        self.lessor.expire(self.clock_ns())
        if any(lease.end_reason is ReleaseReason.IDLE for lease in leases):
            raise Violation("idle", "a conversation in flight was given up as idle")
        self.routers.expire(self.clock_ns())
        self._carry_out()

    def retain(self, key: ConversationKey, turn: int, history: bytes) -> None:
        """The engine finished a turn: it retains, and grants."""
        self.retained += 1
        lease_id = LeaseId("inc", self.retained, self.number)
        retention = Retention(lease_id, key, 64, 4, turn, b"payload", history=history)
        self.held[self.retained] = retention
        awaits = {
            (session, turn_id)
            for session, book in self.books.items()
            if self.streams[session].client.stream is self.streams[session]  # else nobody listens
            for turn_id, named in book.turns.items()
            if named == key and turn and session.turns[turn_id].number == turn
            if session.turns[turn_id].points[0] == history  # else another term's turn of its number
            # Nobody can tell it from another term's turn of its number and its history.
            if turn_id not in book.retained
        }
        self.sequence += 1
        self.lessor.grant(self.session_id, self.sequence, retention, self.clock_ns())
        # Where a router came back before its old session was found dead, one of the two will do.
        told = self._carry_out()
        if awaits and not told:
            raise Violation("grant", f"turn {turn} of {key} is in flight and was not told")

    # ---- routers -------------------------------------------------------------------------

    def on_hello(self, stream: Stream, data: bytes, term: int) -> None:
        """A router's first message."""
        if term != self.term:
            stream.close_server(stream.client.on_closed, told=True, flushed=True)
            return
        self._wake()
        request = lease_pb2.RouterSessionRequest.FromString(data)
        in_flight = [_beginning(each) for each in request.hello.turns_in_flight]
        session = self.routers.open(in_flight, self.clock_ns())
        stream.session_id = session
        book = self.books[session] = Book()
        self.streams[session] = stream
        book.turns.update((told.turn_id, told.key) for told in in_flight)
        book.numbers.update(
            (turn.turn_id, turn.number) for turn, _ in stream.client.running.values()
        )
        self.sim.count["turns taken over"] += len(in_flight)
        welcome = lease_pb2.RouterSessionResponse()
        welcome.welcome.longest_read.FromSeconds(3)
        stream.send_down(stream.client.on_response, welcome)
        self._take(session, request)

    def on_message(self, stream: Stream, data: bytes) -> None:
        """A further message."""
        self._wake()
        if stream.session_id in self.books:
            self._take(stream.session_id, lease_pb2.RouterSessionRequest.FromString(data))

    def on_gone(self, stream: Stream) -> None:
        """A router closed its stream, or its connection is found to be gone."""
        stream.server_open = False
        session = stream.session_id
        if session in self.books:
            del self.books[session], self.streams[session]
            self.routers.close(session, self.clock_ns())
            self._carry_out()

    def _take(self, session: RouterSession, request: lease_pb2.RouterSessionRequest) -> None:
        now_ns, book = self.clock_ns(), self.books[session]
        for end in request.end_turns:
            self.routers.end(session, end.turn_id, end.retains, now_ns)
            book.turns.pop(end.turn_id, None)
            book.numbers.pop(end.turn_id, None)
            book.unanswered.pop(end.turn_id, None)
        for message in request.begin_turns:
            told = _beginning(message)
            begun = self.routers.begin(session, told, now_ns)
            book.unanswered[told.turn_id] = self.world.now_ns + told.wait_ns + 2 * S
            turn = session.turns[told.turn_id]
            self._check_number(turn.key, turn.number)
            book.turns[turn.id], book.numbers[turn.id] = turn.key, turn.number
            if begun is not None:
                self._tell(session, begun)
        self._carry_out()

    def _check_number(self, key: ConversationKey, number: int) -> None:
        """A number is above all of its term, of what is retained, and of what is in flight.

        Of turns that another term numbered, above those that were told.
        """
        lease = self.lessor.held(key, self.clock_ns())
        left = [] if lease is None else [lease.lease_id]
        others = [each.turn for each in self.held.values() if each.lease_id in left]
        others += [
            book.numbers.get(turn_id, 0)
            for book in self.books.values()
            for turn_id, named in book.turns.items()
            if named == key
        ]
        others.append(self.begun.get(key, 0))
        if number <= max(others):
            raise Violation("numbers", f"{key}: {number} is not above {max(others)}")
        self.begun[key] = number

    # ---- hands ---------------------------------------------------------------------------

    def _carry_out(self) -> set[tuple[RouterSession, int]]:
        """Does what the cores want; returns the turns whose retention was told."""
        told: set[tuple[RouterSession, int]] = set()
        while effects := self.lessor.drain():
            for effect in effects:
                if isinstance(effect, Announced):
                    self.routers.announced(effect.retention, effect.held, self.clock_ns())
                elif isinstance(effect, SendToEngine) and effect.session == self.session_id:
                    self.echo = effect.sequence
                    if isinstance(effect.message, Release):
                        self._released(effect.message.lease_id.number, effect.message.reason)
        for session, news in self.routers.drain():
            if session not in self.books:
                continue
            if isinstance(news, Retained):
                told.add((session, news.turn_id))
                self.books[session].retained.add(news.turn_id)
            self._tell(session, news)
        self._check()
        return told

    def _released(self, number: int, reason: ReleaseReason) -> None:
        if self.held.pop(number, None) is not None and reason is ReleaseReason.IDLE:
            self.sim.count["idle"] += 1

    def _tell(self, session: RouterSession, news: Begun | Retained) -> None:
        response = lease_pb2.RouterSessionResponse()
        if isinstance(news, Begun):
            if self.books[session].unanswered.pop(news.turn_id, None) is None:
                raise Violation("answers", f"turn {news.turn_id} is answered and was not asked")
            response.turns.add(
                turn_id=news.turn_id,
                conversation_id=news.conversation_id,
                turn=news.number,
                verdict=common_pb2.VERDICT_FIRST_TURN,
            )
        else:
            response.retained.add(turn_id=news.turn_id, token_count=64)
        stream = self.streams[session]
        stream.send_down(stream.client.on_response, response)

    def _check(self) -> None:
        """Compares what the cores count with the book."""
        counts = Counter(key for book in self.books.values() for key in book.turns.values())
        self.seen |= set(counts)
        for key in sorted(self.seen):
            conversation = self.lessor._conversations.get(key)
            counted = 0 if conversation is None else conversation.turns_in_flight
            branch = self.recognition._entries.get(key)
            recognised = 0 if branch is None else branch.in_flight
            if not counted == recognised == counts[key]:
                story = f"{key}: {counts[key]} in flight, counted {counted} and {recognised}"
                raise Violation("counts", story)
        for book in self.books.values():
            late = [turn for turn, due in book.unanswered.items() if due < self.world.now_ns]
            if late:
                raise Violation("answers", f"turns {late} are not answered")


class RouterNode(Node):
    """One router: its session, and the turns of its clients."""

    def __init__(self, sim: RouterWorld, name: str) -> None:
        super().__init__(sim.world, name)
        self.sim = sim
        self.running: dict[int, tuple[SessionTurn, Chat]] = {}
        self._boot()

    def _boot(self) -> None:
        self.turns = self.sim.cores.turns(router_id=self.name, question_deadline_ms=QUESTION_MS)
        self.stream: Stream | None = None
        self.running.clear()
        self._connect()

    def restart(self) -> None:
        """Starts anew, with nothing in flight."""
        super().restart()
        self._boot()

    def crash(self) -> None:
        """Dies with its turns; the lease service hears of it, or finds out."""
        for _, chat in self.running.values():
            chat.busy = False
        self.running.clear()
        if self.stream is not None:
            self.sim.break_stream(self.stream, tell_client=False)
        super().crash()

    # ---- the session ---------------------------------------------------------------------

    def _connect(self) -> None:
        lease = self.sim.lease
        self.stream = Stream(self.sim.network, self, lease)
        self.stream.send_up(lease.on_hello, self.turns.open(), lease.term)

    def on_closed(self, stream: Stream) -> None:
        """The session ended; the next one begins soon."""
        if stream is self.stream:
            self.stream = None
            stream.client_open = False
            self.turns.close()
            self.after(20 * MS + self.sim.span(500 * MS), self._connect)

    def on_response(self, stream: Stream, response: lease_pb2.RouterSessionResponse) -> None:
        """A message of the lease service."""
        self.turns.receive(response, self.clock_ns())

    def flush(self) -> None:
        """Says what has gathered."""
        message = self.turns.take() if self.stream is not None else None
        if message is not None and self.stream is not None:
            self.stream.send_up(self.sim.lease.on_message, message)

    # ---- turns ---------------------------------------------------------------------------

    def serve(self, chat: Chat) -> None:
        """Serves one turn of a chat."""
        recognise = not chat.named
        name = chat.named or minted_id("", f"{self.sim.random.getrandbits(128):032x}")
        turn = self.turns.begin(
            AskedKey("t", "m", name),
            chat.points(),
            self.clock_ns(),
            recognise=recognise,
            reuse=True,
        )
        self.running[turn.turn_id] = (turn, chat)
        turn.on_resolved = lambda: self.after(
            MS + self.sim.span(self.sim.longest_ns()), self._end, turn
        )
        if turn.resolution is not None:
            turn.on_resolved()
        self.after(self.sim.span(5 * MS), self.flush)
        self.after(QUESTION_MS * MS, self._expire)

    def _expire(self) -> None:
        self.turns.expire(self.clock_ns())

    def _end(self, turn: SessionTurn) -> None:
        _, chat = self.running.pop(turn.turn_id)
        retains = self.sim.random.random() < 0.8
        if retains and self.sim.random.random() < 0.9:  # else its grant is lost with the engine
            key = ConversationKey("t", "m", turn.conversation_id)
            at_ns = self.world.now_ns + self.sim.span(60 * MS) - 30 * MS
            own = turn.points[0] if turn.points else b""
            lease = self.sim.lease
            self.world.push(at_ns, lease, lease.retain, key, turn.number, own)
        self.turns.end(turn, retains=retains, report=None)
        self.after(self.sim.span(10 * MS), self.flush)
        chat.answered()


class Chat:
    """A client: asks one router or another, and waits for its answer."""

    def __init__(self, sim: RouterWorld, number: int, named: str) -> None:
        self.sim = sim
        self.named = named
        self.history = [f"system {number % 2}", f"question {number}"]
        self.busy = False

    def points(self) -> list[bytes]:
        """Digests as routers make them: of all of it, before each answer, of its beginning."""
        cuts = [len(self.history), *range(len(self.history) - 2, 1, -2), 1]
        return [
            Random(f"{self.named}|{'|'.join(self.history[:cut])}").randbytes(16)
            for cut in dict.fromkeys(cuts)
        ][:20]

    def answered(self) -> None:
        """Goes on with the history, or asks the same again."""
        self.busy = False
        if self.sim.random.random() < 0.8:
            self.history += ["answer", f"more {self.sim.random.randrange(3)}"]

    def ask(self) -> None:
        """Takes its next turn, if a router is up, and thinks."""
        up = [router for router in self.sim.routers if router.up]
        if not self.busy and up and not self.sim.over:
            self.busy = True
            self.sim.count["turns"] += 1
            self.sim.random.choice(up).serve(self)
        think_ns = 50 * MS + self.sim.span(self.sim.think_ns)
        self.sim.world.push(self.sim.world.now_ns + think_ns, None, self.ask)


class RouterWorld:
    """All of one seed."""

    def __init__(self, seed: int, cores: RouterCores) -> None:
        self.world = World(seed)
        self.random = self.world.random
        self.cores = cores
        self.count: Counter[str] = Counter()
        self.over = False
        self.think_ns = self.random.choice((S // 2, 3 * S, 10 * S))
        self.long_turns = self.random.random() < 0.5
        self.max_hold_ns = self.random.choice((IDLE_NS, 2 * IDLE_NS, 10 * IDLE_NS))
        weather = Weather(delay_ns=self.random.choice((MS, 20 * MS)), spike=0.02, spike_ns=S)
        self.network = Network(self.world, weather)
        self.lease = LeaseNode(self)
        self.routers = [RouterNode(self, f"r{number}") for number in range(3)]
        names = ("", "", "C", "C", "D", "E")
        self.chats = [Chat(self, number, name) for number, name in enumerate(names)]

    def span(self, most_ns: int) -> int:
        """Draws a span of time."""
        return int(self.random.random() * most_ns)

    def longest_ns(self) -> int:
        """Draws the longest that a turn takes: now and then longer than a silence may be."""
        return 3 * IDLE_NS if self.long_turns and self.random.random() < 0.2 else 400 * MS

    def break_stream(self, stream: Stream, *, tell_client: bool = True) -> None:
        """Cuts a stream; each end hears of it some time later."""
        if stream.cut:
            return
        stream.break_off(self.span(20 * MS), self.span(20 * MS))
        if tell_client:
            at_ns = self.world.now_ns + self.span(S)
            self.world.push(at_ns, stream.client, stream.client.on_closed, stream)
        at_ns = self.world.now_ns + self.span(NOTICED_NS)
        self.world.push(at_ns, stream.server, self.lease.on_gone, stream)

    def run(self) -> None:
        """Runs the seed. Raises Violation."""
        for chat in self.chats:
            chat.ask()
        self._beat()
        self.world.push(self.span(4 * S), None, self._fault)
        self.world.run(CHAOS_NS)
        self.network.heal()
        self.over = True
        for router in self.routers:
            if not router.up:
                router.restart()
        # What was cut is found, sessions stand, and turns that are short are over.
        self.world.run(self.world.now_ns + NOTICED_NS + 4 * S)
        self._check_healed()
        self.world.run(self.world.now_ns + 4 * IDLE_NS)
        self._check_healed()
        if any(router.running for router in self.routers) or self.lease.held:
            raise Violation("left", f"{len(self.lease.held)} retentions are held for ever")

    def _beat(self) -> None:
        self.lease.beat()
        self.world.push(self.world.now_ns + 200 * MS, None, self._beat)

    def _fault(self) -> None:
        if self.over:
            return
        router = self.random.choice(self.routers)
        match self.random.choice(("crash", "break", "break", "fail over", "pause")):
            case "crash" if router.up:
                router.crash()
                self.count["crashes"] += 1
                self.world.push(self.world.now_ns + self.span(4 * S), None, self._restart, router)
            case "break" if router.up and router.stream is not None:
                self.count["breaks"] += 1
                self.break_stream(router.stream)
            case "pause" if router.up:
                router.pause(self.span(2 * S))
            case "fail over":
                self.lease.fail_over()
        self.world.push(self.world.now_ns + self.span(4 * S), None, self._fault)

    @staticmethod
    def _restart(router: RouterNode) -> None:
        if not router.up:
            router.restart()

    def _check_healed(self) -> None:
        """The lease service counts exactly what routers have in flight, but for what is under way.

        Raises Violation if that is not so within half a second.
        """
        for _ in range(10):
            told, true = self._told_and_true()
            if told == true:
                self.count["in flight when healed"] += true.total()
                return
            self.world.run(self.world.now_ns + 50 * MS)
        raise Violation("healed", f"in flight {dict(true)}, told {dict(told)}")

    def _told_and_true(self) -> tuple[Counter[ConversationKey], Counter[ConversationKey]]:
        told = Counter(key for book in self.lease.books.values() for key in book.turns.values())
        true = Counter(
            ConversationKey("t", "m", turn.conversation_id)
            for router in self.routers
            for turn, _ in router.running.values()
        )
        return told, true


def run_router_seed(seed: int, cores: RouterCores | None = None) -> tuple[str, Counter[str]]:
    """Runs a seed; returns what went wrong, empty if nothing did, and what happened."""
    sim = RouterWorld(seed, cores or RouterCores())
    try:
        sim.run()
    except Violation as violation:
        return f"seed {seed} at {sim.world.now_ns / S:.6f} s: {violation}", sim.count
    except Exception:  # a core that raises what it should not has failed too
        return f"seed {seed}: {traceback.format_exc(limit=-5)}", sim.count
    return "", sim.count


def _beginning(message: lease_pb2.BeginTurn) -> Beginning:
    key = message.conversation
    return Beginning(
        message.turn_id,
        ConversationKey(key.tenant, key.model, key.conversation_id),
        message.recognise,
        list(message.points),
        message.wait.ToNanoseconds(),
        message.reuse,
        message.turn,
    )


def _with_id(retention: Retention, lease_id: LeaseId) -> Retention:
    return replace(retention, lease_id=lease_id)
