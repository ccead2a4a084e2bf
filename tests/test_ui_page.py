"""The router's page in a browser: what is seen, by whom, and what it never does.

With UI_PICTURES=FOLDER each look of the page is also written there, to be looked at.
"""

import os
from collections.abc import AsyncIterator
from pathlib import Path

import chromium
import pytest
import pytest_asyncio
from router_harness import Rig, router
from ui_scene import HOSTILE, MODEL, TRACE, TURNS, SceneLease, populated, some_turns

EXECUTABLE = chromium.path()
TRACE_URL = "http://127.0.0.1:16686/trace/{trace_id}"
CLIENT, OPERATOR = "client-0123456789", "operator-0123456789"
ROWS = "document.querySelectorAll('#conversations tbody tr:not(.detail)')"
FIRST = "document.querySelector('#conversations button.open')"

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(EXECUTABLE is None, reason="no Chromium: apt install chromium"),
]

TABLE = {"table", "row", "cell", "columnheader", "rowheader"}
NAMED = {"table", "region", "image", "button", "link", "searchbox"}
"""Roles of what a screen reader stops at; each needs a name."""

WITH_TRACE = f"""
import("/ui/views.js").then(({{ conversations, keyOf }}) => {{
  const turn = {{ turn: 2, verdict: "reused", plan: "pull", plan_reason: "", prompt_tokens: 9,
    reused_tokens: 4, local_tokens: 0, saved_ms: 1179, trace_id: "{TRACE}", prefill_engine: "",
    decode_engine: "", conversation_id: "c" }};
  const one = {{ tenant: "", model: "m", conversation_id: "c", latest_turn: turn, turns: 2,
    turns_in_flight: 0, held_tokens: 0, quiet_s: 1, engine_id: "" }};
  const open = {{ key: keyOf(one), answer: {{ turns: [turn], held: [] }}, problem: "" }};
  const all = {{ conversations: [one], total: 1, all_tenants: true }};
  const [seen] = conversations(all, {{ filter: "", open, traceUrl: "{TRACE_URL}" }});
  return [seen.querySelector("a").href, seen.querySelector("a").rel, seen.textContent];
}})
"""
"""A turn as the router tells of one that was traced, and saved time: what is seen of it."""

CONTRAST = """
(() => {
  const canvas = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
  const light = (colour) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    const [r, g, b] = [...canvas.getImageData(0, 0, 1, 1).data].map((part) => part / 255)
      .map((part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = (element) => {
    for (; element; element = element.parentElement) {
      const colour = getComputedStyle(element).backgroundColor;
      if (colour !== "rgba(0, 0, 0, 0)") return colour;
    }
    return "white";
  };
  const poor = [];
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const element = texts.currentNode.parentElement;
    if (!texts.currentNode.data.trim() || !element.checkVisibility()) continue;
    const [low, high] = [light(getComputedStyle(element).color), light(ground(element))].sort();
    const ratio = (Math.max(low, high) + 0.05) / (Math.min(low, high) + 0.05);
    if (ratio < 4.5) poor.push(`${ratio.toFixed(2)} ${texts.currentNode.data}`);
  }
  return poor;
})()
"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running() -> AsyncIterator[chromium.Browser]:
    assert EXECUTABLE is not None
    async with chromium.browser(EXECUTABLE) as browser:
        yield browser


@pytest_asyncio.fixture(loop_scope="module")
async def browser(running: chromium.Browser) -> AsyncIterator[chromium.Browser]:
    yield running
    await running.close_pages()


async def look(page: chromium.Page, name: str) -> None:
    """Keeps a picture of the page, if pictures are wanted."""
    if folder := os.environ.get("UI_PICTURES"):
        (Path(folder) / f"{name}.png").write_bytes(await page.picture())


async def opened(browser: chromium.Browser, rig: Rig, **looks: int | bool) -> chromium.Page:
    """Returns a page that shows the router's."""
    page = await browser.page(**looks)  # type: ignore[arg-type]
    await page.open(f"{rig.url}/ui")
    await page.until_said("as of", "#state")
    return page


def asked(page: chromium.Page, rig: Rig) -> list[str]:
    """Returns what the page asked the router for, without its own files."""
    wanted = [one["url"].removeprefix(rig.url) for one in page.requests]
    return [one for one in wanted if not one.startswith("/ui")]


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1280, 400], ids=["wide", "narrow"])
async def test_engines_verdicts_and_turns_are_seen(browser, width, dark):
    """By keyboard, in both colour schemes, on any width; without a word to anybody else."""
    async with router(f"--trace-url={TRACE_URL}", lease=populated(14)) as rig:
        await some_turns(rig)
        page = await opened(browser, rig, width=width, dark=dark)
        engines = await page.text("#engines")
        assert "16 engines" in engines
        assert "9,600 retained" in engines
        assert "no session with the lease service" in engines
        verdicts = await page.text("#verdicts")
        assert "prefix_mismatch" in verdicts
        assert "no clock or counter at the start of the prompt" in verdicts
        assert "29 %" in await page.text("#reuse")
        await page.run(f"{FIRST}.focus()")
        await page.press("Enter", 13)
        await page.until_said("Turn 5", "#conversations")
        turns = await page.text(".turns")
        assert "Prefill reads from the holder: expected to be the fastest way" in turns
        assert "expected: pull 610 ms, local 702 ms, recompute 1801 ms" in turns
        assert await page.run("document.documentElement.scrollWidth") <= width
        assert await page.run(CONTRAST) == []
        assert {role for role, _ in await page.accessible()} >= TABLE
        assert [role for role, name in await page.accessible() if role in NAMED and not name] == []
        await look(page, f"{width}-{'dark' if dark else 'light'}")
        assert page.problems == []
        assert all(one["url"].startswith(rig.url) for one in page.requests)


async def test_a_hostile_id_is_text(browser):
    """It is shown as it is, opened as it is, and nothing of it is run."""
    lease = SceneLease()
    lease.knows(HOSTILE, tenant="</script><b>", engine_id=HOSTILE)
    lease.told = [TURNS[0]]
    async with router(lease=lease) as rig:
        page = await opened(browser, rig)
        await page.until_said(HOSTILE, "#conversations")
        await page.run(f"{FIRST}.click()")
        await page.until_said("Turn 1", "#conversations")
        assert await page.run("document.querySelectorAll('main img, main script').length") == 0
        assert await page.run("document.title") == "kvturn"
        assert page.problems == []


async def test_a_turn_leads_to_its_trace(browser):
    """Where the router knows a place for traces and the turn has one."""
    async with router(f"--trace-url={TRACE_URL}", lease=populated()) as rig:
        page = await opened(browser, rig)
        await page.until(FIRST)
        told = await page.run(WITH_TRACE)
        assert told[0] == f"http://127.0.0.1:16686/trace/{TRACE}"
        assert told[1] == "noopener noreferrer"
        assert "Saved1.18 s" in told[2]


async def test_nothing_is_asked_while_nobody_looks(browser):
    """Hidden or paused it is silent; seen again it asks at once."""
    async with router(lease=populated()) as rig:
        page = await opened(browser, rig)
        await page.until_said("trip-42", "#conversations")
        await page.hide(True)
        before = len(asked(page, rig))
        await page.run("new Promise((done) => setTimeout(done, 2600))")
        assert len(asked(page, rig)) == before
        await page.hide(False)
        await page.run("new Promise((done) => setTimeout(done, 500))")
        assert len(asked(page, rig)) > before
        await page.run("document.getElementById('pause').click()")
        await page.until_said("paused", "#state")


async def test_focus_stays_where_it_is_while_the_list_moves(browser):
    """A conversation that is seen again goes to the front; the focus goes with its own."""
    async with router(lease=populated()) as rig:
        page = await opened(browser, rig)
        await page.until_said("trip-42", "#conversations")
        await page.run(f"{FIRST}.focus()")
        rig.lease.listed.reverse()
        await page.until(f"{ROWS}[0].innerText.includes('agents/build')")
        focused = await page.run("document.activeElement.innerText")
        assert focused == "trip-42"
        assert await page.run(f"{ROWS}.length") == 7


async def test_a_silent_lease_service_is_said(browser):
    """The page tells what the router knows itself; once it answers again, so does the page."""
    async with router(lease=populated()) as rig:
        await some_turns(rig)
        rig.lease.silent = True
        page = await opened(browser, rig)
        await page.until_said("The lease service gives no answer", "#notices")
        await page.until_said("not known while the lease service is silent", "#engines")
        await page.until_said("Conversations are those that this process served last", "#notices")
        assert "trip-5" in await page.text("#conversations")
        await look(page, "silent")
        rig.lease.silent = False
        await page.until_said("lease service answers", "#state")
        await page.until_said("trip-42", "#conversations")
        assert await page.text("#notices") == ""


async def test_what_cannot_be_drawn_does_not_end_the_rounds(browser):
    """The page asks on, and shows what comes as soon as it can."""
    async with router(lease=populated()) as rig:
        page = await opened(browser, rig)
        await page.until_said("trip-42", "#conversations")
        await page.run(
            "const ask = window.fetch; window.asked = 0;"
            "window.fetch = (...what) => { window.asked++; return ask(...what); };"
            "document.getElementById('engines').id = 'moved'; 0"
        )
        await page.until("window.asked > 4")  # Two questions a round.
        await page.run("document.getElementById('moved').id = 'engines'")
        rig.lease.knows("seen again")
        await page.until_said("seen again", "#conversations")


async def test_a_router_that_is_gone_is_said_and_the_last_word_stays(browser):
    """And asked after less and less often."""
    async with router(lease=populated()) as rig:
        page = await opened(browser, rig)
        await page.until_said("trip-42", "#conversations")
        await page.run("window.fetch = () => Promise.reject(new TypeError('gone'))")
        await page.until_said("The router does not answer", "#notices")
        assert "trip-42" in await page.text("#conversations")


async def test_where_nothing_was_yet_the_page_tells_how_to_begin(browser):
    """No lease service, no turn."""
    async with router() as rig:
        page = await opened(browser, rig)
        await page.until_said("No conversation is known yet", "#conversations")
        assert f"{rig.url}/v1/chat/completions" in await page.text("#conversations")
        assert "no lease service: nothing is reused" in await page.text("#state")
        await look(page, "empty")


async def test_a_key_opens_what_it_may_and_stays_in_the_tab(browser, tmp_path):
    """A client's shows its tenant's conversations, an operator's all; neither is in an address."""
    (tmp_path / "keys").write_text(f"{CLIENT} team-a\n")
    (tmp_path / "admin").write_text(OPERATOR)
    lease = SceneLease()
    lease.knows("of-a", tenant="team-a")
    lease.knows("of-b", tenant="team-b")
    flags = (f"--api-keys-file={tmp_path}/keys", f"--admin-keys-file={tmp_path}/admin")
    async with router(*flags, lease=lease) as rig:
        page = await browser.page()
        await page.open(f"{rig.url}/ui")
        await page.until_said("This router asks for a key", "#notices")
        await page.until("!document.getElementById('key-form').hidden")
        await look(page, "key")
        for key, seen in ((CLIENT, "of-a"), (OPERATOR, "of-b")):
            await page.run("document.getElementById('key-form').hidden = false")
            await page.run("document.getElementById('key').focus()")
            await page.type(key)
            await page.press("Enter", 13)
            await page.until_said(seen, "#conversations")
        assert "2 conversations" in await page.text("#conversations")
        await page.run(f"{FIRST}.click()")
        await page.until_said("Turn 5", "#conversations")
        assert await page.run("localStorage.length + document.cookie.length") == 0
        assert await page.run("sessionStorage.getItem('kvturn.key')") == OPERATOR
        assert not any(OPERATOR in one["url"] or CLIENT in one["url"] for one in page.requests)
        sent = [one["headers"].get("Authorization") for one in page.requests]
        assert {f"Bearer {CLIENT}", f"Bearer {OPERATOR}"} <= set(sent)
        await page.run("document.getElementById('forget').click()")
        await page.until_said("This router asks for a key", "#notices")
        assert "of-a" not in await page.text()
        assert await page.run("sessionStorage.length") == 0


async def test_the_list_is_filtered_and_an_earlier_one_looked_up(browser):
    """What is not in the list can be asked for by its whole id."""
    async with router(lease=populated()) as rig:
        page = await opened(browser, rig)
        await page.until_said("trip-42", "#conversations")
        await page.run("document.getElementById('filter').focus()")
        await page.type("engine_lost")
        await page.until(f"{ROWS}.length === 1")
        await page.run("document.getElementById('filter').select()")
        await page.type("long ago")
        await page.until_said("Nothing in this list matches", "#conversations")
        rig.lease.knows("long ago")
        rig.lease.listed.insert(0, rig.lease.listed.pop())
        await page.run(f"{FIRST}.click()")
        await page.until_said("Turn 5", "#conversations")
        assert f"Turns of long ago ({MODEL})" in await page.text("#conversations")


async def test_nothing_moves_for_those_who_want_no_motion(browser):
    """Bars jump where else they glide."""
    glides = "getComputedStyle(document.querySelector('.bar rect')).transitionDuration !== '0s'"
    async with router(lease=populated()) as rig:
        page = await opened(browser, rig)
        await page.until("document.querySelector('.bar rect')")
        assert await page.run(glides)
        await page.prefers(reduced_motion=True)
        assert not await page.run(glides)
