"""Digests of a turn's history: what an earlier turn was asked with is found again."""

import json
import time
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvturn_router.request.history import ANSWERS_MAX, History, history_of
from kvturn_router.request.intake import CHAT, COMPLETIONS

RESPONSES = "/v1/responses"
COMPACT = (",", ":")
SPACED = (", ", ": ")


def history(
    value: Any,
    path: str = CHAT,
    *,
    separators: tuple[str, str] = COMPACT,
    indent: int | None = None,
) -> History:
    text = json.dumps(value, separators=separators, indent=indent, ensure_ascii=False).encode()
    return of_text(text, path)


def of_text(text: bytes, path: str = CHAT, scope: str = "s") -> History:
    name = {CHAT: "messages", COMPLETIONS: "prompt", RESPONSES: "input"}[path]
    return history_of({name: msgspec.Raw(text)}, path, "t", "m", scope)


def role_last(role: str, content: str) -> dict[str, Any]:
    return {"content": content, "refusal": None, "role": role}


def chat(answers: int, message: Any = None) -> list[dict[str, Any]]:
    """Returns a chat of so many answers that ends with a question."""
    message = message or (lambda role, content: {"role": role, "content": content})
    turns = [message("system", "Be kind. " * 30)]
    for number in range(answers):
        turns += [message("user", f"question {number}"), message("assistant", f"answer {number}")]
    return [*turns, message("user", f"question {answers}")]


@pytest.mark.parametrize("message", [None, role_last], ids=["role first", "role last"])
@pytest.mark.parametrize(
    ("separators", "indent"), [(COMPACT, None), (SPACED, None), (SPACED, 2)], ids=str
)
def test_a_turn_holds_the_own_digest_of_each_turn_before_it(message, separators, indent):
    """Whatever way its client writes JSON; its own digest is that of no earlier turn."""
    turns = [
        history(chat(answers, message), separators=separators, indent=indent)
        for answers in range(6)
    ]
    for number, turn in enumerate(turns):
        assert [turn.points.index(earlier.points[0]) for earlier in turns[:number]] == list(
            range(number, 0, -1)
        )
        assert turn.points[0] not in turn.points[1:]


def test_the_first_message_is_the_last_point():
    """A compacted history shares it, and nothing after it."""
    whole = history(chat(3))
    compacted = history([*chat(0)[:1], {"role": "user", "content": "In short: ..."}])
    assert whole.points[-1] == compacted.points[-1]
    assert not set(whole.points[:-1]) & set(compacted.points[:-1])


@pytest.mark.parametrize("size", [*range(970, 1030), 2020, 5000])
def test_the_first_message_is_found_whatever_its_size(size):
    """Where it ends is looked for part by part."""
    alone = history([{"role": "system", "content": "x" * size}])
    followed = history([{"role": "system", "content": "x" * size}, {"role": "user", "content": ""}])
    assert followed.points[-1] == alone.points[0]


@pytest.mark.parametrize("message", [None, role_last], ids=["role first", "role last"])
def test_a_long_history_has_twenty_points(message):
    """Its own, before each of the 18 latest answers, its first message; all different."""
    long = history(chat(100, message))
    assert len(set(long.points)) == len(long.points) == ANSWERS_MAX + 2
    assert all(len(point) == 16 for point in long.points)
    assert history(chat(99, message)).points[0] == long.points[1]
    assert history(chat(82, message)).points[0] == long.points[18]
    assert history(chat(81, message)).points[0] not in long.points


def test_a_history_of_one_message_has_one_point():
    """Which is its own, so that the same question again does not go on from itself."""
    assert len(history(chat(0)[1:]).points) == 1


def test_a_tool_loop_goes_on_from_each_call():
    """Each request of the loop ends before the next message that the model makes."""
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}, {"id": "2"}]}
    results = [{"role": "tool", "tool_call_id": "1", "content": "sunny" * 50}] * 2
    messages = chat(0)
    before = history(messages)
    for _ in range(10):
        messages = [*messages, call, *results]
        after = history(messages)
        assert after.points[1] == before.points[0]
        before = after


@pytest.mark.parametrize("place", [0, 1, 2])
def test_an_edited_message_parts_the_histories_there(place):
    """Points before the edit stay, all after it change."""
    messages = chat(3)
    edited = [*messages]
    edited[1 + 2 * place] = {"role": "user", "content": "something else"}
    before, after = history(messages).points, history(edited).points
    assert before[4 - place :] == after[4 - place :]
    assert not set(before[: 4 - place]) & set(after[: 4 - place])


@pytest.mark.parametrize("change", ["tenant", "model", "scope", "path"])
def test_no_digest_is_shared_across_tenants_models_scopes_and_paths(change):
    """Equal text under another name is another history."""
    members = {name: json.dumps(chat(2)).encode() for name in ("messages", "prompt")}
    names = {"tenant": "t", "model": "m", "scope": "s", "path": CHAT}
    one = history_of(members, **names)
    other = history_of(members, **(names | {change: COMPLETIONS if change == "path" else "x"}))
    assert not set(one.points) & set(other.points)
    # Nor where the names only meet.
    shifted = history_of(members, CHAT, "tm", "", "s")
    assert not set(one.points) & set(shifted.points)


def test_new_bytes_are_what_comes_after_the_last_answer():
    """In bytes of JSON; all of a first turn is new."""
    for message in (None, role_last):
        turn = history(chat(2, message))
        new = json.dumps(chat(2, message)[-1], separators=COMPACT)
        assert turn.new_bytes - len(new) in (1, 2)
        assert turn.prompt_bytes == len(json.dumps(chat(2, message), separators=COMPACT))
    first = history(chat(0))
    assert first.prompt_bytes - first.new_bytes <= 1


@pytest.mark.parametrize(
    "text",
    [
        *(b"[]", b"[ ]", b"[1,2]", b'["assistant"]', b'"text"', b"{}", b"7", b"null", b'""'),
        *(b"[[]]", b"[{}]", b'[{"role":"assistant"}]', b'["{"]', b'[1,{"a":"assistant"}]'),
    ],
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES])
def test_what_is_no_history_is_not_told_by_one(text, path):
    """The engine judges it; here nothing is raised and bounds hold."""
    turn = of_text(text, path)
    assert len(turn.points) <= ANSWERS_MAX + 2
    assert 0 <= turn.new_bytes <= turn.prompt_bytes == len(text)


def test_a_request_without_its_member_has_no_history():
    """Prompt embeddings have no text."""
    assert history_of({}, COMPLETIONS, "t", "m", "") == History((), 0, 0)


# Prompts


@pytest.mark.parametrize("spaced", [False, True])
@pytest.mark.parametrize("ids", [False, True])
@pytest.mark.parametrize("size", [40, 900, 5_000, 100_000])
@pytest.mark.parametrize("growth", [0.07, 0.3, 0.9])
def test_a_longer_prompt_goes_on_from_its_beginning(size, growth, ids, spaced):
    """As text, as token ids, and as a list of one text."""
    grown = int(size * (1 + growth)) + 8
    if ids:
        short, long = list(range(1000, 1000 + size)), list(range(1000, 1000 + grown))
    else:
        text = "".join(chr(97 + i * i % 23) for i in range(grown))
        short, long = text[:size], text
        if spaced:
            short, long = [short], [long]
    separators = SPACED if spaced else COMPACT
    one = history(short, COMPLETIONS, separators=separators)
    other = history(long, COMPLETIONS, separators=separators)
    assert one.points[0] in other.points[1:]
    assert other.points[0] not in one.points


def test_a_prompt_is_told_by_nearly_all_of_it():
    """Only the last sixteenth does not count."""
    text = "x" * 10_000
    own = history(text, COMPLETIONS).points[0]
    assert history(text[:9_000] + "y" * 1_000, COMPLETIONS).points[0] != own
    assert history(text[:9_990] + "y" * 10, COMPLETIONS).points[0] == own


# The Responses API


def test_items_that_a_model_made_are_answers():
    """Reasoning, calls and messages; the results of calls are not."""
    question = {"role": "user", "content": "weather?"}
    made = [
        {"id": "rs_1", "type": "reasoning", "summary": []},
        {"id": "fc_1", "type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
    ]
    result = {"type": "function_call_output", "call_id": "c", "output": "sunny"}
    answer = {"id": "msg_1", "content": [], "role": "assistant", "type": "message"}
    turns = [
        history(items, RESPONSES)
        for items in (
            [question],
            [question, *made, result],
            [question, *made, result, answer, question],
        )
    ]
    assert turns[0].points[0] in turns[1].points[1:]
    assert turns[1].points[0] in turns[2].points[1:]
    assert turns[2].new_bytes < turns[2].prompt_bytes / 3
    assert len(history("weather?", RESPONSES).points) == 1
    called = history([question, made[1], result], RESPONSES)
    assert called.points[1] == turns[0].points[0]


# Any chat


_words = st.sampled_from(
    ["hi", "", "assistant", '"assistant"', '{"role":"assistant"', "},{", "é😀", "\\", "a, b]", "\n"]
)
_contents = st.one_of(
    _words,
    st.lists(_words, max_size=3).map("".join),
    st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": _words}), max_size=2),
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant"]), "name": _words}),
)


@st.composite
def _messages(draw: st.DrawFn) -> list[dict[str, Any]]:
    messages = []
    for _ in range(draw(st.integers(1, 9))):
        members = [
            ("role", draw(st.sampled_from(["system", "user", "assistant", "assistant", "tool"]))),
            ("content", draw(_contents)),
            ("name", draw(_words)),
        ]
        first = draw(st.sampled_from([0, 0, 0, 1]))
        messages.append(dict(members[first:] + members[:first]))
    return messages


@given(_messages(), st.sampled_from([COMPACT, SPACED]), st.sampled_from([None, None, 1]))
@settings(max_examples=300, deadline=None)
def test_any_chat_finds_its_earlier_turns(messages, separators, indent):
    """Wherever an answer begins, and whatever its messages look like."""
    turn = history(messages, separators=separators, indent=indent)
    assert len(turn.points) <= ANSWERS_MAX + 2
    for place, message in enumerate(messages):
        if place and message["role"] == "assistant":
            earlier = history(messages[:place], separators=separators, indent=indent)
            assert earlier.points[0] in turn.points[1:]


@pytest.mark.parametrize(
    "text",
    [
        b"[" + b'{"role":"assistant"},' * 100_000 + b"{}]",
        b"[" + b'{"a":"assistant"},' * 100_000 + b"{}]",
        b"[" + (b'{"role":"assistant"}' + b" " * 10_000 + b",") * 200 + b"{}]",
        b'[{"role":"user","content":"' + b"assistan" * 250_000 + b'"}]',
        b'[{"role":"user","content":"' + b'\\"assistant\\"' * 150_000 + b'"}]',
        b'[{"role":"user","content":"'
        + b"x" * 1_500_000
        + b'"}'
        + b',{"role":"x"}' * 50_000
        + b"]",
    ],
    ids=["answers", "role last", "white space", "near", "quoted", "long first"],
)
def test_a_hostile_history_costs_little_more_than_reading_it(text):
    """No history of 2 MB takes longer than a few reads of it."""
    began = time.process_time()
    list(msgspec.json.decode(text))
    reading = time.process_time() - began
    began = time.process_time()
    of_text(text)
    assert time.process_time() - began < 10 * reading + 0.05
