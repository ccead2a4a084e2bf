"""Reuse with engines that run the stock connector (`--stock-reuse`).

Such a decode engine answers with a handle: transfer parameters under which
prefill may read the KV of the whole turn. The stock connector does not compare
tokens, so the router does, before it hands a handle on: the new prompt, as
prefill's own `/tokenize` renders it, must begin with exactly the tokens that
decode holds. Equal text is not enough, because templates drop thinking and
because text can be tokenised in more than one way.

Handles live in memory, once each, for less than the engine keeps the blocks,
and only for text: images have the same tokens whatever they show. Nothing here
does I/O.
"""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Annotated, Final, NamedTuple

import msgspec

from kvturn_router.request.body import kind
from kvturn_router.request.conversation import ConversationKey
from kvturn_router.request.intake import CHAT, TurnRequest
from kvturn_router.request.spans import UNREADABLE, Span, find_items, find_member, replace
from kvturn_router.turn.sse import EventSplitter, payload_span
from kvturn_router.verdict import Verdict

# What /tokenize takes, by the kind of request.
_TOKENIZE_CHAT = (
    "model",
    "messages",
    "tools",
    "add_generation_prompt",
    "continue_final_message",
    "add_special_tokens",
    "chat_template",
    "chat_template_kwargs",
    "media_io_kwargs",
    "mm_processor_kwargs",
)
_TOKENIZE_COMPLETION = ("model", "prompt", "add_special_tokens")

# What shapes a prompt or its KV besides, and cannot be given to /tokenize: it
# must be the same in both turns.
_MUST_EQUAL = (
    "cache_salt",
    "documents",
    "reasoning_effort",
    "response_format",
    "tool_choice",
)

_object_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
# Beyond that nothing is a token's id.
_ids_decoder = msgspec.json.Decoder(list[Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]])

_HANDLE_NAMES = ("remote_block_ids", "remote_engine_id", "remote_request_id", "remote_num_tokens")
_FINISHED = frozenset({b'"stop"', b'"length"', b'"tool_calls"'})

HANDLE_BYTES_MAX: Final = 1 << 20
"""Longest handle that is kept, in bytes of its parameters: block ids of two million tokens."""

HANDLES_BYTES_MAX: Final = 256 << 20
"""Bytes of all handles at hand; the least recent go first."""


class Handle(NamedTuple):
    """What decode keeps of one turn.

    `transfer` holds decode's own transfer parameters, `tokens` their number of
    tokens and `digest` the digest of those tokens; `same` is a digest of what
    must be equal in the next turn's request. `decode` is the engine's URL.
    """

    transfer: Mapping[str, bytes]
    tokens: int
    digest: bytes
    same: bytes
    decode: str
    kept_ns: int

    @property
    def size(self) -> int:
        """Bytes of its parameters."""
        return sum(map(len, self.transfer)) + sum(map(len, self.transfer.values()))


class HandleBook:
    """The handles at hand, each to be used once; the least recent go first.

    `handles_max` is at least 1, `bytes_max` the most that all together may have;
    a handle is offered for `ttl_ns` after it came.
    """

    def __init__(
        self, *, handles_max: int, ttl_ns: int, bytes_max: int = HANDLES_BYTES_MAX
    ) -> None:
        assert handles_max >= 1
        self._handles_max = handles_max
        self._bytes_left = bytes_max
        self._ttl_ns = ttl_ns
        # None: the conversation is known, and decode gave no handle for it.
        self._handles: OrderedDict[ConversationKey, Handle | None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._handles)

    def keep(self, key: ConversationKey, handle: Handle | None) -> None:
        """Remembers a turn's handle, or that decode gave none."""
        self.forget(key)
        self._handles[key] = handle
        self._bytes_left -= 0 if handle is None else handle.size
        while len(self._handles) > self._handles_max or self._bytes_left < 0:
            self.forget(next(iter(self._handles)))

    def take(self, key: ConversationKey, now_ns: int) -> Handle | Verdict:
        """Returns the conversation's handle and forgets it, or why there is none."""
        if key not in self._handles:
            return Verdict.NO_LEASE
        handle = self._handles[key]
        self.forget(key)
        if handle is None:
            return Verdict.NOT_OFFERED
        return handle if self.is_fresh(handle, now_ns) else Verdict.EXPIRED

    def is_fresh(self, handle: Handle, now_ns: int) -> bool:
        """Tells whether decode surely keeps a handle's blocks still."""
        return now_ns - handle.kept_ns <= self._ttl_ns

    def forget(self, key: ConversationKey) -> bool:
        """Drops a conversation's handle; returns whether there was one."""
        handle = self._handles.pop(key, None)
        self._bytes_left += 0 if handle is None else handle.size
        return handle is not None


def tokens_digest(ids: Iterable[int]) -> bytes:
    """Returns a digest that only equal token sequences share."""
    return hashlib.sha256(array("q", ids).tobytes()).digest()


def begins_with(ids: list[int], handle: Handle) -> bool:
    """Tells whether a prompt begins with the handle's tokens and goes on after them."""
    return len(ids) > handle.tokens and tokens_digest(ids[: handle.tokens]) == handle.digest


def must_equal(request: TurnRequest) -> bytes:
    """Returns a digest of what must be the same in the next turn."""
    digest = hashlib.sha256(request.path.encode())
    for name in _MUST_EQUAL:
        value = request.members.get(name, b"null")
        digest.update(b"%d:" % len(value))
        digest.update(value)
    return digest.digest()


def shows_tokens(request: TurnRequest) -> bool:
    """Tells whether the prompt's tokens, as /tokenize gives them, say all about its KV.

    That is so for text that is not truncated.
    """
    if kind(request.members.get("truncate_prompt_tokens", b"null")) != "null":
        return False
    if request.path != CHAT:
        return "prompt_embeds" not in request.members
    try:
        messages = msgspec.json.decode(request.members["messages"])
    except msgspec.DecodeError:
        return False
    return all(_is_text_message(message) for message in messages)


def _is_text_message(message: object) -> bool:
    if not isinstance(message, dict):
        return False
    content = message.get("content")
    if not isinstance(content, list):
        return True
    return all(
        isinstance(part, str)
        or (isinstance(part, dict) and part.get("type") in ("text", "refusal"))
        for part in content
    )


def known_prompt_ids(request: TurnRequest) -> list[int] | None:
    """Returns the prompt's token ids if the request gives them itself."""
    if request.path == CHAT or kind(request.members["prompt"]) != "array":
        return None
    try:
        return _ids_decoder.decode(request.members["prompt"])
    except UNREADABLE:
        return None


def tokenize_members(request: TurnRequest) -> dict[str, bytes]:
    """Returns the members of a /tokenize request for the turn's prompt."""
    names = _TOKENIZE_CHAT if request.path == CHAT else _TOKENIZE_COMPLETION
    return {name: request.members[name] for name in names if name in request.members}


def tokens_of(answer: bytes) -> list[int] | None:
    """Returns the token ids of a /tokenize answer, None if it has none."""
    span = find_member(answer, (0, len(answer)), "tokens")
    return None if span is None else _ids(answer, span)


def _ids(text: bytes, span: Span) -> list[int] | None:
    try:
        return _ids_decoder.decode(memoryview(text)[span[0] : span[1]])
    except UNREADABLE:
        return None


class StockTap:
    """Watches one decode answer for its handle and token ids.

    Token ids that only the router asked for are set back to null, and events
    that exist only because of them are left out, so that the client sees what
    it would have seen without the router's asking. What cannot be looked at goes to
    the client as it is, and there is no handle then.
    """

    def __init__(self, request: TurnRequest) -> None:
        self._strip = not request.client_wants_token_ids
        self._same = must_equal(request)
        self._splitter = EventSplitter()
        self._prompt_ids: list[int] | None = None
        self._reply_ids: list[int] = []
        self._transfer: Mapping[str, bytes] | None = None
        self._finish = b""
        # Whether an event is too long to be looked at; from it on, nothing is.
        self._overrun = False
        # Whether there was anything that could not be read.
        self._unread = False
        self.saw_handle = False

    def feed(self, data: bytes) -> bytes:
        """Takes the next bytes of a stream; returns what may go to the client."""
        if self._overrun:
            return data
        seen = [self._seen(event) for event in self._splitter.feed(data)]
        self._overrun = self._splitter.too_long
        if self._overrun:
            self._unread = True
            seen.append(self._splitter.rest)
        return b"".join(seen)

    def finish(self) -> bytes:
        """Returns what is left when the stream ends."""
        return b"" if self._overrun else self._splitter.rest

    def answer(self, body: bytes) -> bytes:
        """Takes a whole answer; returns what may go to the client."""
        changes, _ = self._look(body, (0, len(body)))
        return replace(body, changes)

    def handle(self, decode: str, now_ns: int) -> Handle | None:
        """Returns the handle to keep, None if the answer does not allow reuse."""
        if self._transfer is None or self._prompt_ids is None or self._finish not in _FINISHED:
            return None
        if self._unread:
            return None
        tokens = self._count()
        held = self._prompt_ids + self._reply_ids
        if not 0 < tokens <= len(held):
            return None
        return Handle(
            self._transfer, tokens, tokens_digest(held[:tokens]), self._same, decode, now_ns
        )

    def _count(self) -> int:
        assert self._transfer is not None
        try:
            return msgspec.json.decode(self._transfer["remote_num_tokens"], type=int)
        except msgspec.DecodeError:
            return 0

    def _seen(self, event: bytes) -> bytes:
        span = payload_span(event)
        if span is None or event[span[0] : span[0] + 1] != b"{":
            return event
        changes, only_ids = self._look(event, span)
        return b"" if only_ids else replace(event, changes)

    def _look(self, text: bytes, span: Span) -> tuple[list[tuple[Span, bytes]], bool]:
        """Notes what a JSON object tells; returns changes, and whether it tells ids alone."""
        changes: list[tuple[Span, bytes]] = []
        self._note_handle(text, span)
        self._note_ids(text, span, "prompt_token_ids", changes)
        only_ids = False
        choices = find_member(text, span, "choices")
        for choice in find_items(text, choices) if choices else ():
            self._note_ids(text, choice, "prompt_token_ids", changes)
            self._note_ids(text, choice, "token_ids", changes)
            finish = find_member(text, choice, "finish_reason")
            if finish is not None and text[finish[0] : finish[0] + 1] == b'"':
                self._finish = text[finish[0] : finish[1]]
            elif self._strip and changes:
                only_ids = _is_empty_delta(text, choice)
        return changes, only_ids

    def _note_handle(self, text: bytes, span: Span) -> None:
        found = find_member(text, span, "kv_transfer_params")
        if found is None or text[found[0] : found[0] + 1] != b"{":
            return
        self.saw_handle = True
        if found[1] - found[0] > HANDLE_BYTES_MAX:
            return
        try:
            members = _object_decoder.decode(text[found[0] : found[1]])
        except UNREADABLE:
            return
        if all(name in members for name in _HANDLE_NAMES):
            self._transfer = {name: bytes(value) for name, value in members.items()}

    def _note_ids(
        self, text: bytes, span: Span, name: str, changes: list[tuple[Span, bytes]]
    ) -> None:
        found = find_member(text, span, name)
        if found is None or text[found[0] : found[1]] == b"null":
            return
        ids = _ids(text, found)
        if ids is None:
            self._unread = True
        elif name == "prompt_token_ids":
            self._prompt_ids = ids
        else:
            self._reply_ids += ids
        if self._strip:
            changes.append((found, b"null"))


def _is_empty_delta(text: bytes, choice: Span) -> bool:
    delta = find_member(text, choice, "delta")
    logprobs = find_member(text, choice, "logprobs")
    return (
        delta is not None
        and text[delta[0] : delta[1]] == b"{}"
        and (logprobs is None or text[logprobs[0] : logprobs[1]] == b"null")
    )


def transfer_of(handle: Handle) -> list[tuple[str, bytes]]:
    """Returns the stock keys under which prefill reads a handle's KV."""
    own = {"do_remote_decode", "do_remote_prefill", "kvturn"}
    return [(name, value) for name, value in handle.transfer.items() if name not in own]
