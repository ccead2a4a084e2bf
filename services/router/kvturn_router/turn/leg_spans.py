"""What the spans of a turn's parts say. No I/O."""

from functools import lru_cache
from typing import Final
from urllib.parse import urlsplit

from kvturn.span_wire import Attribute, attribute_bytes
from kvturn.tracing import Span
from kvturn_router.choice.plan import Resolution
from kvturn_router.engines.engine_http import (
    ConnectFault,
    EngineFault,
    Exchange,
    LostFault,
    MalformedFault,
    SilentFault,
)
from kvturn_router.engines.fleet import DECODE, PREFILL
from kvturn_router.errors import EngineRefusal, TurnError
from kvturn_router.turn.read_watch import StuckReadFault

TIME_TO_FIRST_CHUNK: Final = "gen_ai.response.time_to_first_chunk"
"""Seconds from sending a request to the first byte of an answer that is streamed."""

GIVEN_UP: Final = EngineFault("given up")
"""Why a leg failed that was still on its way when its turn ended."""

_COMMON_MAX: Final = 4_096
"""Engines and statuses for which a leg's attributes are kept as written."""

_ENGINES: Final = {PREFILL: "kvturn.prefill.engine", DECODE: "kvturn.decode.engine"}
_KINDS: Final = (
    (StuckReadFault, "stuck_read"),
    (ConnectFault, "connect"),
    (LostFault, "lost"),
    (SilentFault, "silent"),
    (MalformedFault, "malformed"),
)


def resolved(resolution: Resolution | None) -> dict[str, Attribute]:
    """Returns what the span says under which the lease service was asked; None: the turn ended."""
    if resolution is None:
        return {"kvturn.lease_id": "", "kvturn.verdict": ""}
    return {"kvturn.lease_id": resolution.lease_id, "kvturn.verdict": resolution.verdict or ""}


@lru_cache(_COMMON_MAX)
def engine_attributes(role: str, url: str, status: int) -> bytes:
    """Returns what the span of a leg says of its engine, written; `status` is 0 without an answer.

    Legs to an engine say the same, turn after turn.
    """
    parts = urlsplit(url)
    told: dict[str, Attribute] = {
        _ENGINES[role]: url,
        "server.address": parts.hostname or "",
        "server.port": parts.port or (443 if parts.scheme == "https" else 80),
    }
    if status:
        told["http.response.status_code"] = status
    return attribute_bytes(told)


def end_leg(
    span: Span,
    role: str,
    url: str,
    exchange: Exchange | None,
    fault: EngineFault | TurnError | None,
    first_chunk_ns: int = 0,
) -> None:
    """Ends the span of a leg.

    `fault` is why it failed, None if it did not; `first_chunk_ns` the time from its sending to the
    first byte of a streamed answer, 0 if there is none.
    """
    told: dict[str, Attribute] = {}
    if fault is not None:
        told["error.type"] = _kind(fault)
    if first_chunk_ns:
        told[TIME_TO_FIRST_CHUNK] = first_chunk_ns / 1e9
    status = 0 if exchange is None else exchange.status
    written = engine_attributes(role, url, status)
    span.end(told, written=written, fault=None if fault is None else str(fault))


def _kind(fault: EngineFault | TurnError) -> str:
    """Returns the class of an error: an HTTP status, a reason, or what became of the connection."""
    if isinstance(fault, EngineRefusal):
        return str(fault.status)
    if isinstance(fault, TurnError):
        return fault.reason
    if fault is GIVEN_UP:
        return "given_up"
    return next((kind for each, kind in _KINDS if isinstance(fault, each)), "fault")
