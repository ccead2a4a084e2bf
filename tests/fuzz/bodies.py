"""Request bodies: well formed, nearly so, and not at all.

JSON is written out by hand, because what matters is how it is written: white
space, escapes, numbers that no float holds, names that occur twice, brackets
that do not match.
"""

from __future__ import annotations

import json
from typing import Final

from hypothesis import strategies as st

ROUTES: Final = ("/v1/chat/completions", "/v1/completions", "/v1/responses")

NAMES: Final = (
    *("model", "messages", "prompt", "input", "stream", "stream_options", "n", "best_of"),
    *("max_tokens", "max_completion_tokens", "min_tokens", "echo", "use_beam_search", "stop"),
    *("prompt_logprobs", "truncate_prompt_tokens", "routed_experts_prompt_start"),
    *("prompt_embeds", "vllm_xargs", "kv_transfer_params", "ec_transfer_params", "request_id"),
    *("conversation_id", "session_id", "prompt_cache_key", "return_token_ids", "tools"),
    *("temperature", "max_output_tokens", "previous_response_id", "background", "store"),
    *("truncation", "metadata", "return_prompt_text", "stream_interval"),
    *("", "Model", "mod\u00e9l", "a b", 'quo"te', "\\", "__proto__", "\U0001f600"),
)

_space = st.sampled_from(["", "", "", "", " ", "\n", "\t", "\r\n  ", "  "])
_odd_space = st.sampled_from(
    ["", "", "", "\x0b", "\x0c", "\u00a0", "\ufeff", "\x00", "/**/", "//\n"]
)
_texts = st.one_of(
    st.sampled_from(
        ["", "m", "assistant", "hi", "x" * 300, "\x00", "\x7f", "\u2028", "\U0001f600"]
    ),
    st.text(max_size=12),
)
_numbers = st.one_of(
    st.sampled_from(
        [
            *("0", "-0", "1", "2", "-1", "1.0", "1e0", "0.1", "1E+2", "9007199254740993", "1e308"),
            *("1e999", "-1e999", "1e-999", "18446744073709551616", "0.30000000000000004"),
            "1" * 400,
        ]
    ),
    st.integers().map(str),
    st.integers(4_290, 4_310).map("1".__mul__),
    st.floats(allow_nan=False, allow_infinity=False).map(repr),
)
_odd_numbers = st.sampled_from(
    ["01", "+1", "1.", ".5", "-", "1e", "0x10", "NaN", "Infinity", "-Infinity", "1_0", "1,0", "--1"]
)
_words = st.sampled_from(["true", "false", "null"])
_odd_words = st.sampled_from(["True", "nul", "undefined", "", "tru e", "NULL", "'a'"])
_odd_strings = st.sampled_from(
    [
        *('"', '"\\x41"', '"\\u12"', '"\\ud800"', '"\\udc00\\ud800"'),
        *('"a\nb"', '"\x01"', '"\\"', '"\\8"'),
    ]
)


@st.composite
def _string(draw: st.DrawFn) -> str:
    """A string, with some of its characters escaped."""
    text = draw(_texts)
    way = draw(st.integers(0, 3))
    if way == 0:
        return json.dumps(text)
    if way == 1:
        return json.dumps(text, ensure_ascii=False)
    if way == 2:
        return json.dumps(text).replace("/", "\\/").replace("a", "\\u0061")
    return '"' + "".join(f"\\u{unit:04x}" for unit in _units(text)) + '"'


def _units(text: str) -> list[int]:
    units = text.encode("utf-16-be", "surrogatepass")
    return [int.from_bytes(units[at : at + 2], "big") for at in range(0, len(units), 2)]


_well_formed = st.one_of(_string(), _numbers, _words)
_ill_formed = st.one_of(_odd_strings, _odd_numbers, _odd_words)


@st.composite
def _array(draw: st.DrawFn, items: st.SearchStrategy[str]) -> str:
    space = draw(_space)
    return "[" + (space + "," + space).join(draw(st.lists(items, max_size=4))) + space + "]"


@st.composite
def _object(draw: st.DrawFn, values: st.SearchStrategy[str]) -> str:
    names = draw(st.lists(st.sampled_from(NAMES), max_size=4))
    space = draw(_space)
    members = (f"{space}{json.dumps(name)}{space}:{space}{draw(values)}" for name in names)
    return "{" + ",".join(members) + space + "}"


_values = st.recursive(
    _well_formed, lambda inner: st.one_of(_array(inner), _object(inner)), max_leaves=8
)
_any_values = st.one_of(_values, _values, _values, _ill_formed)

_messages = st.lists(
    st.one_of(
        st.builds(
            lambda role, content, first: (
                f'{{"role":"{role}","content":{content}}}'
                if first
                else f'{{"content":{content},"role":"{role}"}}'
            ),
            st.sampled_from(["system", "user", "assistant", "tool"]),
            _values,
            st.booleans(),
        ),
        _values,
    ),
    max_size=4,
).map(lambda messages: "[" + ",".join(messages) + "]")
_ids = st.lists(st.integers(0, 9).map(str), max_size=5).map(lambda ids: "[" + ", ".join(ids) + "]")

# For members that the router looks at, a value of the right kind most of the time.
_fitting: Final[dict[str, st.SearchStrategy[str]]] = {
    "model": st.one_of(st.just('"m"'), st.just('"m"'), _string()),
    "messages": _messages,
    "prompt": st.one_of(_string(), _ids, _array(_string()), _array(_ids)),
    "input": st.one_of(_string(), _messages),
    "stream": _words,
    "vllm_xargs": _object(_values),
    "session_id": _string(),
    "tools": _array(st.one_of(_values, st.just('{"type":"function"}'))),
    "previous_response_id": st.one_of(_string(), st.just('"resp_' + "0" * 48 + 'Yw"')),
    "conversation_id": _string(),
}


@st.composite
def _member(draw: st.DrawFn, name: str, values: st.SearchStrategy[str]) -> str:
    written = json.dumps(name, ensure_ascii=draw(st.booleans()))
    if draw(st.integers(0, 9)) == 0 and name:
        written = f'"\\u{_units(name)[0]:04x}{written[2:]}' if ord(name[0]) < 0x80 else written
    value = draw(st.one_of(_fitting.get(name, values), _fitting.get(name, values), values))
    return f"{draw(_space)}{written}{draw(_space)}:{draw(_space)}{value}{draw(_space)}"


@st.composite
def _turn(draw: st.DrawFn, values: st.SearchStrategy[str]) -> str:
    """A turn of some route, now and then without what it needs."""
    names = [draw(st.sampled_from(["messages", "prompt", "input"])), "model"]
    names += draw(st.lists(st.sampled_from(NAMES), max_size=5))
    if draw(st.integers(0, 5)):
        names = list(dict.fromkeys(names))
    names = draw(st.permutations(names))
    return "{" + ",".join(draw(_member(name, values)) for name in names) + "}"


@st.composite
def _deep(draw: st.DrawFn) -> str:
    """A turn that nests to about the limit, in one of many ways."""
    depth = draw(st.one_of(st.integers(120, 135), st.just(5_000)))
    opening, closing = draw(
        st.sampled_from([("[", "]"), ('{"a":', "}"), ('[{"[":', "}]"), ('["]",', "]")])
    )
    times = max(1, depth // (2 if len(opening) == 6 else 1))
    inner = draw(st.sampled_from(["0", '"]}"', '"\\\\"', '"\\"[["', "[]", "{}"]))
    flat = draw(st.sampled_from(["", "[]," * 200, '"[[[[",' * 60, "{}," * 130]))
    closed = times if draw(st.integers(0, 3)) else draw(st.integers(0, times))
    return f'{{"model":"m","messages":[{flat}{opening * times}{inner}{closing * closed}]}}'


@st.composite
def _damaged(draw: st.DrawFn, texts: st.SearchStrategy[str]) -> bytes:
    """Bytes of a body with a few of them changed, left out or put in."""
    body = bytearray(draw(texts).encode("utf-8", "surrogatepass"))
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(body)))
        piece = draw(
            st.one_of(
                st.binary(max_size=3),
                st.sampled_from(
                    [
                        *(b"\xff", b"\xc0\xaf", b"\xed\xa0\x80", b"\xf4\x90\x80\x80"),
                        *(
                            b"\xef\xbb\xbf",
                            b"\x00",
                            b'"',
                            b"\\",
                            b"{",
                            b"}",
                            b"[",
                            b"]",
                            b",",
                            b":",
                        ),
                    ]
                ),
            )
        )
        body[at : at + draw(st.integers(0, 2))] = piece
    return bytes(body)


@st.composite
def _encoded(draw: st.DrawFn) -> bytes:
    """A good body in another encoding."""
    text = '{"model":"m","messages":[{"role":"user","content":"h\u00e9"}]}'
    encoding = draw(st.sampled_from(["utf-16", "utf-16-le", "utf-32", "latin-1", "utf-8-sig"]))
    return text.encode(encoding)


_turns = st.one_of(_turn(_values), _turn(_values), _turn(_any_values))

bodies: Final[st.SearchStrategy[bytes]] = st.one_of(
    _turns.map(lambda text: text.encode("utf-8", "surrogatepass")),
    st.builds(
        lambda before, text, after: (before + text + after).encode("utf-8", "surrogatepass"),
        _odd_space,
        _turns,
        _odd_space,
    ),
    _deep().map(str.encode),
    _damaged(_turns),
    _encoded(),
    _values.map(lambda text: text.encode("utf-8", "surrogatepass")),
    st.binary(max_size=60),
)
"""Bodies of every sort."""

good_bodies: Final[st.SearchStrategy[bytes]] = _turn(_values).map(
    lambda text: text.encode("utf-8", "surrogatepass")
)
"""Bodies that are JSON objects, nearly all of them turns."""
