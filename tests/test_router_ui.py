"""What the router's page is made of and told: files, summary, conversations; and who is."""

import re
from pathlib import Path
from typing import Any

import pytest
from router_harness import Answer, Rig, router, turn_body
from ui_scene import HOSTILE, MODEL, SceneLease, engine, populated, some_turns

from kvturn_router.config import ConfigError, parse_config
from kvturn_router.front import ui_front
from kvturn_router.front.overview_front import CONVERSATIONS, SUMMARY
from kvturn_router.leases.conversation_book import ConversationBook
from kvturn_router.request.conversation import ConversationKey, TurnReport
from kvturn_router.turn.recent_turns import SPAN_S, TURNS_MAX, RecentTurns
from kvturn_router.verdict import Verdict

FILES = Path(ui_front.__file__).parent / "ui"
CLIENT, OTHER, OPERATOR = "client-0123456789", "other-0123456789", "operator-0123456789"
KEY = ConversationKey("", "m", "c1")


def turn(verdict: Verdict = Verdict.REUSED, **members: Any) -> TurnReport:
    known: dict[str, Any] = {
        "turn": 1, "prompt_tokens": 100, "reused_tokens": 60, "local_tokens": 10,
        "prefill_ms": 1.0, "read_ms": 1.0, "read_bytes": 1, "first_byte_ms": 50.0,
    }  # fmt: skip
    return TurnReport(verdict=verdict, **(known | members))


async def ask(rig: Rig, target: str, key: str = "", method: str = "GET") -> Answer:
    headers = [("authorization", f"Bearer {key}")] if key else []
    return await rig.ask(method, target, headers=headers)


def ids(answer: Answer) -> list[str]:
    assert answer.status == 200, answer.body
    return [one["conversation_id"] for one in answer.json["conversations"]]


# --- the files ------------------------------------------------------------------------------------


async def test_the_page_and_its_files_come_with_types_and_a_policy():
    """Nothing inline, nothing from elsewhere, in no frame, and never older than the router."""
    types = {
        "html": "text/html",
        "css": "text/css",
        "js": "text/javascript",
        "svg": "image/svg+xml",
    }
    async with router() as rig:
        for file in FILES.iterdir():
            target = "/ui" if file.name == "index.html" else f"/ui/{file.name}"
            answer = await rig.ask("GET", target)
            assert answer.status == 200
            assert answer.body == file.read_bytes()
            assert answer.headers["content-type"].startswith(types[file.suffix[1:]])
            policy = answer.headers["content-security-policy"]
            assert policy.startswith("default-src 'self';")
            assert "frame-ancestors 'none'" in policy
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert answer.headers["cache-control"] == "no-cache"


async def test_a_file_that_the_browser_has_is_not_sent_again():
    """By its ETag, also as one of several and as a weak one; another one brings the file."""
    async with router() as rig:
        first = await rig.ask("GET", "/ui/page.js")
        tag = first.headers["etag"]
        for condition in (tag, f'"x", W/{tag}', "*"):
            answer = await rig.ask("GET", "/ui/page.js", headers=[("if-none-match", condition)])
            assert (answer.status, answer.headers["etag"]) == (304, tag)
            assert answer.headers["content-length"] == str(len(first.body))
        answer = await rig.ask("GET", "/ui/page.js", headers=[("if-none-match", '"x"')])
        assert answer.status == 200
        head = await rig.ask("HEAD", "/ui/page.js")
        assert (head.status, head.headers["etag"]) == (200, tag)


async def test_what_is_no_file_of_the_page_is_not_there():
    """No way leads out of the folder; a slash at the end leads to the page."""
    async with router() as rig:
        for target in ("/ui/..%2fui_front.py", "/ui/../ui_front.py", "/ui/none.js", "/uix"):
            assert (await rig.ask("GET", target)).status == 404, target
        slash = await rig.ask("GET", "/ui/")
        assert (slash.status, slash.headers["location"]) == (308, "../ui")
        assert (await rig.ask("POST", "/ui", b"")).status == 405


def test_the_files_name_nothing_that_lies_elsewhere():
    """The page works without any other network: the only addresses are names of XML."""
    for file in FILES.iterdir():
        text = file.read_text().replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://[a-z0-9]|//[a-z0-9.]+\.[a-z]{2,}/", text), file.name
        assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(", text)


def test_the_page_knows_every_verdict():
    """In the order of the enum, each with what it means."""
    text = (FILES / "words.js").read_text().partition("VERDICTS = {")[2].partition("\n};")[0]
    assert re.findall(r"^  (\w+): \[", text, re.MULTILINE) == [one.value for one in Verdict]


# --- the summary ----------------------------------------------------------------------------------


async def test_the_summary_joins_what_router_and_lease_service_know():
    """An engine with a session shows its memory; one that no address leads to is listed too."""
    lease = SceneLease()
    async with router(lease=lease, announced=True) as rig:
        lease.engines[1].MergeFrom(engine(1, "decode", heartbeat_ms=1250))
        lease.engines[1].expired_session_count = 3
        lease.engines[1].last_expiry_age.FromMilliseconds(7500)
        lease.engines[1].description.engine_id = rig.decode.url
        lost = engine(7, "decode")
        lost.description.http_address = ""
        lease.engines.append(lost)
        summary = (await ask(rig, SUMMARY)).json
        engines = {one["url"]: one for one in summary["engines"]}
        (session,) = engines[rig.decode.url]["sessions"]
        assert session == {
            "engine_id": rig.decode.url,
            "model": MODEL,
            "vllm_version": "0.32.0",
            "heartbeat_age_s": 1.25,
            "expired_sessions": 3,
            "last_expiry_age_s": 7.5,
            "leases": 30,
            "block_size": 16,
            "total_blocks": 4096,
            "free_blocks": 2800,
            "retained_blocks": 900,
        }
        assert engines[""]["reason"].startswith("it announces no address")
        assert summary["lease_service"] == {
            "endpoints": [lease.address],
            "answers": True,
            "problem": "",
        }
        assert summary["router"]["reuse"] == "lease"


async def test_the_summary_counts_the_turns_of_late():
    """Verdicts, tokens and times to the first byte, with reuse and without."""
    async with router(lease=populated()) as rig:
        await some_turns(rig)
        recent = (await ask(rig, SUMMARY)).json["recent"]
        assert recent["turns"] == 6
        assert recent["reused_tokens"] == 1266 + 1784 + 192
        assert recent["local_tokens"] == 12
        assert recent["verdicts"][0]["verdict"] == "reused"
        assert recent["verdicts"][0]["computed_tokens"] == 2 * 1900 - 1266 - 1784 - 12
        assert recent["with_reuse"]["turns"] == recent["without_reuse"]["turns"] == 3
        assert recent["with_reuse"]["median_ms"] > 0


async def test_a_silent_lease_service_is_said_and_the_rest_is_shown():
    """The summary names the trouble; conversations are those that this process served."""
    async with router(lease=populated()) as rig:
        await some_turns(rig)
        rig.lease.silent = True
        summary = (await ask(rig, SUMMARY)).json
        assert not summary["lease_service"]["answers"]
        assert summary["lease_service"]["problem"].startswith("The lease service gives no answer")
        assert all(not one["sessions"] for one in summary["engines"])
        answer = await ask(rig, f"{CONVERSATIONS}?limit=2")
        assert ids(answer) == ["trip-5", "trip-4"]
        assert answer.json["total"] == 6
        assert answer.json["problem"]


async def test_without_a_lease_service_the_router_tells_what_it_has():
    """Engines without sessions, and the conversations of its own book."""
    async with router() as rig:
        assert (await ask(rig, SUMMARY)).json["lease_service"] is None
        assert ids(await ask(rig, CONVERSATIONS)) == []
        for name in ("c1", "c2", "c1"):
            await rig.post(turn_body(conversation_id=name))
        answer = await ask(rig, CONVERSATIONS)
        assert ids(answer) == ["c1", "c2"]
        latest = answer.json["conversations"][0]
        assert (latest["turns"], latest["latest_turn"]["verdict"]) == (2, "not_offered")


# --- conversations --------------------------------------------------------------------------------


async def test_conversations_are_listed_as_the_lease_service_has_them():
    """Whatever their ids are; at most as many as asked for, of the model asked for."""
    async with router(lease=populated()) as rig:
        answer = await ask(rig, CONVERSATIONS)
        assert HOSTILE in ids(answer)
        first = answer.json["conversations"][0]
        assert first["quiet_s"] == 3.0
        assert first["held_tokens"] == 2368
        assert first["latest_turn"]["verdict"] == "engine_lost"
        assert len(ids(await ask(rig, f"{CONVERSATIONS}?limit=2"))) == 2
        rig.lease.knows("of an earlier term", quiet_for=None)
        last = (await ask(rig, CONVERSATIONS)).json["conversations"][-1]
        assert (last["conversation_id"], last["quiet_s"]) == ("of an earlier term", None)
        assert ids(await ask(rig, f"{CONVERSATIONS}?model=other")) == []


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ("limit=0", "limit"), ("limit=1001", "limit"), ("limit=x", "limit"), ("limit=", "limit"),
        ("limit=0000000019999", "limit"), (f"limit={'9' * 5_000}", "limit"),
        ("limit=1&limit=2", "limit"), ("model=", "model"), ("modell=m", "modell"),
        (f"tenant={'t' * 257}", "tenant"),
    ],
)  # fmt: skip
async def test_a_wrong_query_is_refused_by_name(query, field):
    """One line that says what it may be."""
    async with router() as rig:
        answer = await ask(rig, f"{CONVERSATIONS}?{query}")
        assert (answer.status, answer.json["error"]["param"]) == (400, field)


async def test_with_keys_a_client_sees_its_own_and_an_operator_all(tmp_path):
    """And without a key nobody sees anything but the empty page."""
    (tmp_path / "keys").write_text(f"{CLIENT} team-a\n{OTHER} team-b\n")
    (tmp_path / "admin").write_text(OPERATOR)
    lease = SceneLease()
    lease.knows("a1", tenant="team-a")
    lease.knows("b1", tenant="team-b")
    flags = (f"--api-keys-file={tmp_path}/keys", f"--admin-keys-file={tmp_path}/admin")
    async with router(*flags, lease=lease) as rig:
        assert (await ask(rig, "/ui")).status == 200
        assert (await ask(rig, SUMMARY)).status == 401
        assert (await ask(rig, SUMMARY, CLIENT)).status == 401
        assert (await ask(rig, SUMMARY, OPERATOR)).status == 200
        assert (await ask(rig, CONVERSATIONS)).status == 401
        assert ids(await ask(rig, CONVERSATIONS, CLIENT)) == ["a1"]
        assert ids(await ask(rig, CONVERSATIONS, OTHER)) == ["b1"]
        assert ids(await ask(rig, CONVERSATIONS, OPERATOR)) == ["a1", "b1"]
        assert ids(await ask(rig, f"{CONVERSATIONS}?tenant=team-b", OPERATOR)) == ["b1"]
        assert (await ask(rig, f"{CONVERSATIONS}?tenant=team-b", CLIENT)).status == 403
        one = f"{CONVERSATIONS}/a1?model={MODEL}"
        assert len((await ask(rig, one, CLIENT)).json["turns"]) == 5
        assert (await ask(rig, one, OTHER)).status == 404
        assert (await ask(rig, f"{one}&tenant=team-a", OTHER)).status == 403
        assert (await ask(rig, f"{one}&tenant=team-a", OPERATOR)).status == 200
        assert (await ask(rig, one, OPERATOR)).json["error"]["param"] == "tenant"


async def test_an_operator_changes_no_conversation(tmp_path):
    """The key that sees all ends none: not even one that it names."""
    (tmp_path / "keys").write_text(f"{CLIENT} team-a\n")
    (tmp_path / "admin").write_text(OPERATOR)
    flags = (f"--api-keys-file={tmp_path}/keys", f"--admin-keys-file={tmp_path}/admin")
    async with router(*flags, lease=populated()) as rig:
        one = f"{CONVERSATIONS}/trip-42?model={MODEL}"
        assert (await ask(rig, one, OPERATOR, "DELETE")).status == 401
        assert (await ask(rig, f"{one}&tenant=team-a", CLIENT, "DELETE")).status == 400
        assert not rig.lease.ended


@pytest.mark.parametrize("header", ["team-a", ""])
async def test_where_a_header_names_tenants_each_sees_its_own(header):
    """Also whoever has none: no tenant is not every tenant."""
    lease = SceneLease()
    lease.knows("a1", tenant="team-a")
    lease.knows("n1")
    async with router("--tenant-header=x-team", lease=lease) as rig:
        headers = [("x-team", header)] if header else []
        answer = await rig.ask("GET", CONVERSATIONS, headers=headers)
        assert ids(answer) == (["a1"] if header else ["n1"])
        assert not answer.json["all_tenants"]


async def test_operators_keys_alone_close_the_list(tmp_path):
    """With --admin-keys-file whoever brings no operator's key sees its own tenant's."""
    (tmp_path / "admin").write_text(OPERATOR)
    lease = SceneLease()
    lease.knows("a1", tenant="team-a")
    lease.knows("n1")
    async with router(f"--admin-keys-file={tmp_path}/admin", lease=lease) as rig:
        assert ids(await ask(rig, CONVERSATIONS)) == ["n1"]
        assert ids(await ask(rig, CONVERSATIONS, OPERATOR)) == ["a1", "n1"]


# --- what is remembered ---------------------------------------------------------------------------


def test_recent_turns_are_bounded_in_number_and_in_time():
    """The oldest go first, and none counts after its time."""
    recent = RecentTurns()
    for number in range(TURNS_MAX + 5):
        recent.ended(number, KEY, turn(), streamed=True)
    assert recent.tally(TURNS_MAX).turns == TURNS_MAX
    assert recent.tally(SPAN_S * 10**9 + 10).turns == TURNS_MAX + 4 - 10
    assert recent.tally(2 * SPAN_S * 10**9).turns == 0
    assert recent.tally(2 * SPAN_S * 10**9).with_reuse.median_ms is None


def test_times_to_the_first_token_are_of_streams_alone():
    """An answer in one piece begins when it ends."""
    recent = RecentTurns()
    recent.ended(1, KEY, turn(first_byte_ms=50.0), streamed=True)
    recent.ended(2, KEY, turn(first_byte_ms=90.0), streamed=True)
    recent.ended(3, KEY, turn(first_byte_ms=9000.0), streamed=False)
    recent.ended(4, KEY, turn(Verdict.FIRST_TURN, first_byte_ms=300.0), streamed=True)
    tally = recent.tally(5)
    assert tally.with_reuse == (2, 70.0)
    assert tally.without_reuse == (1, 300.0)


def test_more_tokens_found_than_the_prompt_has_compute_none():
    """Counts of two engines may disagree by a few; nothing below zero is told."""
    recent = RecentTurns()
    recent.ended(1, KEY, turn(prompt_tokens=64, reused_tokens=60, local_tokens=10), streamed=True)
    assert recent.tally(2).verdicts == [(Verdict.REUSED, 1, 64, 0)]


def test_the_book_lists_the_latest_conversations():
    """Of all, of a tenant, of a model; each with its latest turn, as far as one has ended."""
    book = ConversationBook(10)
    for tenant, model, name in (("a", "m", "1"), ("b", "m", "2"), ("a", "n", "3")):
        book.begin_turn(ConversationKey(tenant, model, name))
    book.end_turn(ConversationKey("a", "m", "1"), turn(output_tokens=7))
    entries, total = book.latest(2, tenant=None, model=None)
    assert ([one.conversation_id for one in entries], total) == (["3", "2"], 3)
    entries, total = book.latest(9, tenant="a", model=None)
    assert ([one.conversation_id for one in entries], total) == (["3", "1"], 2)
    assert entries[0].latest_turn is None
    assert entries[1].latest_turn == turn(output_tokens=7)
    assert [one.tenant for one in book.latest(9, tenant=None, model="m")[0]] == ["b", "a"]


@pytest.mark.parametrize(
    "url",
    [
        "jaeger/{trace_id}",
        "javascript:alert('{trace_id}')",
        "http://j/trace",
        "http://j/ {trace_id}",
        "http://j/{trace_id}/{trace_id}",
    ],
)
def test_a_trace_url_without_a_place_for_the_trace_is_refused(url):
    """One line that shows how it looks."""
    flags = ["--prefill=http://p:1", "--decode=http://d:1", f"--trace-url={url}"]
    with pytest.raises(ConfigError, match=r"--trace-url .* must be http://HOST.*\{trace_id\} once"):
        parse_config(flags, {})
