"""Server-sent events, cut where they end. Nothing here does I/O."""

import re

_end = re.compile(rb"\r?\n\r?\n")
_line = re.compile(rb"^data:[ ]?(.*?)\r?$", re.MULTILINE)

DONE = b"[DONE]"
"""Payload of the event that ends an OpenAI stream."""

_last_of_response = re.compile(rb"event:[ ]?(response\.(completed|incomplete|failed)|error)[\r\n]")

EVENT_BYTES_MAX = 16 << 20
"""Longest event that is kept while its end is awaited."""


def event_ends(text: bytes, start: int = 0) -> list[int]:
    """Returns where each whole event from `start` on ends, the blank line included."""
    return [found.end() for found in _end.finditer(text, start)]


def last_end(text: bytes, before: int) -> int:
    """Returns where the last event ends that is whole before a place, 0 if none is."""
    blank_lines = (b"\n\n", b"\n\r\n")
    places = [(text.rfind(blank, 0, before), len(blank)) for blank in blank_lines]
    return max([place + size for place, size in places if place >= 0], default=0)


def first_end(text: bytes, start: int) -> int:
    """Returns where the first event ends that is whole after a place, or where the text does."""
    found = _end.search(text, start)
    return len(text) if found is None else found.end()


_END_BYTES_MAX = 4
"""Longest blank line that ends an event, with the end of the line before it."""


class EventSplitter:
    """Cuts a stream into whole events, however it was cut into reads."""

    def __init__(self) -> None:
        # Joined when the event ends: each read is looked at once, however long the event is.
        self._pieces: list[bytes] = []
        self._size = 0
        self._tail = b""

    @property
    def rest(self) -> bytes:
        """What came after the last whole event."""
        return b"".join(self._pieces)

    @property
    def too_long(self) -> bool:
        """Whether an event has grown beyond EVENT_BYTES_MAX."""
        return self._size > EVENT_BYTES_MAX

    def feed(self, data: bytes) -> list[bytes]:
        """Returns the events that `data` completes, each with the blank line that ends it.

        Not to be called any more once `too_long`.
        """
        events: list[bytes] = []
        position = 0
        # A blank line may have begun in what came before.
        for end in event_ends(self._tail + data):
            end -= len(self._tail)
            self._pieces.append(data[position:end])
            events.append(b"".join(self._pieces))
            self._pieces.clear()
            self._size = 0
            position = end
        rest = data[position:] if position else data
        if rest:
            self._pieces.append(rest)
            self._size += len(rest)
        self._tail = (b"" if position else self._tail) + rest[1 - _END_BYTES_MAX :]
        self._tail = self._tail[1 - _END_BYTES_MAX :]
        return events


class EndWatch:
    """Tells whether a stream ended as OpenAI's do, where nothing else says that it was not cut."""

    def __init__(self) -> None:
        self._splitter = EventSplitter()
        self._seen = False

    @property
    def seen(self) -> bool:
        """Whether its last event came, or it cannot be told."""
        return self._seen or self._splitter.too_long or _is_last(self._splitter.rest)

    def feed(self, data: bytes) -> None:
        """Takes more of the stream."""
        if not self._splitter.too_long:
            self._seen = self._seen or any(map(_is_last, self._splitter.feed(data)))


def _is_last(event: bytes) -> bool:
    return payload(event) == DONE or _last_of_response.match(event) is not None


def payload_span(event: bytes) -> tuple[int, int] | None:
    """Returns where an event's data lies; None if it has none, or more than one line of it."""
    if event.startswith(b"data: ") and event.find(b"\n") == len(event) - 2:
        return 6, len(event) - 2  # As nearly all are; to search them takes ten times as long.
    found = list(_line.finditer(event))
    return found[0].span(1) if len(found) == 1 else None


def payload(event: bytes) -> bytes:
    """Returns an event's data, its lines joined; empty if it has none."""
    return b"\n".join(found[1] for found in _line.finditer(event))


def event(data: bytes) -> bytes:
    """Returns an event with one line of data."""
    return b"data: " + data + b"\n\n"
