"""What goes wrong with etcd, as types; etcd's statuses and words are known here alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import grpc

if TYPE_CHECKING:
    from grpc.aio import AioRpcError

_TRANSIENT = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.RESOURCE_EXHAUSTED,  # too many requests
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.ABORTED,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.DATA_LOSS,
    }
)
_WORDS_MAX = 200
_LOGIN_WORDS = ("invalid auth token", "auth store is old", "user name is empty")


class EtcdError(Exception):
    """A request that etcd did not carry out, or of which that is not known."""


class EtcdUnavailable(EtcdError):
    """No answer from any endpoint in time; the request may have been applied."""


class EtcdRefused(EtcdError):
    """etcd's answer is no, and asking again does not change it: a user, a right, a setting."""


class EtcdNoSpace(EtcdError):
    """etcd's database has reached its quota; it takes no writes until an operator makes room."""


class LoginNeeded(EtcdError):
    """The token of the call is missing or no longer valid; nothing was applied."""


class LeaseGone(EtcdError):
    """The etcd lease expired or was revoked."""


class LeaseExists(EtcdError):
    """An etcd lease of this id exists."""


class WatchEnded(EtcdError):
    """The watch cannot go on where it was: list again, then watch from there."""


def etcd_error(error: AioRpcError) -> EtcdError:
    """Returns the error that a failed call stands for."""
    code, words = error.code(), error.details() or ""
    if code == grpc.StatusCode.UNAUTHENTICATED or any(word in words for word in _LOGIN_WORDS):
        return LoginNeeded(words)
    if "database space exceeded" in words:
        return EtcdNoSpace("etcd is out of space")
    if "requested lease not found" in words:
        return LeaseGone(words)
    if "lease already exists" in words:
        return LeaseExists(words)
    if code == grpc.StatusCode.DEADLINE_EXCEEDED:
        return EtcdUnavailable("no answer in time")
    if code in _TRANSIENT:
        # gRPC tells what failed last at the end of a long story.
        return EtcdUnavailable(words.rpartition("last error: ")[2][:_WORDS_MAX] or code.name)
    return EtcdRefused(words)
