"""What the lease service refuses, as typed errors.

Each error knows its gRPC status by name and the reason of its google.rpc.ErrorInfo;
status.py turns it into an answer. Messages and metadata hold names, numbers and limits, never
what a client put into a field.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from collections.abc import Sequence


class LeaseServiceError(Exception):
    """A request that was refused and changed nothing."""

    code: ClassVar[str] = "INTERNAL"
    """Name of the grpc.StatusCode."""
    reason: ClassVar[str] = "INTERNAL"
    """Reason of the ErrorInfo."""

    def __init__(self, message: str, **metadata: object) -> None:
        super().__init__(message)
        self.message = message
        self.metadata = {name: str(value) for name, value in metadata.items()}


class InvalidArgument(LeaseServiceError):
    """A field whose value is malformed, out of range, or contradicts another."""

    code = "INVALID_ARGUMENT"
    reason = "INVALID_ARGUMENT"

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field} {problem}", field=field)
        self.field = field


class SessionFenced(LeaseServiceError):
    """A newer session of the engine exists, or its incarnation was replaced."""

    code = "FAILED_PRECONDITION"
    reason = "SESSION_FENCED"

    def __init__(self) -> None:
        super().__init__("a newer session of this engine exists; register under a higher number")


class SessionExpired(LeaseServiceError):
    """The session's heartbeats stopped for its TTL; it never comes back."""

    code = "FAILED_PRECONDITION"
    reason = "SESSION_EXPIRED"

    def __init__(self) -> None:
        super().__init__("the session's heartbeats stopped for the session TTL; register again")


class SequenceGap(LeaseServiceError):
    """A message of the session was lost."""

    code = "FAILED_PRECONDITION"
    reason = "SEQUENCE_GAP"

    def __init__(self, expected: int, received: int) -> None:
        super().__init__(
            f"message {expected} of the session was expected, {received} came; register again",
            expected=expected,
            received=received,
        )


class IncarnationInUse(LeaseServiceError):
    """Another engine registered under this incarnation; lease ids would collide."""

    code = "FAILED_PRECONDITION"
    reason = "INCARNATION_IN_USE"

    def __init__(self) -> None:
        super().__init__("another engine uses this incarnation; incarnations are unique for ever")


class EnginesExhausted(LeaseServiceError):
    """As many engines as the service takes have a session."""

    code = "RESOURCE_EXHAUSTED"
    reason = "ENGINES_EXHAUSTED"

    def __init__(self, engines_max: int) -> None:
        super().__init__(f"at most {engines_max} engines may have a session", limit=engines_max)


class RoutersExhausted(LeaseServiceError):
    """As many routers as the service takes have a session."""

    code = "RESOURCE_EXHAUSTED"
    reason = "ROUTERS_EXHAUSTED"

    def __init__(self, routers_max: int) -> None:
        super().__init__(f"at most {routers_max} routers may have a session", limit=routers_max)


class LeaseNotFound(LeaseServiceError):
    """No live session holds a lease of this id."""

    code = "NOT_FOUND"
    reason = "LEASE_NOT_FOUND"

    def __init__(self) -> None:
        super().__init__("no live engine session holds this lease")


class ConversationNotFound(LeaseServiceError):
    """The conversation is not known."""

    code = "NOT_FOUND"
    reason = "CONVERSATION_NOT_FOUND"

    def __init__(self) -> None:
        super().__init__("the conversation is not known")


class EngineNotFound(LeaseServiceError):
    """No engine of this id is known."""

    code = "NOT_FOUND"
    reason = "ENGINE_NOT_FOUND"

    def __init__(self) -> None:
        super().__init__("no engine of this id is known")


class CallerUnknown(LeaseServiceError):
    """A caller without a token or certificate that gives it a role."""

    code = "UNAUTHENTICATED"
    reason = "CALLER_UNKNOWN"

    def __init__(self) -> None:
        super().__init__("the caller brings no token and no certificate that is known here")


class RoleRefused(LeaseServiceError):
    """A caller whose roles do not allow the method."""

    code = "PERMISSION_DENIED"
    reason = "ROLE_REFUSED"

    def __init__(self, allowed: Sequence[str]) -> None:
        roles = " or ".join(allowed)
        super().__init__(f"the caller's token or certificate is not that of {roles}", roles=roles)


class EngineIdRefused(LeaseServiceError):
    """An engine whose token or certificate is for other engine ids."""

    code = "PERMISSION_DENIED"
    reason = "ENGINE_ID_REFUSED"

    def __init__(self) -> None:
        super().__init__("the engine's token or certificate is not for this engine id")


class RegisterLate(LeaseServiceError):
    """A session stream on which no Register came."""

    code = "DEADLINE_EXCEEDED"
    reason = "REGISTER_LATE"

    def __init__(self) -> None:
        super().__init__("no Register came within the session TTL")


class HelloLate(LeaseServiceError):
    """A router's session stream on which no hello came."""

    code = "DEADLINE_EXCEEDED"
    reason = "HELLO_LATE"

    def __init__(self) -> None:
        super().__init__("no hello came within the session TTL")


class StreamSlow(LeaseServiceError):
    """An engine or a router that does not read its session stream."""

    code = "RESOURCE_EXHAUSTED"
    reason = "STREAM_SLOW"

    def __init__(self, queued_max: int) -> None:
        super().__init__(
            f"{queued_max} messages wait to be read; open the session again",
            limit=queued_max,
        )


class NotLeader(LeaseServiceError):
    """Another process leads, or may lead by now."""

    code = "UNAVAILABLE"
    reason = "NOT_LEADER"

    def __init__(self, leader: str = "") -> None:
        """`leader` is its HOST:PORT, empty if not known."""
        super().__init__(
            f"this lease service does not lead; ask {leader or 'another one'}",
            **({"leader": leader} if leader else {}),
        )


class StoreUnavailable(LeaseServiceError):
    """etcd does not answer, so nobody can lead, or nobody knows who does."""

    code = "UNAVAILABLE"
    reason = "STORE_UNAVAILABLE"

    def __init__(self) -> None:
        super().__init__("etcd does not answer, so it is not known who leads; try again")


class ShuttingDown(LeaseServiceError):
    """The lease service is about to stop."""

    code = "UNAVAILABLE"
    reason = "SHUTTING_DOWN"

    def __init__(self) -> None:
        super().__init__("the lease service is shutting down")
