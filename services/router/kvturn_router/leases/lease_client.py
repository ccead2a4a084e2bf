"""The router's calls to the lease service, beside its session (router_session.py).

They are made for clients and for reads that seem stuck, not for every turn.
"""

import asyncio
import logging
from typing import Final, NamedTuple, cast

import grpc
import grpc.aio
from google.protobuf import duration_pb2

from kvturn.lease_channels import LeaseChannels, Unanswered
from kvturn.v1 import common_pb2, lease_pb2
from kvturn_router.errors import TurnError
from kvturn_router.request.conversation import ConversationKey
from kvturn_router.verdict import Verdict, verdict_named

logger = logging.getLogger("kvturn.router.lease")

_CALL_DEADLINE_S = 1.0

LISTED_MAX: Final = 1000
"""Conversations that one answer lists."""


class ReadState(NamedTuple):
    """How a lease's read stands.

    `reading_ms` is the time since it began, None if nobody reads. `over` says
    that the lease is gone, so that no read of it can begin.
    """

    reading_ms: int | None
    over: bool


class LeaseClient:
    """Asks the lease service, whichever of its processes leads. Runs and closes `channels`."""

    def __init__(self, channels: LeaseChannels) -> None:
        self._channels = channels
        self._run: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Connects, and finds out who leads, ahead of the first question."""
        self._run = asyncio.get_running_loop().create_task(self._channels.run())

    async def stop(self) -> None:
        """Gives up what is on its way and closes the channels."""
        if self._run is not None:
            self._run.cancel()
            await asyncio.gather(self._run, return_exceptions=True)
        await self._channels.close()

    @property
    def leader_changes(self) -> int:
        """Counts leaders: what one knew the next may not know."""
        return self._channels.leader.changes

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

    async def engines(self) -> list[lease_pb2.Engine]:
        """Returns the engines that have a session. Raises TurnError 503 without an answer."""
        try:
            answer = await self._channels.ask(
                lambda stub: stub.ListEngines,
                lease_pb2.ListEnginesRequest(),
                timeout_s=_CALL_DEADLINE_S,
            )
        except (Unanswered, grpc.aio.AioRpcError) as error:
            raise self._error(error) from None
        return list(answer.engines)

    async def conversations(
        self, limit: int, *, tenant: str | None, model: str | None
    ) -> lease_pb2.ListConversationsResponse:
        """Returns at most `limit` conversations, those with the latest sign of life first.

        `tenant` and `model` are those wanted, None for any. Of those without a
        tenant ("") only such are found that are among the latest of all.
        Raises TurnError 503 without an answer.
        """
        request = lease_pb2.ListConversationsRequest(
            tenant=tenant or "",
            model=model or "",
            page_size=limit if tenant != "" else LISTED_MAX,
        )
        try:
            answer = await self._channels.ask(
                lambda stub: stub.ListConversations, request, timeout_s=_CALL_DEADLINE_S
            )
        except (Unanswered, grpc.aio.AioRpcError) as error:
            raise self._error(error) from None
        if tenant != "":
            return answer
        # The lease service takes no tenant for any tenant.
        own = [one for one in answer.conversations if not one.key.tenant]
        return lease_pb2.ListConversationsResponse(conversations=own[:limit], total_size=len(own))

    def _error(self, error: Unanswered | grpc.aio.AioRpcError) -> TurnError:
        if isinstance(error, Unanswered):
            why, store = str(error), error.store_unavailable
        elif error.code() is grpc.StatusCode.NOT_FOUND:
            return no_conversation()
        elif error.code() is grpc.StatusCode.INVALID_ARGUMENT:
            return TurnError(400, error.details() or "refused", reason="FIELD_INVALID")
        else:
            why, store = self._channels.problem(error), False
        return TurnError(
            503,
            f"The lease service gives no answer: {why}.",
            reason="STORE_UNAVAILABLE" if store else "LEASE_SERVICE_UNREACHABLE",
            retry_after_s=1,
        )

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
            raise self._error(error) from None
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
            raise self._error(error) from None
        return float(answer.kept.ToMilliseconds() / 1000)

    async def turns(self, key: ConversationKey) -> lease_pb2.ListTurnsResponse:
        """Returns a conversation's latest turns, whichever router served them, and its leases.

        Raises TurnError 404 if it is not known, 503 if the service does not answer.
        """
        request = lease_pb2.ListTurnsRequest(conversation=_message(key))
        try:
            return await self._channels.ask(
                lambda stub: stub.ListTurns, request, timeout_s=_CALL_DEADLINE_S
            )
        except (Unanswered, grpc.aio.AioRpcError) as error:
            raise self._error(error) from None


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


def no_conversation() -> TurnError:
    """Returns what a client is told of a conversation that is not known."""
    return TurnError(
        404,
        "No conversation of this id is known for this model and this caller's tenant: it has had "
        "no turn yet, or none for long. Its id is in x-kvturn-conversation of each answer.",
        reason="CONVERSATION_NOT_FOUND",
    )
