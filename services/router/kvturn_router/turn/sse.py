"""Server-sent events, cut where they end. Nothing here does I/O."""

import re

_end = re.compile(rb"\r?\n\r?\n")
_line = re.compile(rb"^data:[ ]?(.*?)\r?$", re.MULTILINE)

DONE = b"[DONE]"
"""Payload of the event that ends an OpenAI stream."""

EVENT_BYTES_MAX = 16 << 20
"""Longest event that is kept while its end is awaited."""


def event_ends(text: bytes) -> list[int]:
    """Returns where each whole event in the text ends, the blank line included."""
    return [found.end() for found in _end.finditer(text)]


class EventSplitter:
    """Cuts a stream into whole events, however it was cut into reads."""

    def __init__(self) -> None:
        self._rest = b""

    @property
    def rest(self) -> bytes:
        """What came after the last whole event."""
        return self._rest

    def feed(self, data: bytes) -> list[bytes]:
        """Returns the events that `data` completes, each with the blank line that ends it.

        Raises ValueError when an event grows beyond EVENT_BYTES_MAX.
        """
        text = self._rest + data if self._rest else data
        events: list[bytes] = []
        position = 0
        for end in event_ends(text):
            events.append(text[position:end])
            position = end
        self._rest = text[position:]
        if len(self._rest) > EVENT_BYTES_MAX:
            raise ValueError(f"an event is longer than {EVENT_BYTES_MAX} bytes")
        return events


def payload_span(event: bytes) -> tuple[int, int] | None:
    """Returns where an event's data lies; None if it has none, or more than one line of it."""
    found = list(_line.finditer(event))
    return found[0].span(1) if len(found) == 1 else None


def payload(event: bytes) -> bytes:
    """Returns an event's data, its lines joined; empty if it has none."""
    return b"\n".join(found[1] for found in _line.finditer(event))


def event(data: bytes) -> bytes:
    """Returns an event with one line of data."""
    return b"data: " + data + b"\n\n"
