"""How an error ends a gRPC call: a status, an ErrorInfo, and when to come again."""

from collections.abc import Mapping
from typing import Any, Final, NoReturn

import grpc
import grpc.aio
import msgspec
from google.protobuf import any_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]
from grpc_status import rpc_status

from kvturn_router.errors import EngineRefusal, TurnError
from kvturn_router.request.spans import UNREADABLE

Context = grpc.aio.ServicerContext[Any, Any]

ERROR_DOMAIN: Final = "kvturn.v1"

# Clients refuse more than 8 KiB of metadata by default, some of them at random. The details are
# sent in base64, the message once more within them and percent-encoded beside them.
_BODY_BYTES_SHOWN_MAX: Final = 2048
_MESSAGE_SHOWN_MAX: Final = 512

_CODES: Final[Mapping[int, grpc.StatusCode]] = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    408: grpc.StatusCode.DEADLINE_EXCEEDED,
    409: grpc.StatusCode.ABORTED,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    415: grpc.StatusCode.INVALID_ARGUMENT,
    422: grpc.StatusCode.INVALID_ARGUMENT,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    499: grpc.StatusCode.CANCELLED,
    501: grpc.StatusCode.UNIMPLEMENTED,
    502: grpc.StatusCode.UNAVAILABLE,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}


def status_code(http_status: int) -> grpc.StatusCode:
    """Returns the gRPC code of an HTTP error status."""
    code = _CODES.get(http_status)
    if code is not None:
        return code
    client = 400 <= http_status < 500
    return grpc.StatusCode.FAILED_PRECONDITION if client else grpc.StatusCode.INTERNAL


async def abort(context: Context, error: TurnError) -> NoReturn:
    """Ends a call with an error's status and details."""
    code = status_code(error.status)
    message = _message(error)
    number: int = code.value[0]
    rich = rpc_status.to_status(
        status_pb2.Status(code=number, message=message, details=_details(error))
    )
    await context.abort(code, message, rich.trailing_metadata)
    raise AssertionError("abort raises")


def _details(error: TurnError) -> list[any_pb2.Any]:
    shown = error.body()[:_BODY_BYTES_SHOWN_MAX].decode(errors="replace")
    info = error_details_pb2.ErrorInfo(
        reason=error.reason,
        domain=ERROR_DOMAIN,
        metadata={"http_status": str(error.status), "body": shown},
    )
    if error.param is not None:
        info.metadata["field"] = error.param
    retry_after = dict(error.headers()).get(b"retry-after", b"")
    if not retry_after:
        return [_packed(info)]
    info.metadata["retry_after"] = retry_after.decode("latin-1")
    if not (retry_after.isdigit() and len(retry_after) < 10):
        return [_packed(info)]
    again = error_details_pb2.RetryInfo()
    again.retry_delay.FromSeconds(int(retry_after))
    return [_packed(info), _packed(again)]


def _packed(detail: Message) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(detail)
    return packed


def _message(error: TurnError) -> str:
    """Returns what to say in a line: an engine's own words, where they can be found."""
    if not isinstance(error, EngineRefusal):
        return error.message
    try:
        answer = msgspec.json.decode(error.answer)
    except (*UNREADABLE, UnicodeDecodeError):
        return error.message
    if isinstance(answer, dict):
        inner = answer.get("error", answer)
        words = inner.get("message") if isinstance(inner, dict) else None
        if isinstance(words, str) and words:
            return f"{error.message}: {words[:_MESSAGE_SHOWN_MAX]}"
    return error.message
