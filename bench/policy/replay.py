"""Replays a trace against the real cores: the lessor, and one decode engine's choice of victims.

Time is virtual. A turn takes none: its retention begins when it arrives, because the trace tells
no more. What is modelled around the cores is one decode engine, which counts blocks, keeps its
session alive and gives way as the connector does, and clients, some of which send heartbeats.

Spans (hold, idle time) are taken a millisecond longer than their names say: arrivals are whole
milliseconds, and a retention of 480 s is still there for a turn that arrives after 480 s.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from bench.policy.oldest_first import OldestFirst
from kvturn_connector.victims import PRIORS, Freed, Priors, Victims
from kvturn_lease.config import LessorConfig, Policy
from kvturn_lease.conversation import ConversationKey
from kvturn_lease.effects import HeartbeatAck, Release, SendToEngine
from kvturn_lease.lease import LeaseId, Retention
from kvturn_lease.lessor import Lessor
from kvturn_lease.session import EngineInfo, SessionId
from kvturn_lease.verdict import ReadOutcome, ReleaseReason, Verdict

if TYPE_CHECKING:
    from collections.abc import Mapping

    from bench.policy.trace import Request, Trace

SECOND_NS = 1_000_000_000
BLOCK_TOKENS = 16
HEADROOM = 16
"""The engine keeps one block in so many free, as `decode.py` does."""
ENGINE_HEARTBEAT_NS = 1 * SECOND_NS
_MILLISECOND_NS = 1_000_000


@dataclass(frozen=True, slots=True)
class Clients:
    """Who sends heartbeats, and until when: no client knows which turn will be its last."""

    share: float
    """Of all conversations; a smaller share is a part of a larger one."""
    linger_s: int
    """For how long a client is still there after its conversation's last turn."""
    heartbeat_s: int = 5
    """How often it says that it will be back, from its first turn on."""
    absence_s: int = 10
    """Within what time; it says so again in half of it, so one heartbeat may get lost."""

    def heartbeats(self, conversation: int) -> bool:
        """Tells whether the conversation's client does; the same each time, and evenly spread."""
        return conversation * 2_654_435_761 % 2**32 < self.share * 2**32


SILENT = Clients(share=0.0, linger_s=0)


@dataclass(frozen=True, slots=True)
class Setting:
    """One run: a policy of the lessor, an order of victims, a memory and clients."""

    policy: Policy
    hold_s: int = 480
    """Longest hold, or the fixed one."""
    idle_s: int = 60
    priors: Priors | None = PRIORS
    """Victims by what was learned of returns, beginning with these; None: the oldest first."""
    memory_tokens: int | None = None
    """KV memory of the engine; None for one that is never full."""
    clients: Clients = SILENT


@dataclass(slots=True)
class Outcome:
    """What a run came to."""

    requests: int = 0
    reused_tokens: int = 0
    token_ns: int = 0
    """Tokens held times how long, until the last request of the trace arrives."""
    made_way: int = 0
    """Requests for which a retention had to be released first: a round trip."""
    delayed: int = 0
    """Requests that had to wait longer, for a hold to end; those too large for the memory too."""


class VictimOrder(Protocol):
    """Which retentions go first; see `kvturn_connector.victims.Victims`."""

    def retained(self, number: int, turn: int, now_ns: int) -> None: ...
    def outlook(self, number: int, outlook: int, now_ns: int) -> None: ...
    def consumed(self, number: int, now_ns: int) -> None: ...
    def ended(self, number: int, now_ns: int) -> None: ...
    def choose(self, blocks_wanted: int, now_ns: int, freed: Freed) -> list[int]: ...


def replay(trace: Trace, setting: Setting) -> Outcome:
    """Runs the trace once."""
    return _Replay(trace, setting).run()


@dataclass(frozen=True, slots=True)
class _Held:
    request: Request
    blocks: int
    since_ns: int


class _Freed:
    """Blocks of retentions that share none; see `kvturn_connector.victims.Freed`."""

    def __init__(self, held: Mapping[int, _Held]) -> None:
        self.count = 0
        self._held = held

    def add(self, number: int) -> None:
        self.count += self._held[number].blocks

    def spare(self, number: int, least: int) -> bool:
        left = self.count - self._held[number].blocks
        if left < least:
            return False
        self.count = left
        return True


class _Replay:
    """One run: the clock, the decode engine and the clients around the cores."""

    def __init__(self, trace: Trace, setting: Setting) -> None:
        self._trace = trace
        self._setting = setting
        self._lessor = Lessor(_config(setting), term=1)
        self._victims: VictimOrder = (
            OldestFirst() if setting.priors is None else Victims(setting.priors)
        )
        self._total_blocks = (setting.memory_tokens or 2**62) // BLOCK_TOKENS
        self._free_blocks = self._total_blocks
        self._session = SessionId("decode", "incarnation", 1)
        self._sequence = 1
        self._echo_sequence = 0
        self._held: dict[int, _Held] = {}
        self._waiting: deque[Request] = deque()
        self._clients: list[tuple[int, int]] = []  # When whose heartbeat is due.
        self._leaves_ns = {
            request.conversation: request.arrival_ns + setting.clients.linger_s * SECOND_NS
            for request in trace.requests
        }
        self._now_ns = 0
        self._outcome = Outcome(requests=len(trace.requests))

    def run(self) -> Outcome:
        """Goes from event to event; arrivals of the same instant in the order of the trace."""
        self._lessor.register(
            self._session,
            EngineInfo("", True, b"", b""),
            [],
            quiet_ns=None,
            previous_term=0,
            now_ns=0,
        )
        self._carry_out()
        self._beat([])
        beat_ns = ENGINE_HEARTBEAT_NS
        for request in self._trace.requests:
            while True:
                lessor_ns = self._lessor.next_deadline_ns()
                client_ns = self._clients[0][0] if self._clients else None
                due_ns = min(each for each in (lessor_ns, client_ns, beat_ns) if each is not None)
                if due_ns >= request.arrival_ns:
                    break
                self._now_ns = max(self._now_ns, due_ns)
                if due_ns == lessor_ns:
                    self._lessor.expire(self._now_ns)
                    self._carry_out()
                    self._serve_waiting()
                elif due_ns == beat_ns:
                    self._beat([])
                    beat_ns += ENGINE_HEARTBEAT_NS
                else:
                    self._client_beats()
            self._now_ns = request.arrival_ns
            if _blocks(request) > self._total_blocks:
                self._outcome.delayed += 1
                continue
            self._waiting.append(request)
            self._serve_waiting()
            self._outcome.delayed += bool(self._waiting)  # It is the last one that waits.
        for number in list(self._held):
            self._free(number)
        return self._outcome

    # ---- turns ---------------------------------------------------------------------------

    def _serve_waiting(self) -> None:
        """Serves what waits, in order, as far as there is memory."""
        while self._waiting and self._serve(self._waiting[0]):
            self._waiting.popleft()

    def _serve(self, request: Request) -> bool:
        """Takes a turn from its arrival to its retention; False if there is no memory for it."""
        key, blocks = _key(request), _blocks(request)
        self._read(request)
        if self._setting.policy != Policy.FIXED_TTL:
            short = blocks - self._free_blocks
            self._outcome.made_way += short > 0
            self._give_way(short + self._total_blocks // HEADROOM)
        if self._free_blocks < blocks:
            return False
        self._lessor.touch(key, 1, self._now_ns)
        self._carry_out()
        self._retain(request, blocks)
        self._lessor.touch(key, -1, self._now_ns)
        if request.turn == 1 and self._setting.clients.heartbeats(request.conversation):
            heapq.heappush(self._clients, (self._now_ns, request.conversation))
        return True

    def _read(self, request: Request) -> None:
        """Reads what the conversation left, once, if it is still held."""
        if request.parent is None:
            return
        key = _key(request)
        lease_id = self._lessor.resolve(key, self._now_ns).lease_id
        if lease_id is None:
            self._carry_out()
            return
        answer = self._lessor.begin_read(lease_id, key, self._now_ns)
        assert answer.verdict == Verdict.NONE
        held = self._held[lease_id.number]
        self._outcome.reused_tokens += min(held.request.tokens, request.prompt_tokens)
        self._lessor.end_read(lease_id, ReadOutcome.COMPLETED, self._now_ns)
        self._carry_out()

    def _retain(self, request: Request, blocks: int) -> None:
        self._free_blocks -= blocks
        self._held[request.number] = _Held(request, blocks, self._now_ns)
        self._victims.retained(request.number, request.turn, self._now_ns)
        lease_id = LeaseId(self._session.incarnation, request.number, self._session.number)
        retention = Retention(
            lease_id, _key(request), request.tokens, blocks, request.turn, b"blocks"
        )
        self._sequence += 1
        self._lessor.grant(self._session, self._sequence, retention, self._now_ns)
        self._carry_out()

    # ---- the engine ----------------------------------------------------------------------

    def _give_way(self, short: int) -> None:
        numbers = self._victims.choose(short, self._now_ns, _Freed(self._held))
        for number in numbers:
            self._victims.ended(number, self._now_ns)
        if numbers:
            self._beat(numbers)

    def _beat(self, withdrawn: list[int]) -> None:
        ids = [
            LeaseId(self._session.incarnation, number, self._session.number) for number in withdrawn
        ]
        self._sequence += 1
        self._lessor.heartbeat(
            self._session,
            self._sequence,
            echo_term=self._lessor.term,
            echo_sequence=self._echo_sequence,
            withdrawn=[(lease_id, ReleaseReason.PRESSURE) for lease_id in ids],
            memory=None,
            now_ns=self._now_ns,
        )
        self._carry_out()

    def _carry_out(self) -> None:
        """Takes in what the lessor sends; it arrives at once."""
        for effect in self._lessor.drain():
            if not isinstance(effect, SendToEngine):
                continue
            self._echo_sequence = effect.sequence
            message = effect.message
            if isinstance(message, Release):
                if message.reason == ReleaseReason.CONSUMED:
                    self._victims.consumed(message.lease_id.number, self._now_ns)
                else:
                    self._victims.ended(message.lease_id.number, self._now_ns)
                self._free(message.lease_id.number)
            elif isinstance(message, HeartbeatAck):
                for lease_id, outlook in message.outlooks:
                    self._victims.outlook(lease_id.number, outlook, self._now_ns)

    def _free(self, number: int) -> None:
        held = self._held.pop(number)
        self._free_blocks += held.blocks
        self._outcome.token_ns += held.request.tokens * (self._now_ns - held.since_ns)

    # ---- the clients ---------------------------------------------------------------------

    def _client_beats(self) -> None:
        due_ns, conversation = heapq.heappop(self._clients)
        if due_ns > self._leaves_ns[conversation]:
            return
        clients = self._setting.clients
        key = ConversationKey("", "", str(conversation))
        self._lessor.keep_alive(key, clients.absence_s * SECOND_NS, self._now_ns)
        self._carry_out()
        heapq.heappush(self._clients, (due_ns + clients.heartbeat_s * SECOND_NS, conversation))


def _key(request: Request) -> ConversationKey:
    return ConversationKey("", "", str(request.conversation))


def _blocks(request: Request) -> int:
    return -(-request.tokens // BLOCK_TOKENS)


def _config(setting: Setting) -> LessorConfig:
    hold_ns = setting.hold_s * SECOND_NS + _MILLISECOND_NS
    return LessorConfig(
        policy=setting.policy,
        max_hold_ns=hold_ns,
        fixed_ttl_ns=hold_ns,
        idle_ns=min(setting.idle_s * SECOND_NS + _MILLISECOND_NS, hold_ns),
    )
