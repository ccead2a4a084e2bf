"""The demo's pure parts: the scripted conversation, its rows, its file and its verdict."""

import dataclasses
import itertools
import json
from pathlib import Path

import pytest

from kvturn_cli.rows import HEADER, UNITS, Row, make_row, summary, table_line, to_json
from kvturn_cli.script import EDIT, QUESTIONS, SUMMARY, pieces, script
from kvturn_cli.turn import Message, TurnResult

LICENSE = (Path(__file__).resolve().parent.parent / "LICENSE").read_text()


def held() -> list[tuple[str, list[Message]]]:
    """Returns kind and messages of every turn, each answered by "reply N"."""
    history: list[Message] = []
    turns = []
    for number, turn in enumerate(script(LICENSE), 1):
        messages = turn.messages(history)
        turns.append((turn.kind, messages))
        history = [*messages, {"role": "assistant", "content": f"reply {number}"}]
    return turns


def test_the_script_holds_every_kind_in_order() -> None:
    """At least five growing turns, then compacted, edited, regenerate, after the end."""
    kinds = [kind for kind, _ in held()]
    assert kinds == ["growing"] * 6 + ["compacted", "edited", "regenerate", "after_end"]


def test_each_growing_turn_extends_the_one_before() -> None:
    """A growing turn's messages are the last ones, the reply, and one more question."""
    turns = [messages for kind, messages in held() if kind == "growing"]
    for number, (before, after) in enumerate(itertools.pairwise(turns), 1):
        reply = {"role": "assistant", "content": f"reply {number}"}
        assert after[:-1] == [*before, reply]
        assert after[-1]["role"] == "user"


def test_the_special_turns_change_the_history_as_their_names_say() -> None:
    """Compacted: system and summary alone; edited: one phrase; regenerate: the same again."""
    turns = dict(held()[6:])
    compacted, edited, regenerate, after = (
        turns["compacted"],
        turns["edited"],
        turns["regenerate"],
        turns["after_end"],
    )
    assert [message["role"] for message in compacted] == ["system", "user"]
    assert compacted[1]["content"].startswith(SUMMARY)
    assert edited[1]["content"] == compacted[1]["content"].replace(*EDIT)
    assert edited[1] != compacted[1]
    assert regenerate == edited
    assert after[: len(regenerate)] == regenerate


def test_the_whole_licence_is_in_the_questions() -> None:
    """No word of the licence is lost or asked about twice."""
    found = pieces(LICENSE)
    assert len(found) == len(QUESTIONS)
    assert " ".join(found).split() == LICENSE.split()


def test_a_text_that_is_not_the_licence_is_refused() -> None:
    """The error names the line that is missing."""
    with pytest.raises(ValueError, match=r"no line that begins with '4\. Redistribution"):
        pieces("MIT License")


RESULT = TurnResult(
    *("text", 250.04, "demo-1", "reused", "pull", 1744, 1276, 0, 201.26, 12.345, 29_400_000)
)
BASELINE = dataclasses.replace(
    RESULT, ttft_ms=1000.0, verdict="turned_off", reused_tokens=0, read_bytes=0
)


def test_the_file_has_exactly_the_published_fields() -> None:
    """One object per turn; whole numbers stay whole."""
    rows = [make_row(2, "growing", RESULT, BASELINE)]
    assert json.loads(to_json(rows)) == [
        {
            "turn": 2,
            "kind": "growing",
            "conversation_id": "demo-1",
            "prompt_tokens": 1744,
            "reused_tokens": 1276,
            "verdict": "reused",
            "ttft_ms": 250.0,
            "prefill_ms": 201.3,
            "read_ms": 12.35,
            "read_bytes": 29_400_000,
            "baseline_ttft_ms": 1000.0,
        }
    ]


def test_a_baseline_that_is_none_is_refused() -> None:
    """Another prompt, or a baseline that reused KV, compares nothing."""
    with pytest.raises(ValueError, match="1743 tokens"):
        make_row(2, "growing", RESULT, dataclasses.replace(BASELINE, prompt_tokens=1743))
    with pytest.raises(ValueError, match="baseline reused 5 tokens"):
        make_row(2, "growing", RESULT, dataclasses.replace(BASELINE, reused_tokens=5))


@pytest.mark.parametrize(
    ("turn", "kind", "verdict", "reused", "missed"),
    [
        (1, "growing", "first_turn", 0, False),
        (2, "growing", "reused", 1276, False),
        (2, "growing", "partial_prefix", 1200, False),
        (2, "growing", "reused", 0, True),
        (2, "growing", "read_failed", 0, True),
        (2, "growing", "", 0, True),
        (8, "edited", "prefix_mismatch", 0, False),
    ],
)
def test_only_a_growing_turn_after_the_first_has_to_reuse(
    turn: int, kind: str, verdict: str, reused: int, missed: bool
) -> None:
    """Tokens and verdict must both say so."""
    row = make_row(turn, kind, RESULT, BASELINE)  # type: ignore[arg-type]
    row = dataclasses.replace(row, verdict=verdict, reused_tokens=reused)
    assert row.is_missed() is missed


def rows_of(*times_ms: tuple[float, float]) -> list[Row]:
    """Returns growing rows with these TTFTs and baselines."""
    row = make_row(1, "growing", RESULT, BASELINE)
    return [
        dataclasses.replace(row, turn=number, ttft_ms=ttft_ms, baseline_ttft_ms=baseline_ms)
        for number, (ttft_ms, baseline_ms) in enumerate(times_ms, 1)
    ]


def test_the_summary_compares_growing_turns_after_the_first() -> None:
    """The first turn, which can reuse nothing, is left out of the medians."""
    rows = rows_of((9000, 1), (100, 500), (200, 900), (300, 1300))
    rows.append(dataclasses.replace(rows[0], kind="edited", turn=5))
    assert "3 growing turns after the first: 200 ms with reuse, 900 ms without" in summary(rows)
    assert "4.5 times as fast" in summary(rows)
    assert "nothing to compare" in summary(rows[:1])


def test_the_table_s_columns_line_up() -> None:
    """Header, units and rows are equally wide, also for long numbers and words."""
    row = rows_of((12345.6, 123456.7))[0]
    row = dataclasses.replace(row, kind="regenerate", verdict="lease_service_unreachable")
    assert len(HEADER) == len(UNITS) == len(table_line(row))
    assert "29.4" in table_line(row)
