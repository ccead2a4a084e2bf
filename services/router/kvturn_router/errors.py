"""What ends a turn without an answer, in one shape for both fronts.

A `TurnError` is the router's own refusal or failure. `EngineRefusal` is an
engine's answer that is not a success: its status, body and type travel to the
client as they are.
"""

from collections.abc import Sequence
from typing import Final

import msgspec

_SHOWN_MAX: Final = 256
"""Most characters of a client's own that an error repeats."""

Headers = Sequence[tuple[bytes, bytes]]
"""Header names in lower case, with their values, in the order they came."""

_KINDS = {
    400: "invalid_request_error",
    404: "invalid_request_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
    501: "invalid_request_error",
}


class TurnError(Exception):
    """Refuses or ends a turn.

    `status` is the HTTP status (400 to 599), `reason` the ErrorInfo reason of
    the gRPC front (upper snake case), `param` the field at fault, if one is,
    `retry_after_s` what Retry-After says, if anything.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        reason: str,
        param: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.reason = reason
        self.param = param
        self.retry_after_s = retry_after_s

    def body(self) -> bytes:
        """Returns the error in OpenAI's JSON shape."""
        return msgspec.json.encode(
            {
                "error": {
                    "message": self.message,
                    "type": _KINDS.get(self.status, "server_error"),
                    "param": self.param,
                    "code": self.status,
                }
            }
        )

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Returns the headers of an HTTP answer that carries the error."""
        headers = [(b"content-type", b"application/json")]
        if self.retry_after_s is not None:
            headers.append((b"retry-after", b"%d" % self.retry_after_s))
        return headers


class ErrorCounts:
    """How many errors one front has answered, by reason. The code's reasons are few."""

    def __init__(self) -> None:
        self.by_reason: dict[str, int] = {}

    def add(self, error: TurnError) -> None:
        """Counts an error that is answered."""
        self.by_reason[error.reason] = self.by_reason.get(error.reason, 0) + 1


def shown(text: str) -> str:
    """Returns what a client wrote as an error repeats it: its beginning, if it is long."""
    return text if len(text) <= _SHOWN_MAX else f"{text[:_SHOWN_MAX]}..."


def bad_field(name: str, message: str) -> TurnError:
    """Returns the 400 that names a field of the request, which may be a client's own word."""
    return TurnError(400, message, reason="FIELD_INVALID", param=shown(name))


class EngineRefusal(TurnError):
    """An engine answered with something other than success.

    `answer_headers` are the headers worth relaying, `answer` the body as the
    engine sent it.
    """

    def __init__(self, status: int, headers: Headers, answer: bytes) -> None:
        super().__init__(status, f"the engine answered {status}", reason="ENGINE_REFUSED")
        self.answer_headers = headers
        self.answer = answer

    def body(self) -> bytes:
        """Returns the engine's own body."""
        return self.answer

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Returns the engine's own headers that are worth relaying."""
        return list(self.answer_headers)
