"""Domain errors as gRPC statuses; the only place that aborts a call."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

import grpc
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]
from grpc_status import rpc_status

if TYPE_CHECKING:
    from kvturn_lease.errors import LeaseServiceError

ERROR_DOMAIN = "kvturn.v1"


async def abort(
    context: grpc.aio.ServicerContext[object, object], error: LeaseServiceError
) -> NoReturn:
    """Ends the call with the error's status and an ErrorInfo."""
    code = grpc.StatusCode[error.code]
    info = error_details_pb2.ErrorInfo(
        reason=error.reason, domain=ERROR_DOMAIN, metadata=error.metadata
    )
    detail = any_pb2.Any()
    detail.Pack(info)
    number, _ = code.value
    rich = status_pb2.Status(code=number, message=error.message, details=[detail])
    # abort() rather than abort_with_status(): instrumentation watches only the former.
    status = rpc_status.to_status(rich)
    await context.abort(status.code, status.details, status.trailing_metadata)
    raise AssertionError("abort returned")
