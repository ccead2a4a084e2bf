"""The router's session with the lease service.

One stream to whichever process of the lease service leads. Turns begin and end
on it; what gathers in one pass of the event loop goes out in one message. The
lease service answers each turn with what can be reused, numbers it, and pushes
the engines that it knows. No turn can fail because of any of this: one that is
not answered within the question deadline goes on without reuse.

    turn = session.begin(key, points, recognise=False, reuse=True)
    resolution = await turn.resolved()
    ...
    session.end(turn, retains=True, report=report)
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from kvturn.lease_channels import LeaseChannels
from kvturn.v1 import common_pb2
from kvturn_router.conversation import ConversationKey
from kvturn_router.plan import Resolution


class Retained(NamedTuple):
    """A turn's retention was granted a lease. Tokens; 0 where not known."""

    token_count: int
    prompt_tokens: int
    local_cached_tokens: int


class AnnouncedEngine(NamedTuple):
    """An engine as its session with the lease service describes it.

    `role` is "prefill", "decode" or "both". `http_address` is as the engine
    says, unchecked, "" if it says none.
    """

    engine_id: str
    role: str
    http_address: str
    draining: bool


class EngineListener(Protocol):
    """Hears which engines have sessions with the lease service."""

    def all_announced(self, engines: Sequence[AnnouncedEngine]) -> None:
        """These are all that have a session now; called at the start of each router session."""

    def announced(self, engines: Sequence[AnnouncedEngine]) -> None:
        """These came or changed."""

    def gone(self, engine_ids: Sequence[str]) -> None:
        """The sessions of these ended."""


class SessionTurn:
    """One turn in flight, as the lease service knows it.

    `conversation_id` is the id that was asked with until the answer brings the
    right one, `number` the turn's number in it, 0 until then. Both are taken
    from an answer that comes too late for the plan, too.
    """

    turn_id: int
    key: ConversationKey
    conversation_id: str
    number: int
    resolution: Resolution | None
    """What `resolved` returns, as soon as it is settled."""
    retained: Retained | None

    async def resolved(self) -> Resolution:
        """Waits, at most for the question deadline, for what can be reused. Never raises.

        Without an answer in time the verdict is LEASE_SERVICE_UNREACHABLE or
        STORE_UNAVAILABLE.
        """
        raise NotImplementedError


class RouterSession:
    """Tells the lease service of this router's turns, and asks it about them."""

    def __init__(
        self,
        channels: LeaseChannels,
        *,
        router_id: str,
        question_deadline_ms: int,
        listener: EngineListener,
        clock_ns: Callable[[], int],
    ) -> None:
        raise NotImplementedError

    def start(self) -> None:
        """Opens the session, and whenever it ends the next one."""

    async def stop(self) -> None:
        """Ends the session; turns in flight are over with it."""

    def begin(
        self,
        key: ConversationKey,
        points: Sequence[bytes],
        *,
        recognise: bool,
        reuse: bool,
        on_retained: Callable[[Retained], None] | None = None,
    ) -> SessionTurn:
        """Tells that a turn begins; `end` must follow, whatever happens.

        `points`, `recognise` and `reuse` are as in lease.proto's BeginTurn.
        `on_retained` is called once the turn's retention has been granted,
        which may be a while after the turn's end, or never.
        """
        raise NotImplementedError

    def end(
        self,
        turn: SessionTurn,
        *,
        retains: bool = False,
        report: common_pb2.TurnReport | None = None,
    ) -> None:
        """Tells that a turn is over.

        `retains`: decode will retain its KV. `report`: how it was served, None
        if it was not.
        """
        raise NotImplementedError

    @property
    def sessions(self) -> int:
        """Counts sessions begun: what was known in one may be forgotten in the next."""
        raise NotImplementedError
