"""A lease service: the lessor of each of its terms, and what its shell does around it."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from kvturn_lease import wire
from kvturn_lease.config import LessorConfig
from kvturn_lease.effects import EndSession, Record, Release, SendToEngine
from kvturn_lease.errors import LeaseServiceError, NotLeader, SessionExpired, SessionFenced
from kvturn_lease.leadership import Leadership
from kvturn_lease.store import Snapshot
from sim.world import MS, Node, S

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvturn.v1 import lease_pb2
    from kvturn_lease.conversation import ConversationKey
    from kvturn_lease.lessor import Lessor, Resolution
    from kvturn_lease.session import SessionId
    from kvturn_lease.store import Change
    from sim.network import Stream
    from sim.simulation import Simulation

T = TypeVar("T")

RETRY_NS = 200 * MS
"""Pause before etcd is asked again that has not answered."""


class LeaseService(Node):
    """One process; leads while etcd says so, or always where there is only one."""

    def __init__(self, sim: Simulation, name: str, drift_ppm: int, offset_ns: int) -> None:
        super().__init__(sim.world, name, drift_ppm, offset_ns)
        self.sim = sim
        self.lateness_ns = sim.weather.lateness_ns
        self.lessor: Lessor | None = None
        self._attempt = 0
        """Counts its candidatures, over all starts."""
        self._boot()

    def _configure(self) -> LessorConfig:
        weather = self.sim.weather
        longest_read_ns = weather.longest_read_ns
        if weather.shorter_read_ns and self.sim.mishap(0.5):
            longest_read_ns = weather.shorter_read_ns
        return LessorConfig(
            session_ttl_ns=weather.ttl_ns,
            heartbeat_ns=weather.heartbeat_ns,
            longest_read_ns=longest_read_ns,
            question_deadline_ns=weather.question_ns,
            idle_ns=weather.idle_ns,
            max_hold_ns=weather.max_hold_ns,
            policy=weather.policy,
            fixed_ttl_ns=weather.max_hold_ns // 2,
            leases_per_engine_max=weather.leases_per_engine,
            expiries_per_tick_max=weather.expiries_per_tick,
            conversations_max=weather.conversations_known,
        )

    # ---- the process ---------------------------------------------------------------------

    def _boot(self) -> None:
        self.config = self._configure()
        self.lessor = None
        self._leadership = Leadership()
        self._term_attempt = 0
        self.leader = ""
        self._streams: dict[SessionId, Stream] = {}
        self._timer_ns: int | None = None
        self._unwritten: list[Change] = []
        if self.sim.etcd is None:
            self._lead(Snapshot(), None)
        else:
            self.after(
                int(self.world.random.random() * self.sim.weather.leader_ttl_ns), self._campaign
            )

    def crash(self) -> None:
        """Ends the process; engines hear that their streams broke, or do not."""
        for stream in self._streams.values():
            stream.server_open = False
            self.sim.break_stream(stream, tell_server=False)
        super().crash()
        self.lessor = None

    def crash_silently(self) -> None:
        """Ends the process; nobody hears of it."""
        super().crash()
        self.lessor = None

    def restart(self) -> None:
        """Starts the process anew."""
        super().restart()
        self._boot()

    # ---- leadership ----------------------------------------------------------------------

    @property
    def leads(self) -> bool:
        """True if it has a lessor that has not noticed the end of its term."""
        return self.lessor is not None and not self.lessor.deposed

    def resign(self) -> None:
        """Gives up leadership on an operator's word."""
        self.depose()
        etcd = self.sim.etcd
        if etcd is not None:
            self.sim.network.send(self, etcd, etcd.resign, self.name, self._term_attempt)

    def depose(self) -> None:
        """Ends the term, for whatever reason."""
        if self.lessor is not None:
            self.lessor.depose()
            self._carry_out()

    def _campaign(self) -> None:
        """Asks etcd to lead, or to lead on."""
        etcd = self.sim.etcd
        assert etcd is not None
        asked_ns = self.clock_ns()
        next_ns = asked_ns + self.sim.weather.leader_ttl_ns // 3
        if self.leads:
            attempt = self._term_attempt
            next_ns = max(self._leadership.renew_ns, asked_ns + RETRY_NS)
        else:
            attempt = self._attempt = self._attempt + 1
        self.sim.network.ask(
            self,
            etcd,
            lambda: etcd.campaign(self.name, attempt),
            lambda answer: self._on_campaign(asked_ns, attempt, answer),
        )
        self.at_clock(next_ns, self._campaign)

    def _on_campaign(
        self, asked_ns: int, attempt: int, answer: tuple[bool, str, Snapshot | None]
    ) -> None:
        elected, self.leader, snapshot = answer
        same_term = self.leads and self._term_attempt == attempt
        ttl_s = self.sim.weather.leader_ttl_ns // S
        if not elected:
            if same_term:
                self.depose()
        elif same_term and snapshot is not None:
            self.resign()  # its key was lost in between: another may have led
        elif same_term and self.lessor is not None:
            self._leadership.acknowledge(asked_ns, ttl_s)
            self.lessor.lead_until(self._leadership.until_ns)
        elif snapshot is not None and not self.leads:
            term = Leadership()
            term.acknowledge(asked_ns, ttl_s)
            if term.leads(self.clock_ns()):
                self._leadership = term
                self._term_attempt = attempt
                self._lead(snapshot, term.until_ns)

    def _lead(self, snapshot: Snapshot, lead_until_ns: int | None) -> None:
        sim = self.sim
        others = [each for each in sim.services if each is not self and each.up and each.leads]
        if others:
            sim.checkers.count["split leaders"] += 1
        sim.terms += 1
        if sim.terms > 1:
            sim.checkers.count["failovers"] += 1
        term = self.world.random.getrandbits(63) + 1
        self.lessor = sim.cores.lessor(self.config, term, lead_until_ns)
        self.lessor.restore(snapshot, self.clock_ns())
        self._timer_ns = None
        self.world.note(self.name, "leads, term %d", sim.terms)
        self._carry_out()

    # ---- engine sessions -----------------------------------------------------------------

    def on_request(self, stream: Stream, request: lease_pb2.EngineSessionRequest) -> None:
        """One message of an engine's stream arrives."""
        lessor = self.lessor
        if lessor is None:
            self._end_stream(stream, NotLeader(self.leader))
            return
        try:
            if stream.session_id is None:
                self._register(stream, lessor, request)
            else:
                self._on_message(stream.session_id, lessor, request)
        except LeaseServiceError as error:
            self._refuse(stream, error)
        self._carry_out()

    def on_client_closed(self, stream: Stream) -> None:
        """The engine closed its side, or the connection is gone."""
        self._end_stream(stream, None)
        self._carry_out()

    def _register(
        self, stream: Stream, lessor: Lessor, request: lease_pb2.EngineSessionRequest
    ) -> None:
        session_id = wire.session_id(request)
        register = request.register
        inventory = [wire.retention(each, "inventory") for each in register.inventory]
        lessor.register(
            session_id,
            wire.engine_info(register.engine),
            inventory,
            quiet_ns=wire.quiet_ns(register),
            hold_ns=wire.hold_ns(register),
            previous_term=register.previous_term,
            now_ns=self.clock_ns(),
        )
        if inventory and register.previous_term != lessor.term:
            self.sim.checkers.count["inherited waits"] += 1
        stream.session_id = session_id
        self._streams[session_id] = stream
        self.world.note(self.name, "%s registered with %d", session_id, len(inventory))

    def _on_message(
        self, session_id: SessionId, lessor: Lessor, request: lease_pb2.EngineSessionRequest
    ) -> None:
        now_ns = self.clock_ns()
        match request.WhichOneof("message"):
            case "heartbeat":
                heartbeat = request.heartbeat
                echo = (heartbeat.echo_term, heartbeat.echo_sequence)
                self.sim.checkers.heard((lessor.term, session_id), echo, now_ns)
                lessor.heartbeat(
                    session_id,
                    request.sequence,
                    echo_term=heartbeat.echo_term,
                    echo_sequence=heartbeat.echo_sequence,
                    withdrawn=wire.withdrawn(heartbeat, self.config.leases_max),
                    memory=wire.memory(heartbeat),
                    now_ns=now_ns,
                )
            case "grant":
                retention = wire.retention(request.grant.retention, "grant.retention")
                lessor.grant(session_id, request.sequence, retention, now_ns)
            case "freed":
                lease_id, reason = wire.freed(request.freed)
                lessor.freed(session_id, request.sequence, lease_id, reason, now_ns)

    def _refuse(self, stream: Stream, error: LeaseServiceError) -> None:
        if isinstance(error, SessionFenced):
            self.sim.checkers.count["fencings"] += 1
        elif isinstance(error, SessionExpired):
            self.sim.checkers.session_expired(stream.client)
        self._end_stream(stream, error)

    def _end_stream(self, stream: Stream, error: LeaseServiceError | None) -> None:
        if not stream.server_open:
            return
        self.world.note(self.name, "ends %s: %s", stream.session_id, error)
        told = not self.sim.mishap(0.2)
        stream.close_server(stream.client.on_server_closed, told, flushed=not self.sim.mishap(0.5))
        session_id = stream.session_id
        if session_id is not None and self._streams.get(session_id) is stream:
            del self._streams[session_id]
            if self.lessor is not None:
                self.lessor.close_session(session_id, self.clock_ns())

    # ---- questions -----------------------------------------------------------------------

    def answer(self, question: Callable[[Lessor, int], T]) -> T | LeaseServiceError:
        """Answers one question, or says why not."""
        if self.lessor is None:
            return NotLeader(self.leader)
        try:
            return question(self.lessor, self.clock_ns())
        except LeaseServiceError as error:
            return error
        finally:
            self._carry_out()

    def begin_read(
        self, request: lease_pb2.BeginReadRequest
    ) -> lease_pb2.BeginReadResponse | LeaseServiceError:
        """Answers BeginRead."""
        lease_id = wire.lease_id(request.lease_id)
        key = wire.conversation_key(request.conversation, "conversation")
        answer = self.answer(lambda lessor, now_ns: lessor.begin_read(lease_id, key, now_ns))
        if isinstance(answer, LeaseServiceError):
            return answer
        if not answer.verdict:
            assert self.lessor is not None
            named = (key.tenant, key.conversation_id)
            self.sim.checkers.granted(request.lease_id, named, self.lessor.term)
            self.world.note(self.name, "grants %s", request.lease_id)
        return wire.read_answer(answer, request, self.config.longest_read_ns)

    def end_read(self, request: lease_pb2.EndReadRequest) -> LeaseServiceError | None:
        """Answers EndRead."""
        lease_id = wire.lease_id(request.lease_id)
        outcome = wire.read_outcome(request)
        return self.answer(lambda lessor, now_ns: lessor.end_read(lease_id, outcome, now_ns))

    def resolve(self, key: ConversationKey) -> Resolution | LeaseServiceError:
        """Answers ResolveConversation."""
        return self.answer(lambda lessor, now_ns: lessor.resolve(key, now_ns))

    def touch(self, key: ConversationKey, turns: int) -> LeaseServiceError | None:
        """Answers TouchConversation."""
        return self.answer(lambda lessor, now_ns: lessor.touch(key, turns, now_ns))

    def keep_alive(self, key: ConversationKey, absence_ns: int | None) -> int | LeaseServiceError:
        """Answers KeepConversationAlive."""
        return self.answer(lambda lessor, now_ns: lessor.keep_alive(key, absence_ns, now_ns))

    def end_conversation(self, key: ConversationKey) -> int | LeaseServiceError:
        """Answers EndConversation."""
        return self.answer(lambda lessor, now_ns: lessor.end_conversation(key, now_ns))

    def revoke(self, lease_id: str) -> LeaseServiceError | None:
        """Answers RevokeLease."""
        named = wire.lease_id(lease_id)
        return self.answer(lambda lessor, now_ns: lessor.revoke(named, now_ns))

    # ---- the lessor's hands --------------------------------------------------------------

    def _carry_out(self) -> None:
        lessor = self.lessor
        if lessor is None:
            return
        changes: list[Change] = []
        for effect in lessor.drain():
            match effect:
                case SendToEngine(session=session_id):
                    stream = self._streams.get(session_id)
                    session = (lessor.term, session_id)
                    self.sim.checkers.sent(session, effect.sequence, self.clock_ns())
                    if isinstance(effect.message, Release):
                        self.sim.checkers.released(str(effect.message.lease_id))
                    if stream is not None and stream.server_open:
                        message = wire.engine_message(effect, lessor.term, self.config)
                        stream.send_down(stream.client.on_response, message)
                case EndSession(session=session_id, error=error):
                    stream = self._streams.pop(session_id, None)
                    if stream is not None:
                        self._refuse(stream, error)
                case Record(change=change):
                    changes.append(change)
        if changes:
            self._write(changes)
        if lessor.deposed and self.lessor is lessor:
            self.lessor = None
            self.world.note(self.name, "leads no more")
            return
        self._arm_timer(lessor)

    def _write(self, changes: list[Change]) -> None:
        if self.sim.etcd is None:
            return
        if not self._unwritten:
            self.after(self.sim.weather.store_delay_ns, self._flush)
        self._unwritten.extend(changes)

    def _flush(self) -> None:
        changes, self._unwritten = self._unwritten, []
        etcd, loss = self.sim.etcd, self.sim.weather.store_loss
        assert etcd is not None
        changes = [each for each in changes if not self.sim.mishap(loss)]
        if changes:
            self.sim.network.send(self, etcd, etcd.write, changes)

    def _arm_timer(self, lessor: Lessor) -> None:
        next_ns = lessor.next_deadline_ns()
        if next_ns is None or (self._timer_ns is not None and self._timer_ns <= next_ns):
            return
        self._timer_ns = next_ns
        self.at_clock(max(next_ns, self.clock_ns()), self._on_timer, next_ns, lessor)

    def _on_timer(self, deadline_ns: int, lessor: Lessor) -> None:
        if deadline_ns != self._timer_ns or lessor is not self.lessor:
            return
        self._timer_ns = None
        lessor.expire(self.clock_ns())
        self._carry_out()
