"""The one number of an answer that the router changes: cached_tokens.

It is to mean the prompt tokens that no engine computed this turn. Decode counts
as cached what it pulled from prefill, the whole prompt; prefill what it read
from decode and what it found in its own prefix cache. Both count from the start
of the prompt, so neither computed the smaller of their counts: that is what the
member says, where decode sent it. Every other byte stays. Nothing here does I/O.
"""

from typing import Final, NamedTuple

from kvturn_router.request.spans import Span, find_member, replace
from kvturn_router.turn.sse import event_ends, payload_span


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
    """What an answer says of its tokens; `cached_tokens` is None if it says nothing of them."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None


_DIGITS_MAX = 9
"""Longest number of tokens that is read as one."""

_UNFINISHED_MAX = 1 << 20
"""Longest unfinished event that is remembered while its end is awaited, in bytes."""


def with_cached_tokens(
    answer: bytes, cached_tokens: int, shape: UsageShape = COMPLETION_USAGE
) -> bytes:
    """Returns a JSON answer whose cached_tokens are at most so many, if it has that member."""
    usage = _member(answer, (0, len(answer)), shape.whole)
    return answer if usage is None else _replaced(answer, usage, cached_tokens, shape)


def _replaced(text: bytes, usage: Span, cached_tokens: int | None, shape: UsageShape) -> bytes:
    if cached_tokens is None:
        return text
    found = _member(text, usage, (shape.details, "cached_tokens"))
    given = _number(text, found)
    if found is None or given is None or given <= cached_tokens:
        return text
    return replace(text, [(found, b"%d" % cached_tokens)])


def usage_of(answer: bytes, shape: UsageShape = COMPLETION_USAGE) -> Usage | None:
    """Returns what a JSON answer says of its tokens, None if it says nothing."""
    usage = _member(answer, (0, len(answer)), shape.whole)
    return None if usage is None else _usage_at(answer, usage, shape)


def _usage_at(text: bytes, usage: Span, shape: UsageShape) -> Usage | None:
    prompt, completion = (_number(text, find_member(text, usage, name)) for name in shape.counts)
    if prompt is None or completion is None:
        return None
    cached = _number(text, _member(text, usage, (shape.details, "cached_tokens")))
    return Usage(prompt, completion, cached)


def _member(text: bytes, span: Span, names: tuple[str, ...]) -> Span | None:
    found: Span | None = span
    for name in names:
        if found is None:
            return None
        found = find_member(text, found, name)
    return found


def _number(text: bytes, span: Span | None) -> int | None:
    digits = b"" if span is None else text[span[0] : span[1]]
    return int(digits) if len(digits) <= _DIGITS_MAX and digits.isdigit() else None


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
        out: list[bytes] = []
        position = 0
        for end in event_ends(text):
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
        usage = None if span is None else _member(event, span, self._shape.event)
        if usage is None:
            return event
        rewritten = _replaced(event, usage, self._cached_tokens, self._shape)
        grown = len(rewritten) - len(event)
        said = _usage_at(rewritten, (usage[0], usage[1] + grown), self._shape)
        self.tokens = said or self.tokens
        return rewritten
