"""The one number of an answer that the router changes: cached_tokens.

It is to mean the prompt tokens that no engine computed this turn. Decode counts
as cached what it pulled from prefill, the whole prompt; prefill what it read
from decode and what it found in its own prefix cache. Both count from the start
of the prompt, so neither computed the smaller of their counts: that is what the
member says, where decode sent it. Every other byte stays. Nothing here does I/O.
"""

import re
from typing import Annotated, Any, Final, NamedTuple

import msgspec

from kvturn_router.request.spans import UNREADABLE, Span, find_member, replace
from kvturn_router.turn.sse import event_ends, first_end, last_end, payload_span

_TOKENS_MAX: Final = 999_999_999
"""The most tokens that are read as a number of them."""

_MODEL_MAX: Final = 512
"""Longest name of a model that is read as one."""

_UNFINISHED_MAX: Final = 1 << 20
"""Longest unfinished event that is remembered while its end is awaited, in bytes."""

_Tokens = Annotated[int, msgspec.Meta(ge=0, le=_TOKENS_MAX)] | None


class _Details(msgspec.Struct):
    cached_tokens: _Tokens = None


class _CompletionCounts(msgspec.Struct):
    """The tokens of the prompt and of what was generated, as completions write them."""

    prompt: _Tokens = msgspec.field(name="prompt_tokens", default=None)
    generated: _Tokens = msgspec.field(name="completion_tokens", default=None)
    details: _Details | None = msgspec.field(name="prompt_tokens_details", default=None)


class _ResponseCounts(msgspec.Struct):
    """The same, as the Responses API writes them."""

    prompt: _Tokens = msgspec.field(name="input_tokens", default=None)
    generated: _Tokens = msgspec.field(name="output_tokens", default=None)
    details: _Details | None = msgspec.field(name="input_tokens_details", default=None)


class _Completion(msgspec.Struct):
    """A completion, or an event of one."""

    usage: _CompletionCounts | None = None
    model: Any = None


class _Response(msgspec.Struct):
    """A response."""

    usage: _ResponseCounts | None = None
    model: Any = None


class _ResponseEvent(msgspec.Struct):
    """An event of a response that is streamed."""

    response: _Response | None = None


class UsageShape(NamedTuple):
    """Where the answers of an API say what they cost.

    `whole` and `event` read an answer and an event; what holds the usage there
    is under the member `inner` of an event, "" for the event itself. `details`
    is the member of the usage that holds `cached_tokens`, `mark` its name as it
    is written.
    """

    whole: msgspec.json.Decoder[Any]
    event: msgspec.json.Decoder[Any]
    inner: str
    details: str
    mark: bytes


COMPLETION_USAGE: Final = UsageShape(
    msgspec.json.Decoder(_Completion),
    msgspec.json.Decoder(_Completion),
    "",
    "prompt_tokens_details",
    b'"prompt_tokens_details"',
)
"""Of chat completions and completions."""

RESPONSE_USAGE: Final = UsageShape(
    msgspec.json.Decoder(_Response),
    msgspec.json.Decoder(_ResponseEvent),
    "response",
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


_cached_tokens = re.compile(rb'"cached_tokens"[ \t\r\n]*:[ \t\r\n]*([0-9]+)')


def passed_on(
    answer: bytes, cached_tokens: int | None, shape: UsageShape = COMPLETION_USAGE
) -> tuple[bytes, Usage | None]:
    """Returns a JSON answer whose cached_tokens are at most so many, and what it says then.

    None changes nothing. What it does not say is not added.
    """
    try:
        said = shape.whole.decode(answer)
    except UNREADABLE:
        return answer, None
    return _at_most(answer, (0, len(answer)), said, cached_tokens, shape)


def _event_passed_on(
    event: bytes, cached_tokens: int | None, shape: UsageShape
) -> tuple[bytes, Usage | None]:
    """Does what `passed_on` does to one event."""
    span = payload_span(event)
    if span is None:
        return event, None
    try:
        said = shape.event.decode(memoryview(event)[span[0] : span[1]])
    except UNREADABLE:
        return event, None
    if shape.inner:
        said = said.response
        inner = None if said is None else find_member(event, span, shape.inner)
        if inner is None:
            return event, None
        span = inner
    return _at_most(event, span, said, cached_tokens, shape)


def _at_most(
    text: bytes,
    span: Span,
    answer: _Completion | _Response,
    cached_tokens: int | None,
    shape: UsageShape,
) -> tuple[bytes, Usage | None]:
    """Does what `passed_on` does to the object at `span`, which says `answer`."""
    counts = answer.usage
    if counts is None:
        return text, None
    number = None if counts.details is None else counts.details.cached_tokens
    if number is not None and cached_tokens is not None and number > cached_tokens:
        place = _place(text, span, shape.details)
        if place is not None:
            text = replace(text, [(place, b"%d" % cached_tokens)])
            number = cached_tokens
    if counts.prompt is None or counts.generated is None:
        return text, None
    model = answer.model
    named = isinstance(model, str) and len(model) <= _MODEL_MAX
    return text, Usage(counts.prompt, counts.generated, number, model if named else "")


def _place(text: bytes, span: Span, details: str) -> Span | None:
    """Returns where the answer at `span`, which says its cached_tokens, has them."""
    found = _cached_tokens.search(text, *span)
    # Within a text its quotes would be escaped: what is written once is what was read.
    if found is not None and text.find(b'"cached_tokens"', found.end(), span[1]) < 0:
        return found.span(1)
    place: Span | None = span
    for name in ("usage", details, "cached_tokens"):
        place = None if place is None else find_member(text, place, name)
    return place


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
        mark = data.rfind(self._mark)
        if not (self._sent or self._held) and data.endswith(b"\n\n"):
            if mark < 0:
                return data
            if data.rfind(self._mark, 0, mark) < 0:
                return self._with_one(data, mark)
        return self._with_any(data)

    def _with_one(self, data: bytes, mark: int) -> bytes:
        """Does what `feed` does to whole events, of which the one at `mark` is to be looked at."""
        start, end = last_end(data, mark), first_end(data, mark)
        event = data[start:end]
        rewritten = self._rewritten(event)
        return data if rewritten is event else b"".join((data[:start], rewritten, data[end:]))

    def _with_any(self, data: bytes) -> bytes:
        """Does what `feed` does to whatever comes."""
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
        if self._mark not in event:
            return event
        event, said = _event_passed_on(event, self._cached_tokens, self._shape)
        self.tokens = said or self.tokens
        return event
