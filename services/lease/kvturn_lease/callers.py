"""Who calls the lease service, and what each may call.

There are three roles. Engines hold sessions and read; routers begin and end turns, for all of
their clients; operators look, revoke and drain. A caller has the roles of the token that it sends
(`authorization: Bearer TOKEN`), and those in the URI names of the certificate that it shows:
`kvturn:engine/ENGINE_ID`, `kvturn:router`, `kvturn:operator`.

With no file of tokens and no authorities for certificates everybody has every role. With
authorities alone so has whoever shows a certificate that names none: then the authorities are
kvturn's own. An engine's token or certificate may name the engine ids that it is good for, as a
pattern (`decode-*`): no engine then can take the place of another.
"""

from __future__ import annotations

import asyncio
import contextlib
import fnmatch
import logging
import time
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

import grpc

from kvturn.keys import bearer_of
from kvturn.v1 import lease_pb2
from kvturn_lease.errors import CallerUnknown, EngineIdRefused, LeaseServiceError, RoleRefused
from kvturn_lease.status import abort

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from kvturn.keys import Keys
    from kvturn.watched import Watched

logger = logging.getLogger("kvturn.lease")

_METHODS: Final = "/kvturn.v1.LeaseService/"
_NAMES: Final = "kvturn:"
_FIRST_MESSAGE_S: Final = 1.0
"""Longest wait for the first message of a stream that is refused."""
_QUIET_S: Final = 60.0
"""Time between two lines in the log about the same refused caller."""
_TOLD_MAX: Final = 16
"""Refused callers that are told apart, and so lines about them in that time."""
_NAME_SHOWN_MAX: Final = 128


class Role(StrEnum):
    """What a caller is to the lease service."""

    ENGINE = "engine"
    ROUTER = "router"
    OPERATOR = "operator"


_ROLE_NAMES = frozenset(role.value for role in Role)
_ROUTERS = frozenset({Role.ROUTER, Role.OPERATOR})

ALLOWED: Final[Mapping[str, frozenset[Role]]] = {
    "EngineSession": frozenset({Role.ENGINE}),
    "BeginRead": frozenset({Role.ENGINE}),
    "EndRead": frozenset({Role.ENGINE}),
    "RouterSession": frozenset({Role.ROUTER}),
    "ResolveConversation": frozenset({Role.ROUTER}),
    "TouchConversation": frozenset({Role.ROUTER}),
    "KeepConversationAlive": _ROUTERS,
    "EndConversation": _ROUTERS,
    "ListTurns": _ROUTERS,
    "ListConversations": _ROUTERS,
    "GetLease": _ROUTERS,
    "ListLeases": _ROUTERS,
    "DescribeService": _ROUTERS,
    "ListEngines": _ROUTERS,
    "DrainEngine": _ROUTERS,
    "RevokeLease": frozenset({Role.OPERATOR}),
}
"""Roles that may call a method; one that is not here is for operators."""


class Callers:
    """Judges callers by their tokens and certificates."""

    def __init__(self, tokens: Mapping[Role, Watched[Keys]], *, certificates: bool) -> None:
        """`certificates`: each caller shows one of an authority that is ours to trust."""
        self._tokens = tokens
        self._certificates = certificates

    @property
    def all_trusted(self) -> bool:
        """Whether everybody has every role."""
        return not self._tokens and not self._certificates

    def check(self, method: str, context: Any) -> None:
        """Raises CallerUnknown or RoleRefused for a caller who may not call the method."""
        roles = self._roles(context)
        if not roles:
            raise CallerUnknown
        allowed = ALLOWED.get(method, frozenset({Role.OPERATOR}))
        if not allowed & roles.keys():
            raise RoleRefused(sorted(allowed))

    def check_engine(self, engine_id: str, context: Any) -> None:
        """Raises EngineIdRefused for an engine who may not register under this id."""
        patterns = self._roles(context).get(Role.ENGINE, ())
        if not any(fnmatch.fnmatchcase(engine_id, pattern) for pattern in patterns):
            raise EngineIdRefused

    def _roles(self, context: Any) -> dict[Role, list[str]]:
        """Returns the caller's roles, each with the patterns of names that it is good for."""
        if self.all_trusted:
            return {role: ["*"] for role in Role}
        roles: dict[Role, list[str]] = {}
        token = _token(context)
        for role, keys in self._tokens.items():
            name = keys.value.find(token) if token else None
            if name is not None:
                roles.setdefault(role, []).append(name or "*")
        if self._certificates:
            names = _certificate_names(context)
            for name in names:
                named, _, who = name.removeprefix(_NAMES).partition("/")
                if named in _ROLE_NAMES:
                    roles.setdefault(Role(named), []).append(who or "*")
            if not names and not self._tokens:
                return {role: ["*"] for role in Role}
        return roles


class CallerInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Refuses callers before a method of the lease service sees anything of their call."""

    def __init__(self, callers: Callers) -> None:
        self._callers = callers
        self._told_s: dict[tuple[str, str, str], float] = {}
        """When it was last told of a caller, the first told first."""

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any
    ) -> Any:
        """Returns the method's handler, guarded. Health and reflection are open to all."""
        handler = await continuation(handler_call_details)
        method: str = handler_call_details.method
        if handler is None or not method.startswith(_METHODS):
            return handler
        name = method.removeprefix(_METHODS)
        if handler.unary_unary is not None:
            return grpc.unary_unary_rpc_method_handler(
                self._guarded(name, handler.unary_unary, streams=False),
                handler.request_deserializer,
                handler.response_serializer,
            )
        assert handler.stream_stream is not None
        return grpc.stream_stream_rpc_method_handler(
            self._guarded(name, handler.stream_stream, streams=True),
            handler.request_deserializer,
            handler.response_serializer,
        )

    def _guarded(self, name: str, answer: Any, *, streams: bool) -> Any:
        async def guarded(request: Any, context: Any) -> Any:
            try:
                self._callers.check(name, context)
            except LeaseServiceError as refusal:
                # A client whose first message is cut off learns of no status.
                first = await _first_message(context) if streams else request
                self._tell(name, context.peer(), _name_in(first), refusal)
                await abort(context, refusal)
            return await answer(request, context)

        return guarded

    def _tell(self, method: str, peer: str, name: str, refusal: LeaseServiceError) -> None:
        """Logs a refused caller: each once in a while, and not many of them."""
        now_s = time.monotonic()
        for caller, told_s in list(self._told_s.items()):
            if told_s + _QUIET_S > now_s:
                break
            del self._told_s[caller]
        caller = (method, peer.rpartition(":")[0], name)
        if caller in self._told_s or len(self._told_s) >= _TOLD_MAX:
            return
        self._told_s[caller] = now_s
        who = f"{peer}, which calls itself {name}," if name else peer
        logger.warning("%s of %s is refused: %s", method, who, refusal)


async def _first_message(context: Any) -> Any:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_FIRST_MESSAGE_S):
            return await context.read()
    return None


def _name_in(message: Any) -> str:
    """Returns what a refused caller calls itself, as it can be shown; "" if it does not say."""
    if isinstance(message, lease_pb2.RouterSessionRequest):
        name = message.hello.router_id
    elif isinstance(message, lease_pb2.EngineSessionRequest):
        name = message.register.engine.engine_id
    else:
        name = getattr(message, "reader_engine_id", "")
    return ascii(name[:_NAME_SHOWN_MAX]) if name else ""


def _token(context: Any) -> bytes:
    for name, value in context.invocation_metadata() or ():
        if name == "authorization" and isinstance(value, str):
            return bearer_of(value)
    return b""


def _certificate_names(context: Any) -> list[str]:
    """Returns the names in the caller's certificate that are about kvturn."""
    names = (context.auth_context() or {}).get("x509_subject_alternative_name", ())
    texts = [name.decode("latin-1") for name in names]
    return [text for text in texts if text.startswith(_NAMES)]
