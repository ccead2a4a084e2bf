"""Calls of the gRPC front, written byte by byte, so that strings need not be UTF-8."""

from __future__ import annotations

from typing import Final, NamedTuple

from hypothesis import strategies as st

from fuzz.bodies import ROUTES, bodies, good_bodies


class Call(NamedTuple):
    """A request of Chat or Complete: its message's bytes, and what is in it."""

    method: str
    message: bytes
    body: bytes
    route: str | None
    """What the api field names; None if it names nothing."""
    plain: bool
    """Whether its other fields are as they should be, and name nothing."""


def _text_field(number: int, value: bytes) -> bytes:
    return bytes([number << 3 | 2]) + _varint(len(value)) + value if value else b""


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


_names: Final = st.one_of(
    st.just(b""),
    st.sampled_from([b"c", b"x" * 257, b"\xff", "\u00e9".encode() * 129, b"\x00", b"a~2"]),
)


@st.composite
def _calls(draw: st.DrawFn) -> Call:
    body = draw(st.one_of(bodies, good_bodies))
    api = draw(st.sampled_from([0, 1, 2, 2, 99]))
    conversation_id, scope = draw(_names), draw(_names)
    reuse = draw(st.sampled_from([b"", b"", b"", b"off", b"maybe"]))
    method = draw(st.sampled_from(["Chat", "Complete"]))
    message = (
        _text_field(1, conversation_id)
        + _text_field(2, body)
        + _text_field(3, reuse)
        + _text_field(4, scope)
        + (b"\x28" + _varint(api) if api else b"")
    )
    damage = draw(st.integers(0, 9))
    if damage == 0 and message:
        message = message[: draw(st.integers(0, len(message)))] + draw(st.binary(max_size=5))
    plain = not (conversation_id or scope or damage == 0) and reuse in (b"", b"off")
    routes = {0: ROUTES[0], 1: ROUTES[0], 2: ROUTES[1]}
    return Call(method, message, body, routes.get(api), plain)


calls: Final[st.SearchStrategy[Call]] = _calls()
"""Calls of every sort."""
