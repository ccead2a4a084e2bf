"""The router's calls to the lease service.

None of them can fail a turn: an answer that does not come in time is a verdict.
Signs of life go out beside the turns, one at a time per conversation so that
they arrive in order, and through a bounded queue.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import NamedTuple, cast

import grpc
import grpc.aio
from google.protobuf import duration_pb2

from kvturn.lease_channels import LeaseChannels, Metadata, Unanswered
from kvturn.v1 import common_pb2, lease_pb2
from kvturn_router.conversation import ConversationKey
from kvturn_router.errors import TurnError
from kvturn_router.plan import Resolution
from kvturn_router.verdict import Verdict, verdict_named

logger = logging.getLogger("kvturn.router.lease")

_TOUCHES_MAX = 10_000
"""Conversations with signs of life waiting to be sent; beyond it new ones are dropped."""
_TOUCHES_AT_ONCE = 8
_TOUCH_DEADLINE_S = 1.0
_TOUCH_PAUSE_S_MIN = 0.2
_TOUCH_PAUSE_S_MAX = 1.0
_CALL_DEADLINE_S = 1.0
_LONGEST_READ_MS = 3_000
"""Longest read where the lease service does not say."""


class ReadState(NamedTuple):
    """How a lease's read stands.

    `reading_ms` is the time since it began, None if nobody reads. `over` says
    that the lease is gone, so that no read of it can begin.
    """

    reading_ms: int | None
    over: bool


class LeaseClient:
    """Asks the lease service, whichever of its processes leads.

    It runs `channels`, and closes them. `question_deadline_ms` bounds what a
    turn waits for an answer, all endpoints together.
    """

    def __init__(self, channels: LeaseChannels, *, question_deadline_ms: int) -> None:
        self._channels = channels
        self._names = ", ".join(channels.leader.endpoints)
        self._question_s = question_deadline_ms / 1000
        self._answering = True
        self._touches = _TouchQueue(self._send_touch)
        self._run: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Connects, and finds out who leads, ahead of the first question."""
        self._run = asyncio.get_running_loop().create_task(self._channels.run())

    async def stop(self) -> None:
        """Gives up what is on its way and closes the channels."""
        await self._touches.stop()
        if self._run is not None:
            self._run.cancel()
            await asyncio.gather(self._run, return_exceptions=True)
        await self._channels.close()

    @property
    def leader_changes(self) -> int:
        """Counts leaders: what one knew the next may not know."""
        return self._channels.leader.changes

    async def resolve(
        self, key: ConversationKey, expected_turn: int, metadata: Metadata
    ) -> Resolution:
        """Returns who holds the conversation's KV, or why nobody does. Never raises.

        `expected_turn` is the turn whose retention may still be on its way, 0
        if none: the answer may wait for it, within the question deadline.
        """
        request = lease_pb2.ResolveConversationRequest(conversation=_message(key))
        if expected_turn:
            request.expected_turn = expected_turn
            request.wait.CopyFrom(_duration(self._question_s * 0.6))
        try:
            answer = await self._channels.ask(
                lambda stub: stub.ResolveConversation,
                request,
                timeout_s=self._question_s,
                metadata=metadata,
            )
        except Unanswered as problem:
            self._heard(problem.reason)
            if problem.store_unavailable:
                return Resolution(Verdict.STORE_UNAVAILABLE)
            return Resolution(Verdict.LEASE_SERVICE_UNREACHABLE)
        except grpc.aio.AioRpcError as error:
            self._heard(error.code().name)
            return Resolution(Verdict.LEASE_SERVICE_UNREACHABLE)
        self._heard("")
        if answer.lease_id:
            return Resolution(
                None,
                answer.lease_id,
                answer.http_address,
                answer.longest_read.ToMilliseconds() or _LONGEST_READ_MS,
            )
        return Resolution(verdict_of(answer.verdict) or Verdict.NO_LEASE, "", answer.http_address)

    async def read_state(self, lease_id: str) -> ReadState | None:
        """Returns how the lease's read stands, None if the service does not answer."""
        try:
            answer = await self._channels.ask(
                lambda stub: stub.GetLease,
                lease_pb2.GetLeaseRequest(lease_id=lease_id),
                timeout_s=_CALL_DEADLINE_S,
            )
        except Unanswered:
            return None
        except grpc.aio.AioRpcError as error:
            over = error.code() is grpc.StatusCode.NOT_FOUND
            return ReadState(None, over) if over else None
        if not answer.lease.HasField("reading_for"):
            return ReadState(None, answer.lease.state == lease_pb2.Lease.STATE_ENDING)
        return ReadState(answer.lease.reading_for.ToMilliseconds(), False)

    def turn_began(self, key: ConversationKey) -> bool:
        """Reports a turn in flight; returns whether it will be told.

        If it is, `turn_ended` must follow.
        """
        return self._touches.add(key, 1)

    def turn_ended(self, key: ConversationKey) -> None:
        """Reports the end of a turn that `turn_began` has taken."""
        self._touches.add(key, -1, always=True)

    async def end_conversation(self, key: ConversationKey) -> int:
        """Ends a conversation; returns how many leases that ended.

        Raises TurnError 503 if the service does not answer, 400 if it refuses.
        """
        request = lease_pb2.EndConversationRequest(conversation=_message(key))
        try:
            answer = await self._channels.ask(
                lambda stub: stub.EndConversation, request, timeout_s=_CALL_DEADLINE_S
            )
        except (Unanswered, grpc.aio.AioRpcError) as error:
            raise _turn_error(error) from None
        return int(answer.leases_ended)

    async def keep_alive(self, key: ConversationKey, absence_s: float | None) -> float:
        """Keeps a conversation from becoming idle; returns for how many seconds.

        Raises TurnError 404 if it is not known, 503 if the service does not answer.
        """
        request = lease_pb2.KeepConversationAliveRequest(conversation=_message(key))
        if absence_s is not None:
            request.absence.CopyFrom(_duration(absence_s))
        try:
            answer = await self._channels.ask(
                lambda stub: stub.KeepConversationAlive, request, timeout_s=_CALL_DEADLINE_S
            )
        except (Unanswered, grpc.aio.AioRpcError) as error:
            raise _turn_error(error) from None
        return float(answer.kept.ToMilliseconds() / 1000)

    async def turns(self, key: ConversationKey) -> list[common_pb2.TurnReport]:
        """Returns a conversation's latest turns, oldest first, whichever router served them.

        Raises TurnError 404 if it is not known, 503 if the service does not answer.
        """
        request = lease_pb2.ListTurnsRequest(conversation=_message(key))
        try:
            answer = await self._channels.ask(
                lambda stub: stub.ListTurns, request, timeout_s=_CALL_DEADLINE_S
            )
        except (Unanswered, grpc.aio.AioRpcError) as error:
            raise _turn_error(error) from None
        return list(answer.turns)

    async def _send_touch(self, key: ConversationKey, delta: int) -> bool:
        request = lease_pb2.TouchConversationRequest(
            conversation=_message(key), turns_in_flight_delta=delta
        )
        try:
            await self._channels.ask(
                lambda stub: stub.TouchConversation, request, timeout_s=_TOUCH_DEADLINE_S
            )
        except Unanswered as problem:
            # What was not answered in time may have been counted. Counted twice, an end does no
            # harm; a beginning would be a turn that never ends.
            return delta > 0 and problem.reason == "DEADLINE_EXCEEDED"
        except grpc.aio.AioRpcError as error:
            return error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED
        return True

    def _heard(self, problem: str) -> None:
        # One line per change, not per turn.
        if not problem and not self._answering:
            logger.warning("the lease service at %s answers again", self._names)
        elif problem and self._answering:
            logger.warning(
                "no answers from the lease service at %s (%s); turns recompute until there are",
                self._names,
                in_words(problem),
            )
        self._answering = not problem


class _TouchQueue:
    """Signs of life waiting to be sent: one number per conversation.

    `send` tells one and returns whether it need not be tried again. What cannot be told waits until
    it can: a turn whose end is never told keeps its conversation's KV for the longest hold.
    """

    def __init__(self, send: Callable[[ConversationKey, int], Awaitable[bool]]) -> None:
        self._send = send
        self._waiting: dict[ConversationKey, int] = {}
        self._sending: set[ConversationKey] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    def add(self, key: ConversationKey, delta: int, *, always: bool = False) -> bool:
        """Adds to what is to be told of a conversation; returns whether it will be told.

        `always` takes it beyond the limit: it undoes what was taken before.
        """
        if not always and len(self._waiting) >= _TOUCHES_MAX:
            return False
        self._waiting[key] = self._waiting.get(key, 0) + delta
        if len(self._tasks) < _TOUCHES_AT_ONCE:
            task = asyncio.get_running_loop().create_task(self._drain())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return True

    async def stop(self) -> None:
        """Drops what waits."""
        self._waiting.clear()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _drain(self) -> None:
        pause_s = _TOUCH_PAUSE_S_MIN
        while True:
            key = next((key for key in self._waiting if key not in self._sending), None)
            if key is None:
                return
            delta = self._waiting.pop(key)
            self._sending.add(key)
            try:
                told = await self._send(key, delta)
            finally:
                self._sending.discard(key)
            if told:
                pause_s = _TOUCH_PAUSE_S_MIN
                continue
            self._put_back(key, delta)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _TOUCH_PAUSE_S_MAX)

    def _put_back(self, key: ConversationKey, delta: int) -> None:
        delta += self._waiting.pop(key, 0)
        if delta:  # else all turns that began have ended, and nobody heard of either
            self._waiting[key] = delta


def in_words(reason: str) -> str:
    """Returns what the reason of a refusal means to whoever reads it."""
    words = {
        "NOT_LEADER": "none of its processes leads now",
        "STORE_UNAVAILABLE": "its store does not answer",
        "SHUTTING_DOWN": "it is shutting down",
    }
    return words.get(reason, reason)


def verdict_of(number: int) -> Verdict | None:
    """Returns the verdict of a proto number, None for unspecified or unknown ones."""
    try:
        name = common_pb2.Verdict.Name(number)
    except ValueError:
        return None
    return verdict_named(name.removeprefix("VERDICT_").lower())


def proto_verdict(verdict: Verdict) -> common_pb2.Verdict:
    """Returns the proto value of a verdict."""
    number = common_pb2.Verdict.Value(f"VERDICT_{verdict.upper()}")
    return cast("common_pb2.Verdict", number)


def _message(key: ConversationKey) -> common_pb2.ConversationKey:
    return common_pb2.ConversationKey(
        tenant=key.tenant, model=key.model, conversation_id=key.conversation_id
    )


def _duration(seconds: float) -> duration_pb2.Duration:
    duration = duration_pb2.Duration()
    duration.FromMilliseconds(round(seconds * 1000))
    return duration


def _turn_error(error: Unanswered | grpc.aio.AioRpcError) -> TurnError:
    if isinstance(error, Unanswered):
        why = error.reason
    elif error.code() is grpc.StatusCode.NOT_FOUND:
        return TurnError(404, "No such conversation is held.", reason="CONVERSATION_NOT_FOUND")
    elif error.code() is grpc.StatusCode.INVALID_ARGUMENT:
        return TurnError(400, error.details() or "refused", reason="FIELD_INVALID")
    else:
        why = error.code().name
    store = why == "STORE_UNAVAILABLE"
    return TurnError(
        503,
        f"The lease service does not answer: {in_words(why)}.",
        reason=why if store else "LEASE_SERVICE_UNREACHABLE",
        retry_after_s=1,
    )
