"""The one number of an answer that the router changes: cached_tokens.

Decode reports the KV it pulled from prefill as cached, which is the whole
prompt. What a client may be billed for is what no engine computed this turn:
the tokens prefill read from decode and those it found in its own prefix cache.
`usage.prompt_tokens_details.cached_tokens` is set to that, where the engine
sent that member; every other byte stays. Nothing here does I/O.
"""

from kvturn_router.spans import Span, find_member, replace
from kvturn_router.sse import event_ends, payload_span

_MARK = b'"prompt_tokens_details"'

_UNFINISHED_MAX = 1 << 20
"""Longest unfinished event that is remembered while its end is awaited, in bytes."""


def with_cached_tokens(answer: bytes, cached_tokens: int) -> bytes:
    """Returns a JSON answer with its cached_tokens replaced, if it has that member."""
    return _replaced(answer, (0, len(answer)), cached_tokens)


def _replaced(text: bytes, span: Span, cached_tokens: int) -> bytes:
    for name in ("usage", "prompt_tokens_details", "cached_tokens"):
        found = find_member(text, span, name)
        if found is None:
            return text
        span = found
    if not text[span[0] : span[1]].isdigit():
        return text
    return replace(text, [(span, b"%d" % cached_tokens)])


def usage_tokens(text: bytes, span: Span | None = None) -> tuple[int, int] | None:
    """Returns prompt_tokens and completion_tokens of an answer's usage, None if it has none."""
    usage = find_member(text, span or (0, len(text)), "usage")
    if usage is None:
        return None
    counts: list[int] = []
    for name in ("prompt_tokens", "completion_tokens"):
        found = find_member(text, usage, name)
        digits = text[found[0] : found[1]] if found is not None else b""
        if not digits.isdigit():
            return None
        counts.append(int(digits))
    return counts[0], counts[1]


class StreamUsage:
    """Passes a stream of events through, replacing cached_tokens.

    Reads go on as they came. Only an event that holds `prompt_tokens_details`
    is looked at, and held back until it is whole.
    """

    def __init__(self, cached_tokens: int) -> None:
        self._cached_tokens = cached_tokens
        # An unfinished event: the part that has gone out, and the part that
        # is held back. Both are empty when the last read ended with an event,
        # as nearly every read does.
        self._sent = b""
        self._held = b""
        self.tokens: tuple[int, int] | None = None

    def feed(self, data: bytes) -> bytes:
        """Returns what may go out now."""
        if not self._sent and not self._held and _MARK not in data and data.endswith(b"\n\n"):
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
        elif _MARK in rest:
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
        span = payload_span(event) if _MARK in event else None
        if span is None:
            return event
        self.tokens = usage_tokens(event, span) or self.tokens
        return _replaced(event, span, self._cached_tokens)
