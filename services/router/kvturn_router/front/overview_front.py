"""What is going on, for operators and the page: `/kvturn/v1/summary`, `/kvturn/v1/conversations`.

Both are put together when somebody asks, and bounded whoever asks.
"""

import os
import re
import socket
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Final
from urllib.parse import parse_qs

import msgspec

from kvturn.v1 import common_pb2, lease_pb2
from kvturn_router.engines.fleet import EngineView
from kvturn_router.errors import TurnError, bad_field
from kvturn_router.front.gate import Gate
from kvturn_router.front.http_wire import HttpAnswer, HttpRequest
from kvturn_router.front.viewers import Viewers
from kvturn_router.leases.lease_client import LISTED_MAX
from kvturn_router.leases.turn_report import entry_of
from kvturn_router.request.conversation import ConversationEntry, checked_name
from kvturn_router.turn.forward import Forwarder
from kvturn_router.turn.recent_turns import RecentTurns

SUMMARY: Final = "/kvturn/v1/summary"
CONVERSATIONS: Final = "/kvturn/v1/conversations"

_LISTED: Final = 100
"""Conversations that are listed if the caller does not say how many."""

_HEARD_NS: Final = 1_000_000_000
"""How long what the lease service said of engines is told again."""
_JSON: Final = ((b"content-type", b"application/json"), (b"cache-control", b"no-store"))
_ROLES: Final = {
    common_pb2.ENGINE_ROLE_PREFILL: "prefill",
    common_pb2.ENGINE_ROLE_DECODE: "decode",
    common_pb2.ENGINE_ROLE_BOTH: "both",
}
_NO_ADDRESS: Final = "it announces no address and role that this router can use"


class OverviewFront:
    """Answers both routes.

    `trace_url` is where a turn's trace is shown, with `{trace_id}` in it, "" for
    nowhere. `one_of_several` says that there are other processes on the same port.
    """

    def __init__(
        self,
        forwarder: Forwarder,
        *,
        gate: Gate,
        viewers: Viewers,
        trace_url: str,
        one_of_several: bool,
    ) -> None:
        self._fleet = forwarder.fleet
        self._lease = forwarder.lease
        self._book = forwarder.book
        self._recent = forwarder.recent
        self._clock_ns = forwarder.clock_ns
        self._reuse = "lease" if forwarder.lease else "stock" if forwarder.stock else "none"
        self._gate = gate
        self._viewers = viewers
        self._trace_url = trace_url
        self._one_of_several = one_of_several
        self._began_ns = forwarder.clock_ns()
        self._process = f"{socket.gethostname()[:64]}:{os.getpid()}"
        self._heard: list[lease_pb2.Engine] = []
        self._heard_ns: int | None = None

    # --- the summary --------------------------------------------------------------------------

    async def summary(self, answer: HttpAnswer, request: HttpRequest) -> None:
        """Tells of this router, the lease service, the engines and the recent turns."""
        self._viewers.see_engines(request.headers)
        announced, problem = await self._announced()
        now_ns = self._clock_ns()
        body = {
            "router": {
                "process": self._process,
                "one_of_several": self._one_of_several,
                "up_s": round((now_ns - self._began_ns) / 1e9, 3),
                "turns_in_flight": self._gate.turns,
                "draining": self._gate.draining,
                "reuse": self._reuse,
                "trace_url": self._trace_url,
            },
            "lease_service": self._lease_service(problem),
            "engines": _engines(self._fleet.views(), announced),
            "recent": _recent(self._recent, now_ns),
        }
        answer.whole(200, _JSON, msgspec.json.encode(body))

    async def _announced(self) -> tuple[list[lease_pb2.Engine], str]:
        """Returns what the lease service says of engines, and why it says nothing."""
        if self._lease is None:
            return [], ""
        now_ns = self._clock_ns()
        if self._heard_ns is not None and now_ns - self._heard_ns < _HEARD_NS:
            return self._heard, ""
        try:
            self._heard = await self._lease.client.engines()
        except TurnError as error:
            return [], error.message
        self._heard_ns = now_ns
        return self._heard, ""

    def _lease_service(self, problem: str) -> Mapping[str, object] | None:
        if self._lease is None:
            return None
        return {
            "endpoints": list(self._lease.session.channels.leader.endpoints),
            "answers": not problem,
            "problem": problem,
        }

    # --- conversations ------------------------------------------------------------------------

    async def conversations(self, answer: HttpAnswer, request: HttpRequest, query: str) -> None:
        """Lists the conversations that the caller may see, the latest first."""
        given = _arguments(query)
        tenant, model = given.get("tenant"), given.get("model")
        if tenant:  # "" is no tenant.
            checked_name("tenant", tenant)
        if model is not None:
            checked_name("model", model)
        tenant = self._viewers.tenant_seen(request.headers, tenant)
        entries, total, problem = await self._entries(_limit(given), tenant, model)
        body = {
            "conversations": [_told(entry) for entry in entries],
            "total": total,
            "all_tenants": tenant is None,
            "problem": problem,
        }
        answer.whole(200, _JSON, msgspec.json.encode(body))

    async def _entries(
        self, limit: int, tenant: str | None, model: str | None
    ) -> tuple[Sequence[ConversationEntry], int, str]:
        """Returns some entries, how many there are, and why they are only this process's own."""
        if self._lease is None:
            entries, total = self._book.latest(limit, tenant=tenant, model=model)
            return entries, total, ""
        try:
            listed = await self._lease.client.conversations(limit, tenant=tenant, model=model)
        except TurnError as error:
            if error.status != HTTPStatus.SERVICE_UNAVAILABLE:
                raise
            own = self._recent.conversations(self._clock_ns(), tenant=tenant, model=model)
            return own[:limit], len(own), error.message
        return [entry_of(one) for one in listed.conversations], listed.total_size, ""


def _arguments(query: str) -> dict[str, str]:
    try:
        fields = parse_qs(query, keep_blank_values=True, errors="strict", max_num_fields=16)
    except ValueError:
        raise TurnError(400, "The path cannot be read.", reason="PATH_INVALID") from None
    for name, values in fields.items():
        if name not in ("limit", "tenant", "model"):
            raise bad_field(name, "Only `limit`, `tenant` and `model` can be given.")
        if len(values) > 1:
            raise bad_field(name, f"The query must say {name} once.")
    return {name: values[0] for name, values in fields.items()}


def _told(entry: ConversationEntry) -> Mapping[str, object]:
    turn = entry.latest_turn
    if turn is None:
        return msgspec.structs.asdict(entry)
    latest = {"conversation_id": entry.conversation_id, **msgspec.structs.asdict(turn)}
    return msgspec.structs.asdict(entry) | {"latest_turn": latest}


def _limit(given: Mapping[str, str]) -> int:
    text = given.get("limit", str(_LISTED))
    if not (re.fullmatch(r"[0-9]{1,9}", text) and 1 <= int(text) <= LISTED_MAX):
        raise bad_field("limit", f"limit must be a whole number from 1 to {LISTED_MAX}.")
    return int(text)


def _recent(recent: RecentTurns, now_ns: int) -> Mapping[str, object]:
    tally = recent.tally(now_ns)
    return tally._asdict() | {
        "verdicts": [count._asdict() for count in tally.verdicts],
        "with_reuse": tally.with_reuse._asdict(),
        "without_reuse": tally.without_reuse._asdict(),
    }


def _engines(
    views: Sequence[EngineView], announced: Sequence[lease_pb2.Engine]
) -> list[Mapping[str, object]]:
    """Returns the engines as this router sees them, each with what its sessions say."""
    sessions = {engine.description.engine_id: engine for engine in announced}
    engines: list[Mapping[str, object]] = []
    for view in views:
        names = [name.removeprefix("session:") for name in view.named_by if ":" in name]
        own = [_session(sessions.pop(name)) for name in names if name in sessions]
        engines.append(view._asdict() | {"sessions": own})
    engines += [_unused(engine) for engine in sessions.values()]
    return engines


def _unused(engine: lease_pb2.Engine) -> Mapping[str, object]:
    view = EngineView(
        engine.description.http_address,
        _ROLES.get(engine.description.role, ""),
        [f"session:{engine.description.engine_id}"],
        usable=False,
        reason=_NO_ADDRESS,
        draining=engine.draining,
        in_flight=0,
        served=0,
    )
    return view._asdict() | {"sessions": [_session(engine)]}


def _session(engine: lease_pb2.Engine) -> Mapping[str, object]:
    about, memory = engine.description, engine.memory
    expired = engine.HasField("last_expiry_age")
    return {
        "engine_id": about.engine_id,
        "model": about.model,
        "vllm_version": about.vllm_version,
        "heartbeat_age_s": engine.last_heartbeat_age.ToMilliseconds() / 1000,
        "expired_sessions": engine.expired_session_count,
        "last_expiry_age_s": engine.last_expiry_age.ToMilliseconds() / 1000 if expired else None,
        "leases": engine.lease_count,
        "block_size": about.block_size,
        "total_blocks": memory.total_blocks,
        "free_blocks": memory.free_blocks,
        "retained_blocks": memory.retained_blocks,
    }
