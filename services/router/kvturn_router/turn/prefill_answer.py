"""What prefill's answer says: KV for decode to fetch, and what came of a lease.

Nothing here does I/O.
"""

from typing import Annotated, Final

import msgspec

from kvturn_router.request.body import joined
from kvturn_router.request.conversation import ConversationKey
from kvturn_router.request.spans import UNREADABLE
from kvturn_router.verdict import Verdict, verdict_named

_object_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
_no_blocks = b"[], \t\r\n"
_ABSENT: Final = msgspec.Raw(b"")

# An answer with numbers that nothing counts to is one that cannot be read.
_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
_Bytes = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]
_Ms = Annotated[float, msgspec.Meta(ge=0, le=1e9)]


class ReadReport(msgspec.Struct, frozen=True):
    """What prefill's connector says of one turn.

    Counts are tokens; `verdict` is None if it named none that is known.
    """

    verdict: Verdict | None
    prompt_tokens: int
    reused_tokens: int
    local_tokens: int
    read_ms: float
    read_bytes: int


class PrefillAnswer(msgspec.Struct, frozen=True):
    """A prefill leg's result.

    `transfer` holds the parameters under which decode fetches the KV, a JSON
    object without `kvturn`; None if prefill handed over none. `report` is None without our
    connector. `prompt_tokens` and `cached_tokens` come from the answer's own
    usage, 0 and None where it has none.
    """

    transfer: bytes | None
    report: ReadReport | None
    prompt_tokens: int
    cached_tokens: int | None


NOTHING: Final = PrefillAnswer(None, None, 0, None)


class _Details(msgspec.Struct):
    cached_tokens: _Count | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: _Count = 0
    prompt_tokens_details: _Details | None = None
    # The names in the Responses API.
    input_tokens: _Count = 0
    input_tokens_details: _Details | None = None


class _Answer(msgspec.Struct):
    kv_transfer_params: msgspec.Raw = msgspec.Raw(b"null")
    usage: _Usage | None = None


class _Report(msgspec.Struct):
    verdict: str = ""
    prompt_tokens: _Count = 0
    reused_tokens: _Count = 0
    local_tokens: _Count = 0
    read_ms: _Ms = 0.0
    read_bytes: _Bytes = 0


class _UnreadUsage(msgspec.Struct):
    """An answer whose usage is not what it should be."""

    kv_transfer_params: msgspec.Raw = msgspec.Raw(b"null")


class _Transfer(msgspec.Struct):
    kvturn: msgspec.Raw = _ABSENT
    remote_block_ids: msgspec.Raw = _ABSENT


_answer_decoder = msgspec.json.Decoder(_Answer)
_unread_usage_decoder = msgspec.json.Decoder(_UnreadUsage)
_transfer_decoder = msgspec.json.Decoder(_Transfer)
_report_decoder = msgspec.json.Decoder(_Report)


def read_answer(body: bytes) -> PrefillAnswer:
    """Returns what a prefill answer says; NOTHING where it cannot be read.

    An answer that hands over no KV is no fault: prefill gives none for a prompt
    shorter than a block, and decode then computes the prompt itself.
    """
    usage = None
    try:
        answer = _answer_decoder.decode(body)
        usage, transfer = answer.usage, answer.kv_transfer_params
    except msgspec.ValidationError:
        try:
            transfer = _unread_usage_decoder.decode(body).kv_transfer_params
        except UNREADABLE:
            return NOTHING
    except UNREADABLE:
        return NOTHING
    prompt_tokens, cached = 0, None
    if usage is not None:
        prompt_tokens = usage.prompt_tokens or usage.input_tokens
        details = usage.prompt_tokens_details or usage.input_tokens_details
        cached = None if details is None else details.cached_tokens
    try:
        told = _transfer_decoder.decode(transfer)
    except UNREADABLE:
        return PrefillAnswer(None, None, prompt_tokens, cached)
    report = _report_of(told.kvturn)
    if not _names_blocks(told.remote_block_ids):
        return PrefillAnswer(None, report, prompt_tokens, cached)
    if told.kvturn is _ABSENT and told.remote_block_ids is not _ABSENT:
        return PrefillAnswer(bytes(transfer), report, prompt_tokens, cached)
    members = _object_decoder.decode(transfer)
    members.pop("kvturn", None)
    handed = b"".join(joined(members)) if members else None
    return PrefillAnswer(handed, report, prompt_tokens, cached)


def _names_blocks(blocks: bytes) -> bool:
    if blocks is _ABSENT:
        # Connectors other than NIXL hand over without naming blocks.
        return True
    text = bytes(memoryview(blocks)[:256])
    return text != b"null" and bool(text.translate(None, _no_blocks))


def _report_of(value: bytes) -> ReadReport | None:
    if value is _ABSENT:
        return None
    try:
        report = _report_decoder.decode(value)
    except UNREADABLE:
        return None
    return ReadReport(
        verdict_named(report.verdict),
        report.prompt_tokens,
        report.reused_tokens,
        report.local_tokens,
        report.read_ms,
        report.read_bytes,
    )


def kvturn_member(
    key: ConversationKey | None,
    turn: int,
    lease_id: str,
    traceparent: str | None,
    history: str = "",
) -> bytes | None:
    """Returns the `kvturn` member of a leg's transfer parameters, None if it says nothing.

    `key` is None where nothing is to be read or retained. `history` is the
    turn's own digest in hex, "" where it is not known or not to be told.
    """
    if key is None and not lease_id and traceparent is None:
        return None
    said: dict[str, str | int] = {}
    if key is not None:
        said.update(tenant=key.tenant, model=key.model, conversation=key.conversation_id, turn=turn)
    if lease_id:
        said["lease_id"] = lease_id
    if key is not None and history:
        said["history"] = history
    if traceparent is not None:
        said["traceparent"] = traceparent
    return msgspec.json.encode(said)


def prefill_transfer(kvturn: bytes | None, handle: list[tuple[str, bytes]]) -> bytes:
    """Returns the prefill leg's transfer parameters; `handle` are a stock handle's keys."""
    if kvturn is None and not handle:
        return b'{"do_remote_decode":true,"do_remote_prefill":false}'
    added = [("do_remote_decode", b"true"), ("do_remote_prefill", b"false"), *handle]
    if kvturn is not None:
        added.append(("kvturn", kvturn))
    return b"".join(joined({}, (), added))


def decode_transfer(transfer: bytes | None, kvturn: bytes | None) -> bytes | None:
    """Returns the decode leg's transfer parameters, None if there are none."""
    if transfer is None or kvturn is None:
        return transfer if kvturn is None else b'{"kvturn":%b}' % kvturn
    return b'%b,"kvturn":%b}' % (transfer[:-1], kvturn)
