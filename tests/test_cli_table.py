"""Tables and screens fit, whatever the terminal's width and whatever is in a name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.console import Console, RenderableType

from kvturn.v1 import common_pb2, lease_pb2
from kvturn_cli import conversations, engines, leases, turns
from kvturn_cli.fields import conversation_fields, engine_fields, lease_fields, turn_fields, word
from kvturn_cli.quantities import count, share, span
from kvturn_cli.recent_turns import SEEN_MAX, RecentTurns
from kvturn_cli.screen import Seen, memory_bar, screen
from kvturn_cli.table import Column, printable, table

WIDE = "会話" * 40
CONVERSATION = lease_pb2.Conversation(
    key={"tenant": "t" * 60, "model": "m" * 80, "conversation_id": WIDE},
    turns=12_345,
    turns_in_flight=2,
    quiet_for={"seconds": 100_000},
    engine_id="decode-" + "9" * 90,
    token_count=1_000_000,
    block_count=60_000,
    lease_count=1,
    latest_turn={
        "turn": 7,
        "verdict": common_pb2.VERDICT_LEASE_SERVICE_UNREACHABLE,
        "prompt_tokens": 10,
        "reused_tokens": 4,
        "trace_id": "f" * 32,
        "plan_reason": "cheapest holder_overloaded pull_ms=1",
        "prefill_engine": "http://" + "p" * 60,
        "decode_engine": "http://" + "d" * 60,
    },
)
LEASE = lease_pb2.Lease(
    lease_id=f"{'i' * 20}.1.1",
    conversation=CONVERSATION.key,
    engine_id=CONVERSATION.engine_id,
    state=lease_pb2.Lease.STATE_ENDING,
    release_reason=common_pb2.RELEASE_REASON_SUPERSEDED,
    reading_for={"seconds": 1},
)
ENGINE = lease_pb2.Engine(
    description={
        "engine_id": "decode-" + "9" * 90,
        "role": common_pb2.ENGINE_ROLE_BOTH,
        "http_address": "http://" + "d" * 60,
        "model": "m" * 90,
        "vllm_version": "0.32.0",
    },
    memory={"total_blocks": 1_000_000, "free_blocks": 500_000, "retained_blocks": 499_999},
    last_heartbeat_age={"nanos": 100_000_000},
    expired_session_count=1_234,
    last_expiry_age={"seconds": 86_000},
)
SEEN = Seen(
    where="127.0.0.1:7600",
    problem="no answer from the lease service at 127.0.0.1:7600: it is silent; start it",
    stale_s=12.0,
    engines=[engine_fields(ENGINE)] * 30,
    conversations=[conversation_fields(CONVERSATION)] * 200,
    total=200_000,
)


def lines(shown: RenderableType, width: int) -> list[str]:
    """Returns what a terminal of that width shows."""
    console = Console(width=width, height=1_000, color_system=None, force_terminal=True)
    with console.capture() as captured:
        console.print(shown)
    return captured.get().splitlines()


@pytest.mark.parametrize("width", [60, 80, 100, 132, 200, 400])
@pytest.mark.parametrize(
    ("columns", "row"),
    [
        (conversations.COLUMNS, conversation_fields(CONVERSATION)),
        (turns.COLUMNS, turn_fields(CONVERSATION.latest_turn)),
        (leases.COLUMNS, lease_fields(LEASE)),
        (engines.COLUMNS, engine_fields(ENGINE)),
    ],
)
def test_a_row_is_a_line_at_any_width(
    columns: list[Column[object]], row: object, width: int
) -> None:
    """Nothing wraps; more width never shows fewer columns."""
    shown = lines(table(columns, [row, row], width), width)
    assert len(shown) == 3
    assert max(map(cell_len, shown)) <= width
    wider = lines(table(columns, [row, row], width * 2), width * 2)
    assert len(wider[0].split()) >= len(shown[0].split())


def test_engines_that_lost_sessions_say_how_often_and_when() -> None:
    """Those that lost none show a plain 0."""
    kept = lease_pb2.Engine(description={"engine_id": "d1"})
    shown = lines(table(engines.COLUMNS, [engine_fields(ENGINE), engine_fields(kept)], None), 400)
    assert [line.split("  ")[-1].strip() for line in shown] == ["expired", "1,234 (24 h ago)", "0"]


def test_names_are_cut_before_columns_leave() -> None:
    """The widest name first, down to what it may be cut to; numbers are never cut."""
    columns: list[Column[tuple[str, str, int]]] = [
        Column("long", lambda row: row[0], cut_to=6),
        Column("short", lambda row: row[1], cut_to=4),
        Column("number", lambda row: count(row[2]), right=True, leaves=1),
    ]
    rows = [("a" * 30, "b" * 10, 1_234_567)]
    assert lines(table(columns, rows, None), 100)[1] == f"{'a' * 30}  {'b' * 10}  1,234,567"
    assert lines(table(columns, rows, 35), 35)[1].split() == [
        f"{'a' * 11}…",
        "b" * 10,
        "1,234,567",
    ]
    assert lines(table(columns, rows, 25), 25)[1].split() == ["aaaaa…", "bbbbb…", "1,234,567"]
    assert "number" not in lines(table(columns, rows, 18), 18)[0]


def test_of_a_name_whose_end_tells_the_end_is_kept() -> None:
    """Lease ids of an engine begin alike."""
    columns: list[Column[str]] = [Column("lease", str, cut_to=6, keeps_end=True)]
    assert lines(table(columns, ["incarnation.14.1"], 8), 8)[1] == "…on.14.1"
    assert lines(table(columns, ["会話会話.14.1"], 8), 8)[1].strip() == "…話.14.1"
    assert lines(table(columns, ["i.14.1"], 8), 8)[1].strip() == "i.14.1"


def test_what_cannot_be_seen_is_spelt_out() -> None:
    """Whatever moves a cursor, changes a colour or turns the direction of a line."""
    assert printable("plain 会話") == "plain 会話"
    assert printable("\x1b]0;x\x07\r\n\u202e\x9b\ud800") == (r"\x1b]0;x\x07\r\n\u202e\x9b\ud800")


@pytest.mark.parametrize("width", [20, 60, 120])
@pytest.mark.parametrize("height", [3, 8, 24, 60])
def test_a_screen_fits_its_terminal(width: int, height: int) -> None:
    """Also with an error to show, and more engines and conversations than there are lines."""
    recent = RecentTurns()
    recent.see([CONVERSATION])
    seen = Seen(**{**SEEN.__dict__, "reuse": recent.reuse()})
    shown = lines(screen(seen, width, height), width)
    assert len(shown) <= height
    assert shown[0].startswith("kvturn top")
    assert shown[1].startswith("what is shown is")


def test_a_bar_shows_whatever_there_is_any_of() -> None:
    """A single block has a cell; all cells are there, and none where nothing is known."""
    fields = engine_fields(ENGINE)
    assert memory_bar(fields, 10).plain == "█▓▓▓▓▓░░░░"
    free = {**fields, "active_blocks": 0, "retained_blocks": 0, "free_blocks": 1_000_000}
    assert memory_bar(free, 10).plain == "░" * 10
    assert memory_bar({**fields, "free_blocks": None}, 10).plain == "-"


def test_recent_turns_count_once_and_the_oldest_are_forgotten() -> None:
    """What came of them is added up; prompts of unknown size count for no share."""
    recent = RecentTurns()
    for number in range(1, SEEN_MAX + 101):
        conversation = lease_pb2.Conversation(
            key={"model": "m", "conversation_id": "c"},
            latest_turn={
                "turn": number,
                "verdict": common_pb2.VERDICT_REUSED if number % 2 else 5,
                "prompt_tokens": 100 if number % 2 else 0,
                "reused_tokens": 60 if number % 2 else 0,
                "local_tokens": 30 if number % 2 else 0,
                "first_byte_time": {"nanos": 1_000_000 * number},
                "saved_time": {"nanos": 1_000_000},
            },
        )
        recent.see([conversation])
        recent.see([conversation])
    reuse = recent.reuse()
    assert reuse.turns == SEEN_MAX
    assert (reuse.prompt_tokens, reuse.reused_tokens, reuse.local_tokens) == (25_000, 15_000, 7_500)
    assert reuse.ttft_ms == 350.5
    assert reuse.saved_ms == SEEN_MAX
    assert reuse.verdicts == [("reused", 250), ("no_lease", 250)]
    assert share(reuse.reused_tokens, reuse.prompt_tokens) == "60%"


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (None, "-"),
        (0.04, "0.0 s"),
        (9.94, "9.9 s"),
        (9.96, "10 s"),
        (119, "119 s"),
        (121, "2 min"),
        (7_199, "120 min"),
        (7_201, "2 h"),
        (170_000, "47 h"),
        (200_000, "2 d"),
    ],
)
def test_times_have_two_digits_or_so(seconds: float | None, shown: str) -> None:
    """In the unit that fits."""
    assert span(seconds) == shown


def test_words_of_a_newer_lease_service_are_told_by_number() -> None:
    """So that nothing is hidden, and nothing breaks."""
    assert word(common_pb2.Verdict, common_pb2.VERDICT_NO_LEASE) == "no_lease"
    assert word(lease_pb2.Lease.State, lease_pb2.Lease.STATE_READING) == "reading"
    assert word(common_pb2.PlanKind, common_pb2.PLAN_KIND_UNSPECIFIED) == ""
    assert word(common_pb2.Verdict, 99) == "unknown 99"


@pytest.mark.parametrize(
    ("command", "fields"),
    [
        ("conversations", conversation_fields(CONVERSATION)),
        ("turns", turn_fields(CONVERSATION.latest_turn)),
        ("leases", lease_fields(LEASE)),
        ("engines", engine_fields(ENGINE)),
    ],
)
def test_the_fields_of_json_are_the_ones_that_are_documented(
    command: str, fields: dict[str, object]
) -> None:
    """All of them, in their order."""
    readme = Path(__file__).parent.parent / "cli" / "README.md"
    [row] = [
        line for line in readme.read_text().splitlines() if line.startswith(f"| `{command}`: ")
    ]
    assert re.findall(r"`(\w+)`", row.split(" | ")[1]) == list(fields)
