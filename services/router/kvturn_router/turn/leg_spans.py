"""What the spans of a turn's parts say. No I/O."""

from functools import lru_cache
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

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

if TYPE_CHECKING:
    from kvturn.span_wire import Attribute

TIME_TO_FIRST_CHUNK: Final = "gen_ai.response.time_to_first_chunk"
"""Seconds from sending a request to the first byte of an answer that is streamed."""

GIVEN_UP: Final = EngineFault("given up")
"""Why a leg failed that was still on its way when its turn ended."""

_ENGINES: Final = {PREFILL: "kvturn.prefill.engine", DECODE: "kvturn.decode.engine"}
_KINDS: Final = (
    (StuckReadFault, "stuck_read"),
    (ConnectFault, "connect"),
    (LostFault, "lost"),
    (SilentFault, "silent"),
    (MalformedFault, "malformed"),
)


def resolved(resolution: Resolution | None) -> dict[str, "Attribute"]:
    """Returns what the span says under which the lease service was asked; None: the turn ended."""
    if resolution is None:
        return {"kvturn.lease_id": "", "kvturn.verdict": ""}
    return {"kvturn.lease_id": resolution.lease_id, "kvturn.verdict": resolution.verdict or ""}


def leg_attributes(
    role: str, url: str, exchange: Exchange | None, fault: EngineFault | TurnError | None
) -> dict[str, "Attribute"]:
    """Returns what the span of a leg says; `fault` is why it failed, None if it did not."""
    told = dict(_place(role, url))
    if exchange is not None:
        told["http.response.status_code"] = exchange.status
    if fault is not None:
        told["error.type"] = _kind(fault)
    return told


@lru_cache(4_096)
def _place(role: str, url: str) -> dict[str, "Attribute"]:
    parts = urlsplit(url)
    return {
        _ENGINES[role]: url,
        "server.address": parts.hostname or "",
        "server.port": parts.port or (443 if parts.scheme == "https" else 80),
    }


def _kind(fault: EngineFault | TurnError) -> str:
    """Returns the class of an error: an HTTP status, a reason, or what became of the connection."""
    if isinstance(fault, EngineRefusal):
        return str(fault.status)
    if isinstance(fault, TurnError):
        return fault.reason
    if fault is GIVEN_UP:
        return "given_up"
    return next((kind for each, kind in _KINDS if isinstance(fault, each)), "fault")
