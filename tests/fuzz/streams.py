"""What a client puts on a connection: requests, their framing, and ways to get them wrong.

Every request carries a turn of its own model, "m0", "m1", ... Between them, and
in bodies, lie turns of the model "smuggled": whatever reads one of those as a
request of its own has been led astray about where a request ends.
"""

from __future__ import annotations

import json
from typing import Final, NamedTuple

from hypothesis import strategies as st

from fuzz.bodies import ROUTES, bodies

SMUGGLED: Final = "smuggled"


class Stream(NamedTuple):
    """Bytes on one connection.

    `strict`: it holds requests in good form, of which `models` must be served,
    in that order, unless one before them is refused. Not strict: something is
    wrong with it, and at best it is refused.
    """

    data: bytes
    models: tuple[str, ...]
    strict: bool


def turn_of(model: str, **more: object) -> bytes:
    """Returns the body of a turn."""
    return json.dumps(
        {"model": model, "messages": [{"role": "user", "content": "x"}]} | more
    ).encode()


def request(
    body: bytes,
    framing: bytes | None = None,
    *,
    path: bytes = b"/v1/chat/completions",
    version: bytes = b"1.1",
    fields: bytes = b"",
    method: bytes = b"POST",
) -> bytes:
    """Returns a request; `framing` is its framing's fields, of its length by default."""
    if framing is None:
        framing = b"content-length: %d\r\n" % len(body)
    return b"%b %b HTTP/%b\r\nhost: router\r\ncontent-type: application/json\r\n%b%b\r\n%b" % (
        method,
        path,
        version,
        fields,
        framing,
        body,
    )


def chunked(
    body: bytes, size: int = 1 << 30, extension: bytes = b"", trailer: bytes = b""
) -> bytes:
    """Returns a body in chunks."""
    pieces = [body[at : at + size] for at in range(0, len(body), size)]
    parts = [b"%x%b\r\n%b\r\n" % (len(piece), extension, piece) for piece in pieces]
    return b"".join(parts) + b"0\r\n" + trailer + b"\r\n"


CHUNKED: Final = b"transfer-encoding: chunked\r\n"
_hidden: Final = request(turn_of(SMUGGLED))

_fields: Final = st.sampled_from(
    [
        *(b"", b"", b"", b"x-a: 1\r\n", b"X-A:\t 1 \t\r\n", b"x-empty:\r\n", b"x-\xc3\xa9: 1\r\n"),
        *(b"accept: */*\r\nuser-agent: a\r\n", b"x-long: " + b"y" * 3_000 + b"\r\n"),
        *(b"expect: 100-continue\r\n", b"connection: keep-alive\r\n", b"x-high: \xe9\xff\r\n"),
        *(b"connection: upgrade, http2-settings\r\nupgrade: h2c\r\nhttp2-settings: AAMA\r\n",),
        *(b"connection: Upgrade\r\nupgrade: websocket\r\n", b"x-conversation-id: c\r\n"),
        *(b"x-conversation-id: \xff\r\n", b"x-conversation-id:\r\n", b"x-kvturn-reuse: off\r\n"),
        *(b"x-kvturn-reuse: maybe\r\n", b"traceparent: 00-x\r\n", b"authorization: Bearer k\r\n"),
        *(b"authorization: Basic \xff\r\n", b"x-request-id: a b\r\n", b"x-session-id: \xe9\r\n"),
        *(b"x-session-id: s\r\nx-session-id: t\r\n",),
    ]
)

_framings_good: Final = st.sampled_from(
    [
        lambda body: (None, body),
        lambda body: (None, body),
        lambda body: (CHUNKED, chunked(body)),
        lambda body: (CHUNKED, chunked(body, 7)),
        lambda body: (CHUNKED, chunked(body, 20, b";a=b")),
        lambda body: (CHUNKED, chunked(body, 50, b"", b"x-trailer: 1\r\n")),
        lambda body: (b"Transfer-Encoding: Chunked\r\n", chunked(body)),
    ]
)

# Each says in two ways where the body ends, or in one that is not allowed.
_lengths_bad: Final = (
    *(b"+%d", b"-%d", b"0x%x", b"%d ,%d", b"%d, 0", b"%de0", b"%d.0", b'"%d"', b"\xb2", b""),
    *(b"18446744073709551616%d", b"%d 5", b"%d\x0b", b"\x00%d"),
)
_codings_bad: Final = (
    *(b"chunked, identity", b"identity", b"xchunked", b"chunked;q=1", b"\x0bchunked", b'"chunked"'),
    *(b"chunked, chunked", b"gzip, chunked", b"gzip", b"chunked\x00", b"chunked x", b"", b"cow"),
)
_lines_bad: Final = (
    *(b"transfer-encoding : chunked\r\n", b" transfer-encoding: chunked\r\n", b"bad line\r\n"),
    *(b"x: a\r\n transfer-encoding: chunked\r\n", b"x: a\rtransfer-encoding: chunked\r\n"),
    *(
        b"x: a\ntransfer-encoding: chunked\n",
        b"x: \x00\r\n",
        b": v\r\n",
        b"x y: 1\r\n",
        b"\r\n\r\n",
    ),
    *(
        b"transfer-encoding\r\n: chunked\r\n",
        b"\xfftransfer-encoding: chunked\r\n",
        b"x: a\x08\r\n",
    ),
)
_END: Final = b"\r\n0\r\n\r\n"
_chunks_bad: Final = (
    *(b"%x\n%b\n0\n\n", b"0x%x\r\n%b" + _END, b"-%x\r\n%b" + _END, b" %x\r\n%b" + _END),
    *(b"%x \r\n%b" + _END, b"%xg\r\n%b" + _END, b"fffffffffffffffff%x\r\n%b" + _END),
    *(b"%x\r\n%b0\r\n\r\n", b"%x\r%b" + _END, b"%x;\n\r\n%b" + _END, b"%x\r\n%bXX0\r\n\r\n"),
    *(b"%x\r\n%b\r\n0\r\ncontent-length: 5\r\n\r\n", b'%x;a="\n"\r\n%b' + _END),
)


def _with_length(way: bytes, body: bytes) -> bytes:
    numbers = (len(body),) * way.count(b"%")
    return request(body + _hidden, b"content-length: " + way % numbers + b"\r\n")


def _with_coding(way: bytes, body: bytes) -> bytes:
    return request(chunked(body) + _hidden, b"transfer-encoding: " + way + b"\r\n")


def _with_both(first: bool, body: bytes) -> bytes:
    inside = chunked(body) + _hidden
    length = b"content-length: %d\r\n" % len(inside)
    return request(inside, CHUNKED + length if first else length + CHUNKED)


def _with_line(way: bytes, body: bytes) -> bytes:
    length = b"content-length: %d\r\n" % len(body)
    return request(body + _hidden, way + length)


def _with_chunks(way: bytes, body: bytes) -> bytes:
    return request(way % (len(body), body) + _hidden, CHUNKED)


def _with_version(way: bytes, body: bytes) -> bytes:
    return request(chunked(body) + _hidden, CHUNKED, version=way)


def _in_body(framing: bytes | None, body: bytes) -> bytes:
    """A request in another's body, which is no JSON then."""
    inside = body + _hidden
    return request(chunked(inside) if framing else inside, framing)


_body_of_m0: Final = turn_of("m0")
_wrong: Final = st.one_of(
    st.builds(_with_length, st.sampled_from(_lengths_bad), st.just(_body_of_m0)),
    st.builds(_with_coding, st.sampled_from(_codings_bad), st.just(_body_of_m0)),
    st.builds(_with_both, st.booleans(), st.just(_body_of_m0)),
    st.builds(_with_line, st.sampled_from(_lines_bad), st.just(_body_of_m0)),
    st.builds(_with_chunks, st.sampled_from(_chunks_bad), st.just(_body_of_m0)),
    st.builds(
        _with_version, st.sampled_from([b"1.0", b"0.9", b"2.0", b"1.2", b"1"]), st.just(_body_of_m0)
    ),
    st.builds(_in_body, st.sampled_from([None, CHUNKED]), st.just(_body_of_m0)),
    st.just(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
    st.just(request(_body_of_m0, method=b"CONNECT", path=b"router:80") + _hidden),
)


@st.composite
def _requests(draw: st.DrawFn) -> Stream:
    """Requests in good form, one after the other, some of bodies of any sort."""
    data, models = b"", []
    for number in range(draw(st.integers(1, 4))):
        model = f"m{number}"
        kind = draw(st.integers(0, 4))
        if kind == 0:
            body = draw(bodies)
        else:
            body = turn_of(model, stream=draw(st.booleans()), note=_hidden.decode())
            models.append(model)
        framing, framed = draw(_framings_good)(body)
        if framing is not None and not body:
            framed = chunked(body)
        path = draw(st.sampled_from(ROUTES[:1] if kind else ROUTES)).encode()
        data += request(framed, framing, path=path, fields=draw(_fields))
        if draw(st.integers(0, 6)) == 0:
            data += b"\r\n"
        if draw(st.integers(0, 4)) == 0:
            data += request(b"", b"", path=draw(_others), method=draw(_methods))
    return Stream(data, tuple(models), True)


_methods: Final = st.sampled_from([b"GET", b"HEAD", b"DELETE", b"OPTIONS", b"PUT", b"TRACE"])
_others: Final = st.sampled_from(
    [
        *(
            b"/health",
            b"/ready",
            b"/v1/models",
            b"/",
            b"*",
            b"/%00",
            b"//",
            b"/v1/chat/completions",
        ),
        *(b"/kvturn/v1/conversations/c?model=m", b"/kvturn/v1/conversations/%ff?model=%ff"),
        *(b"/kvturn/v1/conversations//keepalive", b"/kvturn/v1/conversations/" + b"x" * 400),
        *(b"/\xff\xfe", b"/health?a=" + b"b" * 5_000, b"http://other/health", b"/../health"),
    ]
)


_marks: Final = st.sampled_from([b"\r\n", b"\n", b"\r", b"\x00", b":", b" ", b"0\r\n\r\n"])


@st.composite
def _damaged(draw: st.DrawFn) -> Stream:
    """A good stream with bytes changed, left out, put in or twice there."""
    data = bytearray(draw(_requests()).data)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data)))
        way = draw(st.integers(0, 3))
        if way == 0:
            data[at : at + 1] = draw(st.binary(max_size=4))
        elif way == 1:
            del data[at : at + draw(st.integers(1, 20))]
        elif way == 2:
            data[at:at] = data[at : at + draw(st.integers(1, 60))]
        else:
            data[at:at] = draw(
                st.sampled_from([b"\r\n", b"\n", b"\r", b"\x00", b":", b" ", b"0\r\n\r\n"])
            )
    return Stream(bytes(data), (), False)


_noise: Final = st.binary(max_size=200).map(lambda data: Stream(data, (), False))
_wrongs: Final = st.builds(
    lambda before, wrong: Stream(before + wrong, (), True),
    st.sampled_from([b"", b"", b"\r\n", request(b"", b"", path=b"/health", method=b"GET")]),
    _wrong,
)

streams: Final[st.SearchStrategy[Stream]] = st.one_of(
    _requests(), _wrongs, _wrongs, _damaged(), _noise
)
"""Streams of every sort. In none but damaged ones may a smuggled turn be served."""

wrong_streams: Final[st.SearchStrategy[Stream]] = _wrongs
"""Streams of which a careless reader serves a smuggled turn."""
