"""The one number of an answer that the router changes: cached_tokens.

It is to mean the prompt tokens that no engine computed this turn. Decode counts
as cached what it pulled from prefill, the whole prompt; prefill what it read
from decode and what it found in its own prefix cache. Both count from the start
of the prompt, so neither computed the smaller of their counts: that is what the
member says, where decode sent it. Every other byte stays. Nothing here does I/O.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec

from kvturn_router.request.spans import UNREADABLE, Span, find_member, find_members, replace
from kvturn_router.turn.sse import event_ends, last_end, payload_span


class UsageShape(NamedTuple):
    """Where the answers of an API say what they cost, as names of members.

    `whole` leads to the usage of an answer, `event` to that of an event;
    `counts` are the tokens of the prompt and of what was generated, `details`
    holds `cached_tokens`; `mark` is its name as it is written.
    """

    whole: tuple[str, ...]
    event: tuple[str, ...]
    counts: tuple[str, str]
    details: str
    mark: bytes


COMPLETION_USAGE: Final = UsageShape(
    ("usage",),
    ("usage",),
    ("prompt_tokens", "completion_tokens"),
    "prompt_tokens_details",
    b'"prompt_tokens_details"',
)
"""Of chat completions and completions."""

RESPONSE_USAGE: Final = UsageShape(
    ("usage",),
    ("response", "usage"),
    ("input_tokens", "output_tokens"),
    "input_tokens_details",
    b'"input_tokens_details"',
)
"""Of the Responses API."""


class Usage(NamedTuple):
    """What an answer says of its tokens; `cached_tokens` is None if it says nothing of them.

    `model` is the one that it names as its own, "" if none.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None
    model: str = ""


_DIGITS_MAX = 9
"""Longest number of tokens that is read as one."""

_MODEL_BYTES_MAX = 512
"""Longest name of a model that is read as one, as it is written."""

_UNFINISHED_MAX = 1 << 20
"""Longest unfinished event that is remembered while its end is awaited, in bytes."""

_text_decoder = msgspec.json.Decoder(str)


def passed_on(
    answer: bytes, cached_tokens: int | None, shape: UsageShape = COMPLETION_USAGE
) -> tuple[bytes, Usage | None]:
    """Returns a JSON answer whose cached_tokens are at most so many, and what it says then.

    None changes nothing. What it does not say is not added.
    """
    return _at_most(answer, (0, len(answer)), shape.whole, cached_tokens, shape)


def _at_most(
    text: bytes, span: Span, path: tuple[str, ...], cached_tokens: int | None, shape: UsageShape
) -> tuple[bytes, Usage | None]:
    """Does what `passed_on` says to the object at `span`, whose usage `path` leads to."""
    *holders, name = path
    holder = _member(text, span, holders)
    if holder is None:
        return text, None
    usage, model = find_members(text, holder, (name, "model"))
    if usage is None:
        return text, None
    *counts, details = find_members(text, usage, (*shape.counts, shape.details))
    prompt, completion = (_number(text, count) for count in counts)
    cached = None if details is None else find_member(text, details, "cached_tokens")
    number = _number(text, cached)
    said = None
    if prompt is not None and completion is not None:
        said = Usage(prompt, completion, number, _text(text, model))
    if cached is None or number is None or cached_tokens is None or number <= cached_tokens:
        return text, said
    text = replace(text, [(cached, b"%d" % cached_tokens)])
    return text, said and said._replace(cached_tokens=cached_tokens)


def _member(text: bytes, span: Span, names: Sequence[str]) -> Span | None:
    found: Span | None = span
    for name in names:
        if found is None:
            return None
        found = find_member(text, found, name)
    return found


def _number(text: bytes, span: Span | None) -> int | None:
    digits = b"" if span is None else text[span[0] : span[1]]
    return int(digits) if len(digits) <= _DIGITS_MAX and digits.isdigit() else None


def _text(text: bytes, span: Span | None) -> str:
    if span is None or span[1] - span[0] > _MODEL_BYTES_MAX:
        return ""
    try:
        return _text_decoder.decode(text[span[0] : span[1]])
    except UNREADABLE:
        return ""


class StreamUsage:
    """Passes a stream of events through, with at most so many cached_tokens; None changes nothing.

    Reads go on as they came. Only an event that holds the shape's `details` is
    looked at, and held back until it is whole.
    """

    def __init__(self, cached_tokens: int | None, shape: UsageShape = COMPLETION_USAGE) -> None:
        self._cached_tokens = cached_tokens
        self._shape = shape
        self._mark = shape.mark
        # An unfinished event: the part that has gone out, and the part that
        # is held back. Both are empty when the last read ended with an event,
        # as nearly every read does.
        self._sent = b""
        self._held = b""
        self.tokens: Usage | None = None
        """What the stream has said of its tokens so far, None if nothing."""

    def feed(self, data: bytes) -> bytes:
        """Returns what may go out now."""
        # Backwards, because Python's search is several times faster that way.
        marked = data.rfind(self._mark) >= 0
        if not (marked or self._sent or self._held) and data.endswith(b"\n\n"):
            return data
        text = self._sent + self._held + data
        gone = len(self._sent)
        # A read may bring hundreds of events before the one that is looked for.
        first = text.find(self._mark)
        position = last_end(text, first if first >= 0 else len(text))
        out = [text[:position]]
        for end in event_ends(text, position) if first >= 0 else ():
            out.append(self._rewritten(text[position:end]))
            position = end
        rest = text[position:]
        self._sent = self._held = b""
        if len(rest) > _UNFINISHED_MAX:
            out.append(rest)
        elif self._mark in rest:
            # The number follows the mark, so nothing of it can have gone out.
            self._sent, self._held = (b"", rest) if position else (rest[:gone], rest[gone:])
            out.append(self._sent)
        else:
            out.append(rest)
            self._sent = rest
        return b"".join(out)[gone:]

    def finish(self) -> bytes:
        """Returns what is still held back when the stream ends."""
        held, self._held = self._held, b""
        return held

    def _rewritten(self, event: bytes) -> bytes:
        span = payload_span(event) if self._mark in event else None
        if span is None:
            return event
        rewritten, said = _at_most(event, span, self._shape.event, self._cached_tokens, self._shape)
        self.tokens = said or self.tokens
        return rewritten
