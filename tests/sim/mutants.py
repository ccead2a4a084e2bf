"""Broken variants of the cores and of what shells must do. Each must be caught."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvturn.v1 import common_pb2, lease_pb2
from kvturn_connector.reader import End, Read, Reader, State
from kvturn_connector.retention import Retained, Retentions
from kvturn_connector.session import EngineSession
from kvturn_lease.config import stretched_ns
from kvturn_lease.errors import SessionExpired, SessionFenced
from kvturn_lease.lease import Lease, LeaseId, Retention
from kvturn_lease.lessor import Lessor, ReadAnswer
from kvturn_lease.session import Engine, Session, SessionId
from sim.cores import Cores
from sim.decode import Decode
from sim.prefill import COMPLETED, Prefill, Rank, ReadJob, Request

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvturn_lease.conversation import ConversationKey
    from kvturn_lease.store import Snapshot
    from kvturn_lease.verdict import Verdict


@dataclass(frozen=True)
class Mutant:
    """One broken variant."""

    name: str
    cores: Cores
    rule: str
    """The rule that it breaks."""
    seed: int = 0
    """A seed that catches it, where no directed scenario does."""


# ---- prefill ---------------------------------------------------------------------------------


class _CarelessRank(Rank):
    """Does not look at the clock after DONE."""

    def see_done(self, job: ReadJob) -> None:
        self.end(job, COMPLETED)


class _CarelessPrefill(Prefill):
    rank_type = _CarelessRank


class _EndOnAbort(Reader):
    """Sends EndRead when its request is aborted, with transfers under way."""

    def gone(self, request_id: str) -> None:
        read = self.get(request_id)
        if read is not None and read.state is State.POSTED:
            outcome = lease_pb2.READ_OUTCOME_NOT_READ
            request = lease_pb2.EndReadRequest(lease_id=read.lease_id, outcome=outcome)
            self._ends.append(End(request))
        super().gone(request_id)


class _NotifyWithoutGrant(Prefill):
    """Lets stock code tell decode that a lease was read which was not granted."""

    def compute(self, request: Request, reused_tokens: int, verdict: int) -> None:
        if request.lease_id and request.job is None:
            kept = self.sim.checkers.of_lease(request.lease_id)
            assert kept is not None
            for _ in self.ranks:
                self.sim.network.send(self, kept.engine, kept.engine.on_notice, request.lease_id)
        super().compute(request, reused_tokens, verdict)


class _WindowFromAnswer(Prefill):
    """Counts R from when the answer came."""

    def limit_ns(self, request: Request, read: Read) -> int:
        return super().limit_ns(request, read) - request.asked_ns + request.answered_ns


class _OneStrideMore(Reader):
    """Reads a digest point past the common prefix."""

    def decide(self, request_id: str, local_tokens: int, now_ns: int) -> Read | None:
        read = super().decide(request_id, local_tokens, now_ns)
        if read is not None and read.answer is not None:
            answer = read.answer
            more = min(answer.common_tokens + 16, answer.retention.token_count)
            object.__setattr__(answer, "common_tokens", more)
        return read


class _ReadsAgain(Reader):
    """Lets a request that was preempted post its read again."""

    def ended(self, request_id: str, *args: Any) -> None:
        read = self.get(request_id)
        answer = None if read is None else read.answer
        super().ended(request_id, *args)
        if read is not None and answer is not None:
            read.answer = answer
            read.state = State.GRANTED


# ---- decode ----------------------------------------------------------------------------------


class _NoticeWithoutLease(Decode):
    """Takes a notice for whatever lease the retention has now."""

    def notice(self, lease_id: str) -> None:
        number = int(lease_id.split(".")[1])
        for one in self.session.retentions:
            if one.number == number:
                super().notice(one.offer.lease_id)
                return


class _EngineIdForEver(Decode):
    """Names its memory by an id that a restart does not change."""

    def nixl_engine_id(self) -> str:
        return self.engine_id


class _RegisterVouchesNot(Retentions):
    """Does not count a Register as vouching."""

    def begin_session(self, session_number: int, now_ns: int) -> list[common_pb2.Retention]:
        vouched_ns = self._session_vouched_ns
        inventory = super().begin_session(session_number, now_ns)
        self._session_vouched_ns = vouched_ns
        return inventory


class _SameLeaseId(Retentions):
    """Keeps a lease id over sessions."""

    def _rename(self, one: Retained) -> None:
        one.offer.lease_id = f"{self._incarnation}.{one.number}.{one.first_session_number}"
        self._number_by_lease[one.offer.lease_id] = one.number


class _NoStrike(Retentions):
    """Frees on a Release and lists the retention all the same."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._ghosts: list[Retained] = []

    def free(self, lease_id: str, reason: int) -> bool:
        number = self._number_by_lease.get(lease_id)
        if number is not None and reason != common_pb2.RELEASE_REASON_CONSUMED:
            self._ghosts.append(self._by_number[number])
        return super().free(lease_id, reason)

    def begin_session(self, session_number: int, now_ns: int) -> list[common_pb2.Retention]:
        inventory = super().begin_session(session_number, now_ns)
        for ghost in self._ghosts:
            ghost.offer.lease_id = f"{self._incarnation}.{ghost.number}.{session_number}"
        return inventory + [ghost.offer for ghost in self._ghosts]


class _FreesOnItsOwnCap(Retentions):
    """Frees at its own longest hold."""

    def expire(self, now_ns: int) -> bool:
        for one in list(self):
            if now_ns >= one.retained_ns + self._max_hold_ns:
                self._free(one, common_pb2.RELEASE_REASON_EXPIRED)
        return super().expire(now_ns)


class _VouchesForWithdrawn(Retentions):
    """Counts every heartbeat as vouching also for what it gives up."""

    def _vouched_ns(self, one: Retained) -> int:
        return max(one.vouched_ns, self._session_vouched_ns)


class _WaitsTtlOnly(EngineSession):
    """Holds what it vouched for only as long as it is trusted."""

    def _hold_ns(self) -> int:
        return self._session_ttl_ns


# ---- lessor ----------------------------------------------------------------------------------


class _FreesUnderReaders(Lessor):
    """Releases what has ended although it may be being read."""

    def _settle(self, lease: Lease, now_ns: int) -> bool:
        if lease.ended:
            lease.read_open = False
        return super()._settle(lease, now_ns)


class _Remembers(Lessor):
    """Knows every payload that it ever had. Not broken by itself."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._payloads: dict[tuple[str, int], bytes] = {}

    def _settle(self, lease: Lease, now_ns: int) -> bool:
        if lease.payload:
            self._payloads[lease.engine.incarnation, lease.number] = lease.payload
        return super()._settle(lease, now_ns)

    def _payload(self, lease: Lease) -> bytes:
        return self._payloads.get((lease.engine.incarnation, lease.number), b"")


class _GrantsAgain(_Remembers):
    """Grants a lease to everyone who asks."""

    def begin_read(self, lease_id: LeaseId, key: ConversationKey, now_ns: int) -> ReadAnswer:
        lease = self._find(lease_id)
        if lease is not None and lease.begun and not lease.ended:
            lease.read_session_number = 0
            lease.payload = self._payload(lease)
        return super().begin_read(lease_id, key, now_ns)


class _TrustsFromReceipt(Lessor):
    """Trusts a session from when its heartbeat came."""

    def heartbeat(self, session_id: SessionId, sequence: int, **kwargs: Any) -> None:
        super().heartbeat(session_id, sequence, **kwargs)
        engine = self._engines.get(session_id.engine_id)
        assert engine is not None
        if engine.session is not None:
            engine.session.deadline_ns = kwargs["now_ns"] + self.config.session_ttl_ns


class _RegisterProvesLife(Lessor):
    """Grants reads from Register on."""

    def register(self, session_id: SessionId, *args: Any, **kwargs: Any) -> None:
        super().register(session_id, *args, **kwargs)
        engine = self._engines.get(session_id.engine_id)
        assert engine is not None
        assert engine.session is not None
        engine.session.proven = True


class _RegisterFences(Lessor):
    """Fences an engine's last incarnation for ever on a Register that proves nothing."""

    def register(self, session_id: SessionId, *args: Any, **kwargs: Any) -> None:
        super().register(session_id, *args, **kwargs)
        engine = self._engines.get(session_id.engine_id)
        assert engine is not None
        self._engines.fence_displaced(engine)


class _NoTrustCheck(Lessor):
    """Applies what an engine says however late it comes."""

    def _enter(self, session_id: SessionId, sequence: int, now_ns: int) -> Engine:
        self._advance(now_ns)
        engine = self._engines.get(session_id.engine_id)
        if engine is None or engine.incarnation != session_id.incarnation:
            raise SessionFenced
        if engine.number != session_id.number:
            raise SessionFenced
        if engine.session is None:
            raise SessionExpired
        engine.session.receive(sequence)
        return engine


class _RaisesTheDead(Lessor):
    """Lets a session that ended go on."""

    def _enter(self, session_id: SessionId, sequence: int, now_ns: int) -> Engine:
        self._advance(now_ns)
        engine = self._engines.get(session_id.engine_id)
        if engine is not None and self._live(engine, now_ns) is None:
            same = (engine.incarnation, engine.number) == session_id[1:]
            if same and engine.forget_ns > now_ns:
                session = Session(engine.number, now_ns, self.config.session_ttl_ns)
                session.received_sequence = sequence - 1
                session.sent_sequence = 1 << 20
                self._engines.enter(session_id)
                engine.session = session
                engine.forget_ns = 2**63 - 1
        return super()._enter(session_id, sequence, now_ns)


class _AnySessionsLease(Lessor):
    """Names leases as engines do that keep an id over sessions, and looks at no session number."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._numbers: dict[tuple[str, int], int] = {}

    @staticmethod
    def _check_lease_id(session_id: SessionId, lease_id: LeaseId, field: str) -> None:
        pass

    def _is_known(self, engine: Engine, lease_id: LeaseId) -> bool:  # type: ignore[override]
        self._numbers[lease_id.incarnation, lease_id.number] = lease_id.session_number
        return lease_id.number in engine.leases or lease_id.number in engine.releasing

    def _take_inventory(
        self, engine: Engine, inventory: Sequence[Retention], inherit_until_ns: int, now_ns: int
    ) -> None:
        for each in inventory:
            named = each.lease_id
            self._numbers[named.incarnation, named.number] = named.session_number
        super()._take_inventory(engine, inventory, inherit_until_ns, now_ns)

    def _id_of(self, lease: Lease) -> LeaseId:  # type: ignore[override]
        incarnation = lease.engine.incarnation
        return LeaseId(incarnation, lease.number, self._numbers[incarnation, lease.number])

    def _read_refusal(self, lease: Lease, lease_id: LeaseId, now_ns: int) -> Verdict:
        session = lease.engine.session
        number = 0 if session is None else session.number
        return super()._read_refusal(lease, lease_id._replace(session_number=number), now_ns)


class _NoSessionNumber(Lessor):
    """Grants a lease under whatever session number it is asked for."""

    def _read_refusal(self, lease: Lease, lease_id: LeaseId, now_ns: int) -> Verdict:
        session = lease.engine.session
        number = 0 if session is None else session.number
        return super()._read_refusal(lease, lease_id._replace(session_number=number), now_ns)

    def end_read(self, lease_id: LeaseId, outcome: Any, now_ns: int) -> None:
        lease = self._find(lease_id)
        if lease is not None:
            lease_id = lease_id._replace(session_number=lease.read_session_number)
        super().end_read(lease_id, outcome, now_ns)


class _AddsInventory(_Remembers):
    """Keeps, when an engine registers, what it does not list."""

    def _take_inventory(
        self, engine: Engine, inventory: Sequence[Retention], inherit_until_ns: int, now_ns: int
    ) -> None:
        listed = {retention.lease_id.number for retention in inventory}
        unlisted = [
            Retention(
                self._id_of(lease),
                lease.conversation.key,
                lease.token_count,
                lease.block_count,
                lease.turn,
                self._payload(lease),
            )
            for lease in engine.leases.values()
            if lease.number not in listed
        ]
        super()._take_inventory(engine, [*inventory, *unlisted], inherit_until_ns, now_ns)


class _NoInheritWait(Lessor):
    """Grants at once what an earlier term may have granted."""

    def _inherit_wait_ns(self, *args: Any) -> int:
        return 0


class _InheritWaitOfR(Lessor):
    """Waits only as long as a read takes."""

    def _inherit_wait_ns(self, *args: Any) -> int:
        wait_ns = super()._inherit_wait_ns(*args)
        return min(wait_ns, stretched_ns(self.config.longest_read_ns))


class _InheritWaitFromTakeover(Lessor):
    """Waits from when it became the leader, for the leader's TTL and R."""

    leader_ttl_ns = 3_000_000_000
    _took_over_ns = 0

    def restore(self, snapshot: Snapshot, now_ns: int) -> None:
        self._took_over_ns = now_ns
        super().restore(snapshot, now_ns)

    def _inherit_wait_ns(self, *args: Any) -> int:
        wait_ns = super()._inherit_wait_ns(*args)
        span_ns = stretched_ns(self.leader_ttl_ns + self.config.longest_read_ns)
        return min(wait_ns, max(0, self._took_over_ns + span_ns - self._now_ns))


class _OwnSpansOnly(Lessor):
    """Waits for an earlier term's readers by its own longest read."""

    def register(self, *args: Any, **kwargs: Any) -> None:
        super().register(*args, **{**kwargs, "hold_ns": 0})


class _ReleasesInWait(Lessor):
    """Confirms releases during the inherit wait."""

    def _settle(self, lease: Lease, now_ns: int) -> bool:
        if lease.ended:
            lease.inherit_until_ns = 0
        return super()._settle(lease, now_ns)


class _KeepsWithdrawn(Lessor):
    """Lets an engine that gives a retention up wait for nothing."""

    def _withdraw(self, *args: Any) -> None:
        pass


class _NeverReleasesBegun(Lessor):
    """Takes a lease that was once begun to be read for ever."""

    def end_read(self, lease_id: LeaseId, outcome: Any, now_ns: int) -> None:
        self._advance(now_ns)

    def _settle(self, lease: Lease, now_ns: int) -> bool:
        if lease.read_open:
            lease.read_ns = now_ns
        return super()._settle(lease, now_ns)


class _DeposedAcknowledges(Lessor):
    """Goes on talking to engines when its term is over."""

    def depose(self) -> None:
        pass

    def _is_over(self, now_ns: int) -> bool:
        return False

    def next_deadline_ns(self) -> int | None:
        return self._deadlines.next_ns()


class _EchoWithoutTerm(Lessor):
    """Takes the echo of any term's message for one of its own."""

    def heartbeat(self, session_id: SessionId, sequence: int, **kwargs: Any) -> None:
        kwargs["echo_term"] = self.term
        super().heartbeat(session_id, sequence, **kwargs)


class _AnyonesConversation(Lessor):
    """Does not look at whose lease it is."""

    def begin_read(self, lease_id: LeaseId, key: ConversationKey, now_ns: int) -> ReadAnswer:
        lease = self._find(lease_id)
        return super().begin_read(
            lease_id, key if lease is None else lease.conversation.key, now_ns
        )


MUTANTS = (
    Mutant("no check after DONE", Cores(prefill=_CarelessPrefill), "13"),
    Mutant("EndRead on abort", Cores(reader=_EndOnAbort), "15", 11),
    Mutant("free without waiting for readers", Cores(lessor=_FreesUnderReaders), "9"),
    Mutant("double grant", Cores(lessor=_GrantsAgain), "6"),
    Mutant("notice without lease id", Cores(decode=_NoticeWithoutLease), "10"),
    Mutant("notify-only without a grant", Cores(prefill=_NotifyWithoutGrant), "16"),
    Mutant("trust counted from receipt", Cores(lessor=_TrustsFromReceipt), "4"),
    Mutant("Register proves life", Cores(lessor=_RegisterProvesLife), "4"),
    Mutant("Register fences for ever", Cores(lessor=_RegisterFences), "4"),
    Mutant("Register not counted for (c)", Cores(retentions=_RegisterVouchesNot), "10"),
    Mutant("no trust check before applying a heartbeat", Cores(lessor=_NoTrustCheck), "4", 40),
    Mutant("no session number", Cores(lessor=_NoSessionNumber), "2"),
    Mutant("inventory that adds instead of replacing", Cores(lessor=_AddsInventory), "5", 428),
    Mutant(
        "same lease id after failover",
        Cores(lessor=_AnySessionsLease, retentions=_SameLeaseId),
        "6",
    ),
    Mutant("inherit wait of 0", Cores(lessor=_NoInheritWait), "7"),
    Mutant("inherit wait of R", Cores(lessor=_InheritWaitOfR), "7"),
    Mutant(
        "inherit wait of leader TTL + R from takeover", Cores(lessor=_InheritWaitFromTakeover), "7"
    ),
    Mutant("inherit wait by its own R", Cores(lessor=_OwnSpansOnly), "7"),
    Mutant("release confirmed during the inherit wait", Cores(lessor=_ReleasesInWait), "7"),
    Mutant("withdrawals that nobody hears", Cores(lessor=_KeepsWithdrawn), "11"),
    Mutant("no strike on Release", Cores(retentions=_NoStrike), "12", 48),
    Mutant("D frees on its own cap", Cores(retentions=_FreesOnItsOwnCap), "10", 11),
    Mutant("a begun lease never released", Cores(lessor=_NeverReleasesBegun), "8"),
    Mutant("engine_id without incarnation", Cores(decode=_EngineIdForEver), "17", 33),
    Mutant("deposed leader that acknowledges", Cores(lessor=_DeposedAcknowledges), "9"),
    Mutant("no drift margin", Cores(drift_margin=False), "4, 7, 10"),
    Mutant("window counted from the answer", Cores(prefill=_WindowFromAnswer), "13"),
    Mutant("a grant posted twice", Cores(reader=_ReadsAgain), "13"),
    Mutant("D waits TTL only", Cores(session=_WaitsTtlOnly), "10"),
    Mutant("echo without term", Cores(lessor=_EchoWithoutTerm), "3"),
    Mutant("dead session revived", Cores(lessor=_RaisesTheDead), "4", 40),
    Mutant("heartbeats vouch for what they give up", Cores(retentions=_VouchesForWithdrawn), "10"),
    Mutant("one stride too many", Cores(reader=_OneStrideMore), "S2"),
    Mutant("anyone's conversation", Cores(lessor=_AnyonesConversation), "S4", 133),
)
