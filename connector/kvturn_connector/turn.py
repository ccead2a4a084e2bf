"""What a request says about its turn: the `kvturn` member of its `kv_transfer_params`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvturn.v1 import common_pb2
from kvturn_connector.digest import MediaItem, Scope

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vllm.v1.request import Request

TEXT_BYTES_MAX = 256
_HISTORY = re.compile("[0-9a-f]{32}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn, as the router describes it to an engine."""

    conversation: common_pb2.ConversationKey | None
    """None: the request belongs to no conversation; it reads nothing and retains nothing."""
    turn: int
    """Number of the turn in its conversation, from 1; 0 when not told."""
    lease_id: str
    """The lease to read, for a prefill request. Empty: none."""
    traceparent: str
    """W3C trace context of the turn. Empty: none."""
    history: bytes = b""
    """Digest of the history that the turn was asked with, 16 bytes. Empty: not told."""

    @classmethod
    def of(cls, params: Mapping[str, Any] | None) -> Turn:
        """Reads `kv_transfer_params`. What is malformed counts as not said: engines serve on."""
        said = (params or {}).get("kvturn")
        if not isinstance(said, dict):
            return NO_TURN
        conversation_id = _text(said, "conversation")
        model = _text(said, "model")
        conversation = None
        if conversation_id and model:
            conversation = common_pb2.ConversationKey(
                tenant=_text(said, "tenant"), model=model, conversation_id=conversation_id
            )
        return cls(
            conversation=conversation,
            turn=_turn_number(said.get("turn")),
            lease_id=_text(said, "lease_id") if conversation else "",
            traceparent=_text(said, "traceparent"),
            history=_digest(said.get("history")),
        )


NO_TURN = Turn(conversation=None, turn=0, lease_id="", traceparent="")


def scope_of(request: Request, conversation: common_pb2.ConversationKey, model: str) -> Scope:
    """All that the request's KV depends on besides its tokens.

    Args:
        model: the engine's own model (path or name); NIXL lets only equal ones exchange KV.
    """
    lora = request.lora_request
    return Scope(
        tenant=conversation.tenant,
        model=model,
        adapter=f"{lora.lora_name}\0{lora.lora_path}" if lora is not None else "",
        cache_salt=request.cache_salt or "",
        media=tuple(
            MediaItem(
                offset=feature.mm_position.offset,
                length=feature.mm_position.length,
                identifier=f"{feature.modality}\0{feature.identifier}",
            )
            for feature in request.mm_features
        ),
    )


def _text(said: Mapping[str, Any], key: str) -> str:
    value = said.get(key)
    if not isinstance(value, str):
        return ""
    try:
        encoded = value.encode()
    except UnicodeEncodeError:  # Half a surrogate pair, which JSON can spell and protobuf cannot.
        return ""
    return value if len(encoded) <= TEXT_BYTES_MAX else ""


def _digest(value: object) -> bytes:
    if isinstance(value, str) and _HISTORY.fullmatch(value):
        return bytes.fromhex(value)
    return b""


def _turn_number(value: object) -> int:
    # A bool is an int to Python, but not to protobuf.
    if isinstance(value, bool) or not isinstance(value, int):
        return 0
    return value if 0 <= value < 1 << 32 else 0
