"""Directed scenarios: each hits one lease rule that random schedules rarely hit.

Each takes the classes to run. With the real ones it ends quietly; with the mutants that it was
written for it raises Violation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvturn.v1 import common_pb2, lease_pb2
from sim.decode import BACKOFF_MIN_NS
from sim.network import Stream
from sim.stage import KEY, TRIP_NS, Stage, stage
from sim.world import MS, Node, S, Violation

if TYPE_CHECKING:
    from collections.abc import Callable

    from sim.checkers import Kept
    from sim.cores import Cores


def read_as_trust_ends(cores: Cores, percent: int) -> None:
    """Decode falls silent right after a heartbeat; a read is granted as trust ends, and takes R.

    Decode's clock is as fast as it may be, those of lease service and prefill are as slow. The
    scan moves decode's ticks, to meet the moment in which it frees.
    """
    drift_ppm = percent * 10_000
    drifts = {"d0": drift_ppm, "l0": -drift_ppm, "p0": -drift_ppm, "p0r0": -drift_ppm}
    for step in range(26):
        with stage(cores, drifts, services=1, drift_percent=percent) as it:
            it.connect()
            kept = it.retain()
            it.wait(step * 10 * MS)
            # A new session: its first heartbeat echoes what was sent a moment ago.
            it.leave(it.first)
            heartbeat_ns = it.connect()
            lease_id = it.lease_id(kept)
            # It ends at once, the lease service does not hear of it, and no other one follows.
            it.part(it.first)
            it.leave(it.first)
            slow = 100 / (100 - percent)
            trust_ns = int(it.weather.ttl_ns * slow)
            window_ns = int(it.weather.longest_read_ns * slow)
            it.span_ns = window_ns - 30 * MS
            it.wait_until_ns(heartbeat_ns + trust_ns - 12 * MS)
            it.ask(lease_id, it.first)
            it.wait(window_ns + S)


def read_as_trust_ends_at_1_percent(cores: Cores) -> None:
    """See read_as_trust_ends()."""
    read_as_trust_ends(cores, 1)


def read_as_trust_ends_at_20_percent(cores: Cores) -> None:
    """See read_as_trust_ends()."""
    read_as_trust_ends(cores, 20)


def two_leaders_and_a_slow_read(cores: Cores) -> None:
    """Decode goes from one leader to another; the first grants a read as long as it may.

    It has not heard that decode left. The second is told meanwhile to end the conversation, and
    must not confirm the release while the first's reader may read.
    """
    with stage(cores) as it:
        it.connect()
        kept = it.retain()
        it.wait(8 * S)  # both have led for long
        it.leave(it.first)
        heartbeat_ns = it.connect()
        lease_id = it.lease_id(kept)
        it.leave(it.second)
        it.connect()
        it.end(it.second)
        it.span_ns = it.weather.longest_read_ns - 50 * MS
        it.wait_until_ns(heartbeat_ns + it.weather.ttl_ns - 50 * MS)
        it.ask(lease_id, it.first)
        it.wait(it.weather.longest_read_ns + S)


def two_leaders_and_two_readers(cores: Cores) -> None:
    """As above, but the conversation goes on at the second leader, and a turn wants the read."""
    with stage(cores) as it:
        it.connect()
        kept = it.retain()
        it.wait(8 * S)
        it.leave(it.first)
        heartbeat_ns = it.connect()
        lease_id = it.lease_id(kept)
        it.leave(it.second)
        it.connect()
        it.span_ns = it.weather.longest_read_ns - 50 * MS
        it.wait_until_ns(heartbeat_ns + it.weather.ttl_ns - 50 * MS)
        it.ask(lease_id, it.first)
        it.wait(100 * MS)
        it.span_ns = 10 * MS
        it.ask(it.lease_id(kept), it.second)
        it.wait(it.weather.longest_read_ns + S)


def two_leaders_and_a_longer_read(cores: Cores) -> None:
    """The second leader was started with a shorter longest read than the first one."""
    with stage(cores, longest_read_ns=10 * S, shorter_read_ns=S) as it:
        it.second.crash_silently()
        it.unlucky = True  # its settings are the shorter ones
        it.second.restart()
        it.unlucky = False
        it.connect()
        kept = it.retain()
        it.span_ns = it.weather.longest_read_ns - 50 * MS
        it.ask(it.lease_id(kept), it.first)
        it.wait(50 * MS)
        it.leave(it.second)
        it.connect()
        it.end(it.second)
        it.wait(it.weather.longest_read_ns + S)


def lease_asked_for_again_after_failover(cores: Cores) -> None:
    """A lease is granted, its reader dies; after a failover turns come with its old and new id.

    The old id is refused. The new one is granted, once K*(TTL + R) are over.
    """
    with stage(cores) as it:
        it.connect()
        kept = it.retain()
        lease_id = it.lease_id(kept)
        it.post_ns = 600 * S
        it.ask(lease_id, it.first)
        it.wait(100 * MS)
        it.leave(it.second)
        it.connect()
        it.wait(it.checkers.hold_ns)
        it.ask(lease_id, it.second)  # a router that knows the old id only
        it.wait(100 * MS)
        it.ask(it.lease_id(kept), it.second)
        it.wait(100 * MS)
        if it.checkers.count["reads granted"] != 2:
            raise Violation("L2", "the lease cannot be read under its new id")


def notice_of_a_read_that_was_given_up(cores: Cores) -> None:
    """A read outlasts its window and a failover; its notice comes while another one reads."""
    with stage(cores) as it:
        it.connect()
        kept = it.retain()
        it.span_ns = 2 * it.checkers.hold_ns
        it.ask(it.lease_id(kept), it.first)
        it.wait(100 * MS)
        it.leave(it.second)
        it.connect()
        it.wait(2 * it.checkers.hold_ns - S)
        it.span_ns = it.weather.longest_read_ns - 50 * MS
        it.ask(it.lease_id(kept), it.second)
        it.wait(it.weather.longest_read_ns + S)


def register_that_comes_late(cores: Cores) -> None:
    """A Register reaches the lease service when its engine has long gone from the stream."""
    with stage(cores, services=1) as it:
        it.connect()
        kept = it.retain()
        it.leave(it.first)
        it.wait(BACKOFF_MIN_NS + TRIP_NS)  # the connection is about to stand
        # The Register comes late; nothing comes back, so decode opens no other session.
        it.network.block(it.decode, it.first, it.checkers.hold_ns + S)
        it.network.block(it.first, it.decode, 600 * S)
        it.wait_for(lambda: it.decode.stream)
        lease_id = it.lease_id(kept)
        it.unlucky = True
        it.wait(it.checkers.hold_ns + S)
        it.unlucky = False
        assert not kept.held
        it.ask(lease_id, it.first)
        it.wait(S)


def register_as_the_hold_runs_out(cores: Cores) -> None:
    """The engine registers just before K*(TTL + R) are over, and the answer takes a while.

    The scan moves the moment of registering.
    """
    for step in range(36):
        with stage(cores, services=1) as it:
            it.connect()
            it.retain()
            it.wait(step * 15 * MS)
            it.first.crash_silently()
            stream = it.decode.stream
            assert stream is not None
            stream.break_off(0, 0)
            it.decode.on_server_closed(stream)
            vouched_ns = it.decode.true_ns(it.decode.session.retentions.last_vouched_ns or 0)
            it.network.fixed_ns = 100 * MS
            it.wait_until_ns(vouched_ns + it.checkers.hold_ns - 600 * MS)
            it.first.restart()
            it.wait_for(lambda: it.decode.session.registered)
            it.wait(S)
            it.network.fixed_ns = TRIP_NS
            for lease_id in it.offered(it.first):
                it.ask(lease_id, it.first)
                it.wait(S)


def register_of_a_dead_engine(cores: Cores) -> None:
    """An engine registers, dies and comes back, and its Registers arrive the other way round."""
    with stage(cores, services=1) as it:
        it.connect()
        dead = _ScriptedEngine(it, it.decode.engine_id)
        dead.say(register=dead.register(quiet_ns=0))
        it.wait(2 * it.weather.ttl_ns)
        if not it.decode.session.registered:
            raise Violation("L1", "a living engine cannot register any more")


def answer_that_comes_late(cores: Cores) -> None:
    """BeginRead is granted at once, but its answer takes most of R."""
    with stage(cores, services=1, question_ns=1500 * MS) as it:
        it.connect()
        kept = it.retain()
        it.network.fixed_ns = 700 * MS
        it.ask(it.lease_id(kept), it.first)
        it.span_ns = it.weather.longest_read_ns - 50 * MS
        it.wait(1400 * MS)
        it.network.fixed_ns = 2 * MS
        it.end(it.first)
        it.wait(it.weather.longest_read_ns + S)


def echo_of_another_term(cores: Cores) -> None:
    """An engine echoes what an earlier leader sent it: that proves nothing to this one."""
    with stage(cores, services=1) as it:
        engine = _ScriptedEngine(it, "x")
        engine.say(register=engine.register(quiet_ns=600 * S))
        it.wait(10 * MS)
        engine.say(heartbeat=lease_pb2.Heartbeat(echo_term=12345, echo_sequence=1))
        it.wait(10 * MS)
        question = lease_pb2.BeginReadRequest(
            lease_id="x1.1.1", conversation=common_pb2.ConversationKey(**KEY._asdict())
        )
        it.first.begin_read(question)


class _ScriptedEngine(Node):
    """An engine that says what the script says, on one stream."""

    def __init__(self, it: Stage, engine_id: str) -> None:
        super().__init__(it.world, "x")
        self._engine_id = engine_id
        self.held: dict[int, Kept] = {}
        self._stream = Stream(it.network, self, it.first)
        self._sequence = 0

    def say(self, **message: Any) -> None:
        """Sends one message of session 1."""
        self._sequence += 1
        request = lease_pb2.EngineSessionRequest(
            session_number=1, sequence=self._sequence, **message
        )
        self._stream.send_up(self._stream.server.on_request, request)

    def register(self, quiet_ns: int) -> lease_pb2.RegisterEngine:
        """Returns a Register with one retention."""
        offer = common_pb2.Retention(
            lease_id="x1.1.1",
            conversation=common_pb2.ConversationKey(**KEY._asdict()),
            token_count=16,
            block_size=16,
            groups=[common_pb2.BlockGroup(block_ids=[1])],
            digests=common_pb2.TokenDigests(stride_tokens=16, digest_bytes=16, values=bytes(16)),
        )
        description = lease_pb2.EngineDescription(
            engine_id=self._engine_id,
            incarnation="x1",
            role=common_pb2.ENGINE_ROLE_DECODE,
            nixl=common_pb2.NixlAddress(
                nixl_engine_id="x", host="x", port=1, tp_size=1, dcp_size=1, pp_size=1
            ),
        )
        register = lease_pb2.RegisterEngine(engine=description, inventory=[offer])
        register.quiet.FromNanoseconds(quiet_ns)
        return register

    def on_response(self, stream: Stream, response: lease_pb2.EngineSessionResponse) -> None:
        """Does not answer."""

    def on_server_closed(self, stream: Stream) -> None:
        """Does not mind."""


SCENARIOS: tuple[Callable[[Cores], None], ...] = (
    read_as_trust_ends_at_1_percent,
    read_as_trust_ends_at_20_percent,
    two_leaders_and_a_slow_read,
    two_leaders_and_two_readers,
    two_leaders_and_a_longer_read,
    lease_asked_for_again_after_failover,
    notice_of_a_read_that_was_given_up,
    register_that_comes_late,
    register_as_the_hold_runs_out,
    register_of_a_dead_engine,
    answer_that_comes_late,
    echo_of_another_term,
)
