"""A prefill engine: the real reader, over a modelled scheduler and ranks that read memory."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias, cast

from kvturn.v1 import common_pb2, lease_pb2
from kvturn_connector.digest import common_prefix_tokens
from kvturn_connector.reader import Answer, End, Read, State
from sim.checkers import Transfer
from sim.decode import SECRET, scope_of
from sim.world import MS, Node, S

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sim.decode import Decode
    from sim.lease_service import LeaseService
    from sim.simulation import Simulation

BLOCK_SIZE = 16
THRESHOLD_TOKENS = 16
END_READ_ATTEMPTS = 3
END_READ_TIMEOUT_NS = S

COMPLETED = lease_pb2.READ_OUTCOME_COMPLETED
FAILED = lease_pb2.READ_OUTCOME_FAILED
TOO_LONG = lease_pb2.READ_OUTCOME_TOO_LONG


@dataclass(slots=True, eq=False)
class Request:
    """One turn's prefill leg."""

    request_id: str
    key: tuple[str, str]
    """Tenant and conversation."""
    prompt: Sequence[int]
    lease_id: str
    done: Callable[[int, int], None]
    """Takes the reused tokens and the verdict."""
    asked_ns: int = 0
    answered_ns: int = 0
    finished: bool = False
    job: ReadJob | None = None


@dataclass(slots=True, eq=False)
class ReadJob:
    """A posted read, as the ranks know it."""

    request: Request
    limit_ns: int
    """When it stops counting, by the engine's clock."""
    nixl_engine_id: str
    block_ids: Sequence[int]
    common_tokens: int
    transfers: list[Transfer] = field(default_factory=list)
    outcomes: list[int] = field(default_factory=list)


Result: TypeAlias = Answer | int


class Prefill(Node):
    """One engine process: the scheduler's side."""

    rank_type: type[Rank]

    def __init__(self, sim: Simulation, name: str, drift_ppm: int, offset_ns: int) -> None:
        super().__init__(sim.world, name, drift_ppm, offset_ns)
        self.sim = sim
        self.lateness_ns = sim.weather.lateness_ns
        # The ranks are processes of their own, on the same machine.
        self.ranks = [
            self.rank_type(self, f"{name}r{index}", drift_ppm, offset_ns)
            for index in range(sim.weather.ranks)
        ]
        self._boot()

    def _boot(self) -> None:
        sim = self.sim
        self.reader = sim.cores.reader(sim.weather.question_ns, THRESHOLD_TOKENS, BLOCK_SIZE)
        self._requests: dict[str, Request] = {}
        self._answers: list[tuple[Request, Result]] = []
        self._asking: dict[Request, None] = {}
        self.lead = sim.random.randrange(len(sim.services))

    def crash(self) -> None:
        """Ends the process and its ranks."""
        super().crash()
        for request in self._requests.values():
            if request.job is not None:
                for transfer in request.job.transfers:
                    self.sim.checkers.dropped(transfer)
        for rank in self.ranks:
            rank.crash()

    def restart(self) -> None:
        """Starts the engine anew."""
        super().restart()
        for rank in self.ranks:
            rank.restart()
        self._boot()

    # ---- the question --------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """A prefill leg arrives."""
        self._requests[request.request_id] = request
        if not request.lease_id:
            self.compute(request, 0, 0)
            return
        request.asked_ns = self.clock_ns()
        self.reader.ask(
            request.request_id, request.lease_id, len(request.prompt), "", request.asked_ns
        )
        tenant, conversation_id = request.key
        question = lease_pb2.BeginReadRequest(
            lease_id=request.lease_id,
            conversation=common_pb2.ConversationKey(
                tenant=tenant, model="m", conversation_id=conversation_id
            ),
        )
        self._asking[request] = None
        service = self.sim.leader_of(self)
        self.sim.network.ask(
            self,
            service,
            lambda: service.begin_read(question),
            lambda answer: self._on_answer(request, service, answer),
        )
        question_ns = self.sim.weather.question_ns
        # The client's own deadline may end after the reader's: what comes then is given back.
        self.at_clock(request.asked_ns + question_ns, self._on_deadline, request, service)
        self.at_clock(request.asked_ns + question_ns, self._schedule, request)

    def _on_answer(
        self,
        request: Request,
        service: LeaseService,
        response: lease_pb2.BeginReadResponse | Exception,
    ) -> None:
        if request not in self._asking:
            return  # it has been answered, or its time is over
        del self._asking[request]
        request.answered_ns = self.clock_ns()
        if isinstance(response, Exception):
            self.sim.follow(self, service, response)
            self._take(request, common_pb2.VERDICT_LEASE_SERVICE_UNREACHABLE)
            return
        retention = response.retention
        common_tokens = 0
        if response.granted:
            common_tokens = common_prefix_tokens(
                request.prompt,
                scope_of(request.key[0]),
                SECRET,
                retention.digests.values,
                retention.token_count,
            )
            self.sim.checkers.compared(request.prompt, request.lease_id, common_tokens)
        self._take(
            request,
            Answer(
                granted=response.granted,
                verdict=response.verdict,
                retention=retention,
                nixl=response.nixl,
                longest_read_ns=response.longest_read.ToNanoseconds(),
                common_tokens=common_tokens,
            ),
        )

    def _on_deadline(self, request: Request, service: LeaseService) -> None:
        if request in self._asking:
            del self._asking[request]
            self.sim.follow(self, service, None)
            self._take(request, common_pb2.VERDICT_LEASE_SERVICE_UNREACHABLE)

    def _take(self, request: Request, result: Result) -> None:
        self._answers.append((request, result))
        self.after(MS + int(self.sim.random.random() * 10 * MS), self._schedule, request)

    # ---- the scheduler -------------------------------------------------------------------

    def _schedule(self, request: Request) -> None:
        """One scheduling pass, as far as it is about this request."""
        self._take_answers()
        if self._requests.get(request.request_id) is not request or request.job is not None:
            return
        if request.finished:
            return
        local_tokens = BLOCK_SIZE if self.sim.chance(0.2) else 0
        read = self.reader.decide(request.request_id, local_tokens, self.clock_ns())
        self.send_ends()
        if read is None:
            return
        if read.state is not State.GRANTED:
            self.compute(request, 0, read.verdict)
        elif self.sim.mishap(0.03):
            self.reader.decline(request.request_id, common_pb2.VERDICT_BELOW_THRESHOLD)
            self.send_ends()
            self.compute(request, 0, read.verdict)
        else:
            self._post(request, read, local_tokens)

    def _take_answers(self) -> None:
        answers, self._answers = self._answers, []
        for request, answer in answers:
            if isinstance(answer, int):
                self.reader.unanswered(request.request_id, request.asked_ns, answer)
            else:
                self.reader.answered(request.request_id, request.lease_id, request.asked_ns, answer)
        self.send_ends()

    def _post(self, request: Request, read: Read, local_tokens: int) -> None:
        answer = read.answer
        assert answer is not None
        self.reader.posted(request.request_id, answer.common_tokens - local_tokens, 1)
        count = -(-answer.common_tokens // BLOCK_SIZE)
        job = request.job = ReadJob(
            request,
            self.limit_ns(request, read),
            answer.nixl.nixl_engine_id,
            list(answer.retention.groups[0].block_ids)[:count],
            answer.common_tokens,
        )
        for rank in self.ranks:
            rank.after(self.sim.post_delay_ns(), rank.post, job)

    def limit_ns(self, request: Request, read: Read) -> int:
        """Returns until when the ranks may use what they read."""
        return read.time_is_up_ns

    def on_rank_ended(self, job: ReadJob, outcome: int) -> None:
        """A rank ended its part of a read."""
        job.outcomes.append(outcome)
        if len(job.outcomes) < len(self.ranks):
            return
        request = job.request
        read = self.reader.get(request.request_id)
        worst = max(job.outcomes)
        used = worst == COMPLETED and read is not None and not read.abandoned
        self.reader.ended(request.request_id, cast("lease_pb2.ReadOutcome", worst), 1, 1)
        if used:
            self.sim.checkers.used(
                job.transfers, request.prompt, request.key, job.common_tokens, request.lease_id
            )
        self.send_ends()
        if request.finished:
            self._forget(request)
        else:
            assert read is not None
            if self.sim.mishap(0.1):  # it is preempted, and scheduled once more
                again = self.reader.decide(request.request_id, 0, self.clock_ns())
                if again is not None and again.state is State.GRANTED:
                    self._post(request, again, 0)
                    return
            self.compute(request, read.reused_tokens, read.verdict)

    def compute(self, request: Request, reused_tokens: int, verdict: int) -> None:
        """Computes what was not read, and is done."""
        request.finished = True
        self.after(20 * MS, self._finish, request, reused_tokens, verdict)

    def _finish(self, request: Request, reused_tokens: int, verdict: int) -> None:
        self.reader.gone(request.request_id)
        self.send_ends()
        self._forget(request)
        request.done(reused_tokens, verdict)

    def _forget(self, request: Request) -> None:
        self._requests.pop(request.request_id, None)

    def abort(self, request: Request) -> None:
        """The router hangs up: nobody wants the answer any more. The transfers go on."""
        if request.finished or self._requests.get(request.request_id) is not request:
            return
        request.finished = True
        self.reader.gone(request.request_id)
        self.send_ends()
        if request.job is None:
            self._forget(request)

    # ---- the end -------------------------------------------------------------------------

    def send_ends(self) -> None:
        """Sends the EndReads that are due."""
        for end in self.reader.take_ends():
            self._end_read(end, 1, [])

    def _end_read(self, end: End, attempt: int, answered: list[bool]) -> None:
        if answered or attempt > END_READ_ATTEMPTS:
            return
        service = self.sim.leader_of(self)
        request = end.request

        def on_answer(answer: object) -> None:
            if isinstance(answer, Exception):
                self.sim.follow(self, service, answer)
                self.after(200 * MS, self._end_read, end, attempt + 1, answered)
            else:
                answered.append(True)

        serve = functools.partial(service.end_read, request)
        self.sim.network.ask(self, service, serve, on_answer, END_READ_TIMEOUT_NS)
        self.after(END_READ_TIMEOUT_NS, self._end_read, end, attempt + 1, answered)

    def counts(self) -> dict[str, int]:
        """Returns what must be zero once nothing is wanted any more."""
        return {"reads": len(self.reader), "requests": len(self._requests)}


class Rank(Node):
    """One worker process. Its memory is written by transfers, whether it runs or not."""

    def __init__(self, prefill: Prefill, name: str, drift_ppm: int, offset_ns: int) -> None:
        super().__init__(prefill.world, name, drift_ppm, offset_ns)
        self._prefill = prefill
        self._sim = prefill.sim

    def over(self, job: ReadJob) -> bool:
        """True if the read must not be used any more."""
        return self.clock_ns() > job.limit_ns

    def may_post(self, job: ReadJob) -> bool:
        """False if posting is of no use; no safety hangs on it."""
        return not self.over(job)

    def post(self, job: ReadJob) -> None:
        """Starts the transfer of this rank's part."""
        sim = self._sim
        if not self.may_post(job):
            self.end(job, TOO_LONG)
            return
        source: Decode | None = sim.fabric.get(job.nixl_engine_id)
        kept = sim.checkers.of_lease(job.request.lease_id)
        assert kept is not None
        if source is None or sim.mishap(sim.weather.failing_reads):
            self.after(10 * MS, self.end, job, FAILED)
            return
        window_ns = self._prefill.true_ns(job.limit_ns + 1) - 1
        intact = source is kept.engine and kept.intact()
        intact = intact and kept.blocks[: len(job.block_ids)] == list(job.block_ids)
        transfer = Transfer(kept, job.request.lease_id, self._prefill, window_ns, intact)
        job.transfers.append(transfer)
        sim.checkers.posted(transfer)
        # Not an event of this process: the transfer goes on while it is paused.
        sim.world.push(
            sim.world.now_ns + sim.transfer_ns(),
            None,
            self._complete,
            job,
            transfer,
            source,
            (source.epoch, self.epoch),
        )

    def _complete(
        self,
        job: ReadJob,
        transfer: Transfer,
        source: Decode,
        epochs: tuple[int, int],
    ) -> None:
        source_epoch, own_epoch = epochs
        if self.epoch != own_epoch:
            return
        if source.epoch != source_epoch:
            self._sim.checkers.dropped(transfer)
            self.after(10 * MS, self.end, job, FAILED)
            return
        self._sim.checkers.completed(transfer)
        self.notify(source, job)
        self.after(MS + int(self._sim.random.random() * 5 * MS), self.see_done, job)

    def notify(self, source: Decode, job: ReadJob) -> None:
        """The notice that comes with the transfer's last byte."""
        sim = self._sim
        if not sim.mishap(0.02):
            lease_id = job.request.lease_id
            sim.world.push(
                sim.world.now_ns + sim.network.delay_ns(), source, source.on_notice, lease_id
            )

    def see_done(self, job: ReadJob) -> None:
        """The rank polls, and finds its transfer complete; now it looks at the clock."""
        if self.over(job):
            self._sim.checkers.late(job.transfers)
            self.end(job, TOO_LONG)
        else:
            self.end(job, COMPLETED)

    def end(self, job: ReadJob, outcome: int) -> None:
        """Tells the scheduler how this rank's part ended."""
        # Not `self.after`: it is the scheduler's process that learns of it.
        self._prefill.after(5 * MS, self._prefill.on_rank_ended, job, outcome)


Prefill.rank_type = Rank
