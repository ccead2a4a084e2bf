"""A turn as a client asked for it, checked, in the same form for both fronts."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from kvturn.keys import bearer_of, unnamed
from kvturn.trace_context import TraceContext, trace_context
from kvturn_router.errors import TurnError, bad_field
from kvturn_router.request.body import (
    Members,
    given,
    given_flag,
    given_string,
    needs_decode_alone,
    parse,
    without_transfer_arguments,
)
from kvturn_router.request.conversation import (
    SESSION_HEADERS,
    ConversationKey,
    Naming,
    checked_name,
    naming_of,
    session_of,
)
from kvturn_router.request.keys import ApiKeys
from kvturn_router.request.responses import (
    RESPONSES,
    ResponseName,
    no_response,
    response_name,
    responses_need_decode_alone,
)

CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"

# What an engine reads from a request's headers, besides its type and its key.
_PASSED_ON = ("x-session-id", "x-vllm-priority", "endpoint-load-metrics-format")
# Only of a trace that is known.
_PASSED_ON_OF_A_TRACE = (*_PASSED_ON, "tracestate")

_client_id = re.compile(r"[\x21-\x7e]{1,256}")


class TurnRequest(msgspec.Struct):
    """One checked request.

    `members` are the body's, to be let go once the decode leg is under way.
    `authorization` is the client's own header, for engines. `request_id` is the client's,
    None if it sent none that can be echoed. With `recognise` the client named
    no conversation: the history decides, and the key's id is that of a new one.
    `scope` is what the client named, a conversation or a scope, "" for neither.
    `response` is the response that the turn goes on with, None if it names none.
    `came_ns` is when it was there whole, by CLOCK_BOOTTIME, 0 if not known.
    """

    path: str
    members: dict[str, bytes]
    stream: bool
    alone: bool
    reuse: bool
    key: ConversationKey
    authorization: bytes | None
    passed_on: list[tuple[bytes, bytes]]
    trace: TraceContext | None
    request_id: str | None
    client_wants_token_ids: bool = False
    recognise: bool = False
    scope: str = ""
    response: ResponseName | None = None
    came_ns: int = 0


class Sender(msgspec.Struct, frozen=True):
    """What the headers of a request say, as in TurnRequest.

    `tenant` is who it comes from where no keys are asked for, `conversation`
    what X-Conversation-Id names, None if it was not sent, `session` what a
    session header does, "" if none was.
    """

    tenant: str
    authorization: bytes | None
    passed_on: list[tuple[bytes, bytes]]
    trace: TraceContext | None
    request_id: str | None
    reuse: bool
    conversation: str | None
    session: str


def tenant_of(headers: Mapping[str, str], tenant_header: str | None) -> str:
    """Returns who a request comes from, "" if nothing says.

    That is the value of the header named by `tenant_header` (lower case), else
    a digest of the API key, which is itself never stored. Raises TurnError 400
    if the header's value is longer than a tenant may be.
    """
    if tenant_header is not None and (named := headers.get(tenant_header)):
        return checked_name(tenant_header, _text(tenant_header, named))
    key = bearer_of(headers.get("authorization", ""))
    return unnamed(key) if key else ""


def client_request_id(headers: Mapping[str, str]) -> str | None:
    """Returns the client's X-Request-Id, None if it sent none that can be echoed."""
    request_id = headers.get("x-request-id")
    return request_id if request_id and _client_id.fullmatch(request_id) else None


def _no_clock_ns() -> int:
    return 0


@dataclass(frozen=True, slots=True)
class Intake:
    """Reads requests.

    `tenant_header` is the lower-case name of the header that names the tenant,
    None to use API keys. `mint` returns a new conversation id within a scope,
    or within none (""), that nobody can guess. `keys` are those of which a
    client must bring one, None to let engines judge. `session_headers` are the
    lower-case names of headers that name a scope. `clock_ns` is CLOCK_BOOTTIME.
    """

    tenant_header: str | None
    mint: Callable[[str], str]
    keys: ApiKeys | None = None
    session_headers: Sequence[str] = SESSION_HEADERS
    clock_ns: Callable[[], int] = _no_clock_ns

    def tenant(self, headers: Mapping[str, str]) -> str:
        """Returns who a request comes from. Raises TurnError: 401, or 400 as `tenant_of`."""
        if self.keys is not None:
            return self.keys.name_of(headers)
        return tenant_of(headers, self.tenant_header)

    def authorization(self, headers: Mapping[str, str]) -> bytes | None:
        """Returns what engines get of the client's Authorization: nothing where it is ours."""
        own = headers.get("authorization") if self.keys is None else None
        return own.encode("latin-1") if own else None

    def _sender(self, headers: Mapping[str, str]) -> Sender:
        header = headers.get("x-conversation-id")
        trace = trace_context(headers.get("traceparent"))
        passed_on = _PASSED_ON if trace is None else _PASSED_ON_OF_A_TRACE
        return Sender(
            tenant="" if self.keys is not None else tenant_of(headers, self.tenant_header),
            authorization=self.authorization(headers),
            passed_on=[
                (name.encode(), headers[name].encode("latin-1"))
                for name in passed_on
                if name in headers
            ],
            trace=trace,
            request_id=client_request_id(headers),
            reuse=_reuse_of(headers),
            conversation=None if header is None else _text("X-Conversation-Id", header),
            session=session_of(headers, self.session_headers),
        )

    def turn(
        self,
        path: str,
        body: bytes,
        headers: Mapping[str, str],
        *,
        conversation_id: str = "",
        scope: str = "",
        stream: bool | None = None,
        memo: dict[str, object] | None = None,
    ) -> TurnRequest:
        """Returns the turn that a body asks for.

        `headers` have lower-case names. `conversation_id`, `scope` and `stream`
        are what the transport says itself, over what the body says. `memo` is
        kept with these very headers: they are read once. Raises TurnError 400
        naming what is wrong.
        """
        came_ns = self.clock_ns()
        named_tenant = None if self.keys is None else self.keys.name_of(headers)
        sender = None if memo is None else memo.get("sender")
        if not isinstance(sender, Sender):
            sender = self._sender(headers)
            if memo is not None:
                memo["sender"] = sender
        tenant = sender.tenant if named_tenant is None else named_tenant
        members = parse(body)
        model = _model_of(members)
        if path == CHAT:
            _require(members, "messages", "array")
        elif path == RESPONSES:
            _require(members, "input", "string", "array")
        elif given(members, "prompt_embeds", "string", "array") is None:
            _require(members, "prompt", "string", "array")
        given(members, "stream_options", "object")
        without_transfer_arguments(members)
        streamed = given_flag(members, "stream")
        if stream is not None and stream != streamed:
            members["stream"] = b"true" if stream else b"false"
            if not stream:
                members.pop("stream_options", None)
        named = _naming(members, sender, conversation_id, scope)
        response = None if path != RESPONSES else _previous(members, tenant)
        if response is not None and not named.conversation_id:
            named = Naming(response.conversation_id, "")
        return TurnRequest(
            path,
            members,
            streamed if stream is None else stream,
            responses_need_decode_alone(members)
            if path == RESPONSES
            else needs_decode_alone(members, path),
            sender.reuse,
            ConversationKey(tenant, model, named.conversation_id or self.mint(named.scope)),
            sender.authorization,
            sender.passed_on,
            sender.trace,
            sender.request_id,
            client_wants_token_ids=given_flag(members, "return_token_ids"),
            recognise=not named.conversation_id,
            scope=named.conversation_id or named.scope,
            response=response,
            came_ns=came_ns,
        )


def _naming(members: Members, sender: Sender, conversation_id: str, scope: str) -> Naming:
    named = naming_of(members, sender.conversation, sender.session)
    if conversation_id:
        return Naming(checked_name("conversation_id", conversation_id), "")
    return Naming("", checked_name("scope", scope)) if scope else named


def _text(name: str, value: str) -> str:
    # Fronts read headers byte by byte, as latin-1; names in them are UTF-8.
    try:
        return value.encode("latin-1").decode()
    except UnicodeError:
        raise bad_field(name, f"{name} must be UTF-8.") from None


def _model_of(members: dict[str, bytes]) -> str:
    model = given_string(members, "model")
    if model is None:
        raise bad_field("model", "model is required.")
    return checked_name("model", model)


def _previous(members: dict[str, bytes], tenant: str) -> ResponseName | None:
    text = given_string(members, "previous_response_id")
    if text is None:
        return None
    name = response_name(text, tenant)
    if name is None:
        raise no_response("previous_response_id", text)
    return name


def _require(members: dict[str, bytes], name: str, *kinds: str) -> None:
    if given(members, name, *kinds) is None:
        raise bad_field(name, f"{name} is required.")


def _reuse_of(headers: Mapping[str, str]) -> bool:
    value = headers.get("x-kvturn-reuse", "on").strip().lower()
    if value not in ("on", "off"):
        raise TurnError(
            400,
            'X-Kvturn-Reuse must be "on" or "off".',
            reason="FIELD_INVALID",
            param="X-Kvturn-Reuse",
        )
    return value == "on"
