"""Which conversation a turn belongs to, and what is remembered of it."""

import tracemalloc

import pytest
from msgspec.structs import replace

from kvturn.v1 import common_pb2
from kvturn_router.config import ConfigError, parse_config
from kvturn_router.errors import TurnError
from kvturn_router.leases.conversation_book import REPORTS_MAX, ConversationBook
from kvturn_router.leases.lease_client import proto_verdict, verdict_of
from kvturn_router.request.body import parse
from kvturn_router.request.conversation import (
    SESSION_HEADERS,
    ConversationKey,
    Naming,
    TurnReport,
    header_value,
    naming_of,
    session_of,
)
from kvturn_router.verdict import Verdict

KEY = ConversationKey("", "m", "c1")


def report(turn: int) -> TurnReport:
    return TurnReport(turn, Verdict.REUSED, 10, 5, 0, 1.0, 0.5, 7)


@pytest.mark.parametrize(
    ("body", "header", "named"),
    [
        (b'{"conversation_id":"a","session_id":"b","prompt_cache_key":"c"}', "h", ("a", "")),
        (b'{"session_id":"b","prompt_cache_key":"c"}', "h", ("h", "")),
        (b'{"session_id":"b","prompt_cache_key":"c"}', None, ("", "b")),
        (b'{"session_id":null,"prompt_cache_key":"c"}', None, ("", "s")),
        (b'{"session_id":"","prompt_cache_key":"c"}', None, ("", "s")),
        (b'{"conversation_id":null}', "h", ("h", "")),
        (b'{"user":"x"}', None, ("", "s")),
        ('{"conversation_id":"é😀"}'.encode(), None, ("é😀", "")),
        (b'{"session_id":"%b"}' % (b"x" * 300), None, ("", "x" * 256)),
        (('{"session_id":"' + "é" * 300 + '"}').encode(), None, ("", "é" * 128)),
    ],
)
def test_a_conversation_is_named_before_a_scope(body, header, named):
    """Body conversation_id, header; else body session_id, a session header, prompt_cache_key."""
    assert naming_of(parse(body), header, "s") == Naming(*named)


def test_a_prompt_cache_key_is_the_last_scope():
    """It may be one for many users; a session header says more."""
    assert naming_of(parse(b'{"prompt_cache_key":"c"}'), None, "s") == Naming("", "s")
    assert naming_of(parse(b'{"prompt_cache_key":"c"}'), None, "") == Naming("", "c")
    assert naming_of(parse(b"{}"), None, "") == Naming("", "")


@pytest.mark.parametrize(
    ("headers", "session"),
    [
        ({"x-task-id": "t", "x-session-id": "s"}, "s"),
        ({"x-session-id": "has space", "x-task-id": "t"}, "t"),
        ({"x-session-id": "x" * 257}, ""),
        ({"x-session-id": ""}, ""),
        ({"x-claude-code-session-id": "ses_1"}, "ses_1"),
        ({"x-parent-session-id": "p", "user": "u"}, ""),
    ],
)
def test_a_session_header_that_cannot_be_a_scope_is_passed_over(headers, session):
    """Its client did not speak to the router, so nothing is refused."""
    assert session_of(headers, SESSION_HEADERS) == session


@pytest.mark.parametrize(
    ("body", "header", "field"),
    [
        (b'{"conversation_id":7}', None, "conversation_id"),
        (b'{"conversation_id":["a"]}', None, "conversation_id"),
        (b'{"conversation_id":""}', None, "conversation_id"),
        (b'{"conversation_id":"%b"}' % (b"x" * 257), None, "conversation_id"),
        (('{"conversation_id":"' + "é" * 129 + '"}').encode(), None, "conversation_id"),
        (b"{}", "", "X-Conversation-Id"),
        (b'{"session_id":{}}', None, "session_id"),
        (b'{"prompt_cache_key":true}', None, "prompt_cache_key"),
        (b'{"conversation_id":"c","session_id":0}', None, "session_id"),
        (b'{"session_id":"s","prompt_cache_key":0}', "h", "prompt_cache_key"),
    ],
)
def test_an_id_of_the_wrong_kind_or_length_is_refused_by_name(body, header, field):
    """Strings of 1 to 256 bytes are ids; the 400 names the field."""
    with pytest.raises(TurnError) as refused:
        naming_of(parse(body), header, "")
    assert (refused.value.status, refused.value.param) == (400, field)


def test_session_headers_are_a_list_of_lower_case_names():
    """Those of usual agents by default; an empty list looks at none."""
    engines = ["--prefill=http://127.0.0.1:1", "--decode=http://127.0.0.1:2"]
    assert "x-session-id" in parse_config(engines, {}).session_headers
    config = parse_config([*engines, "--session-headers=X-Task, x-run-id"], {})
    assert config.session_headers == ("x-task", "x-run-id")
    assert parse_config(engines, {"KVTURN_ROUTER_SESSION_HEADERS": ""}).session_headers == ()
    with pytest.raises(ConfigError, match=r"--session-headers 'a b' must be names of headers"):
        parse_config([*engines, "--session-headers=a b"], {})


def test_an_id_in_a_response_header_cannot_break_out_of_it():
    """Line breaks, spaces and non-ASCII are percent-encoded; plain ids stay as they are."""
    assert header_value("user-1/chat:2") == b"user-1/chat:2"
    assert header_value("a\r\nset-cookie: x") == b"a%0D%0Aset-cookie:%20x"
    assert header_value("100% é") == b"100%25%20%C3%A9"


def test_turns_are_counted_and_the_latest_are_kept():
    """Numbers go on from 1; 64 reports are remembered, the oldest first."""
    book = ConversationBook(10)
    for turn in range(1, REPORTS_MAX + 6):
        assert book.begin_turn(KEY) == (turn, b"")
        book.end_turn(KEY, report(turn))
    turns = [kept.turn for kept in book.reports(KEY) or []]
    assert turns == list(range(6, REPORTS_MAX + 6))


def test_a_report_is_remembered_as_it_was():
    """Every field comes back, times to a microsecond; what is out of range is cut."""
    book = ConversationBook(10)
    reports = [
        TurnReport(
            turn,
            verdict,
            1 << 20,
            7,
            9,
            12.345,
            0.001,
            1 << 40,
            plan,
            600_000.0,
            3,
            "http://p",
            d,
            total_ms=700_000.5,
            trace_id="0af7651916cd43dd8448eb211c80319c" if plan else "",
        )
        for turn, (verdict, plan, d) in enumerate(
            [(verdict, "local", "http://d") for verdict in Verdict] + [(Verdict.LOCAL, "", "")]
        )
    ]
    for told in reports:
        book.begin_turn(KEY)
        book.end_turn(KEY, told)
    assert book.reports(KEY) == reports
    book.end_turn(KEY, replace(reports[0], prompt_tokens=1 << 40, prefill_ms=1e12))
    cut = (book.reports(KEY) or [])[-1]
    assert (cut.prompt_tokens, cut.prefill_ms) == ((1 << 32) - 1, ((1 << 32) - 1) / 1000)


def test_a_turn_is_linked_to_the_latest_before_it_that_was_recorded():
    """One that is not recorded links to nothing, and does not break the chain."""
    book = ConversationBook(10)
    spans = [bytes([number]) * 24 for number in range(1, 4)]
    linked = [book.begin_turn(KEY, span)[1] for span in (b"", *spans[:2], b"", spans[2])]
    assert linked == [b"", b"", spans[0], b"", spans[1]]


def test_an_idle_conversation_takes_less_than_a_kilobyte():
    """Ten turns each, with all that is kept of them, names included."""
    count = 2_000
    book = ConversationBook(count)
    tracemalloc.start()
    for number in range(count):
        key = ConversationKey("key-0123456789abcdef", "a-model", f"conversation-{number:030d}")
        for turn in range(10):
            book.begin_turn(key)
            book.end_turn(key, report(turn + 1))
    # Threads that other tests left behind take memory of their own. What a named tuple makes of
    # itself is in "<string>".
    ours = [tracemalloc.Filter(True, at) for at in ("*/kvturn_router/*", __file__, "<string>")]
    taken = sum(each.size for each in tracemalloc.take_snapshot().filter_traces(ours).traces)
    tracemalloc.stop()
    assert len(book) == count
    assert taken / count < 1024


def test_the_least_recent_conversation_is_forgotten_first():
    """With room for two, a third drops the one that was not used last."""
    book = ConversationBook(2)
    first, second, third = (KEY._replace(conversation_id=name) for name in "abc")
    book.begin_turn(first)
    book.begin_turn(second)
    book.begin_turn(first)
    book.begin_turn(third)
    assert len(book) == 2
    assert book.reports(second) is None
    assert book.begin_turn(first) == (3, b"")


def test_tenants_and_models_have_conversations_of_their_own():
    """The same id under another tenant or model is another conversation."""
    book = ConversationBook(10)
    book.begin_turn(KEY)
    assert book.reports(KEY._replace(tenant="key-1")) is None
    assert book.reports(KEY._replace(model="other")) is None


def test_verdicts_are_those_of_the_contract():
    """One name per proto value, none missing and none besides."""
    names = [name for name, _ in common_pb2.Verdict.items() if name != "VERDICT_UNSPECIFIED"]
    assert [f"VERDICT_{verdict.upper()}" for verdict in Verdict] == names
    assert all(verdict_of(proto_verdict(verdict)) is verdict for verdict in Verdict)
    assert verdict_of(0) is None
    assert verdict_of(999) is None
