"""Operators' commands against a real lease service process with sessions of its own."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
import time
from typing import TYPE_CHECKING

import pytest
from etcd_server import until
from kvturn_command import Done
from kvturn_command import kvturn_beside as kvturn
from lease_guests import Guests, lease_service
from lease_rig import GUARD_S

from kvturn.v1 import common_pb2, lease_pb2
from kvturn_cli import conversations, run_state
from kvturn_cli.__main__ import main
from kvturn_cli.fields import conversation_fields
from kvturn_cli.lookup import LISTED_MAX
from kvturn_cli.process import ProcessId
from kvturn_cli.run_state import RunState

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

REUSED = {
    "verdict": common_pb2.VERDICT_REUSED,
    "plan": common_pb2.PLAN_KIND_PULL,
    "plan_reason": "cheapest at_holder new_tokens=12 pull_ms=80.0",
    "prompt_tokens": 1_000,
    "reused_tokens": 900,
    "local_tokens": 60,
    "output_tokens": 20,
    "read_bytes": 21_000_000,
    "read_time": {"nanos": 7_250_000},
    "first_byte_time": {"nanos": 350_400_000},
    "total_time": {"seconds": 1, "nanos": 500_000_000},
    "saved_time": {"seconds": 2},
    "prefill_engine": "http://p1:8100",
    "decode_engine": "http://d1:8200",
    "trace_id": "0123456789abcdef0123456789abcdef",
}
FIRST = {"verdict": common_pb2.VERDICT_FIRST_TURN, "plan": common_pb2.PLAN_KIND_RECOMPUTE}


@pytest.fixture
async def guests(tmp_path: Path) -> AsyncIterator[Guests]:
    async with lease_service(tmp_path) as running:
        yield running


async def busy(guests: Guests) -> dict[str, str]:
    """Two engines, and conversations of several kinds; returns the lease of each that has one."""
    engine = await guests.engine("decode-0")
    await guests.engine("prefill-0", role=common_pb2.ENGINE_ROLE_PREFILL, memory=(100, 99, 0))
    router = await guests.router()
    await router.turn("trip-42", **FIRST)
    await router.turn("trip-42", **REUSED)
    await router.turn("scope~0123456789ab", **FIRST)
    for tenant in ("a", "b"):
        await router.turn("twice", tenant=tenant, **FIRST)
    await router.turn("flying")
    return {
        "trip-42": await engine.grant("trip-42", 2, tokens=1_024),
        "scope": await engine.grant("scope~0123456789ab", 1),
    }


# ---- what is listed --------------------------------------------------------------------------


async def test_conversations_are_listed_with_their_latest_turn(guests: Guests) -> None:
    """Those with the latest sign of life first; filters and the limit leave out the others."""
    began_s = time.monotonic()
    await busy(guests)
    lease = f"--lease={guests.endpoint}"
    document = (await kvturn("conversations", lease, "--json")).document
    took_s = time.monotonic() - began_s
    rows = {row["conversation_id"]: row for row in document["conversations"]}
    assert document["total"] == len(document["conversations"]) == 5
    quiet_s = [row["quiet_s"] for row in document["conversations"]]
    assert quiet_s == sorted(quiet_s)
    trip = rows["trip-42"]
    assert (trip["turns"], trip["turns_in_flight"], trip["retained_tokens"]) == (2, 0, 1_024)
    assert (trip["engine_id"], trip["leases"]) == ("decode-0", 1)
    assert 899 - took_s < trip["idle_in_s"] <= 900
    assert trip["latest_turn"]["verdict"] == "reused"
    assert rows["flying"]["turns_in_flight"] == 1
    assert rows["flying"]["latest_turn"] is None
    retained = (await kvturn("conversations", lease, "--retained", "--json")).document
    assert {row["conversation_id"] for row in retained["conversations"]} == {
        "trip-42",
        "scope~0123456789ab",
    }
    few = await kvturn("conversations", lease, "--limit=2", "--tenant=b")
    assert [line.split()[0] for line in few.out.splitlines()] == ["conversation", "twice"]
    few = await kvturn("conversations", lease, "--limit=1")
    assert few.out.splitlines()[-1] == "1 of 5; --limit shows more"
    assert (await kvturn("conversations", lease, "--model=other")).out == (
        "no conversation matches\n"
    )


def test_a_list_as_long_as_it_may_be_says_how_to_see_the_rest() -> None:
    """No higher limit is taken, so none is advised."""
    rows = [conversation_fields(lease_pb2.Conversation())] * LISTED_MAX
    last = conversations._shown(rows, 6_044, False, 80)[-1]
    assert str(last) == (
        "1,000 of 6,044; --tenant, --model, --engine and --retained show fewer at a time"
    )


async def test_turns_tell_what_each_reused_and_why(guests: Guests) -> None:
    """Tenant and model are found by the name; a scope shows its conversations' turns."""
    leases = await busy(guests)
    lease = f"--lease={guests.endpoint}"
    document = (await kvturn("turns", lease, "trip-42", "--json")).document
    assert (document["conversation_id"], document["tenant"], document["model"]) == (
        "trip-42",
        "",
        "m",
    )
    first, second = document["turns"]
    assert (first["turn"], first["verdict"], first["prompt_tokens"]) == (1, "first_turn", None)
    age_s = second.pop("age_s")
    assert 0 <= age_s < 60
    assert second == {
        "conversation_id": "trip-42",
        "turn": 2,
        "verdict": "reused",
        "plan": "pull",
        "plan_reason": "cheapest at_holder new_tokens=12 pull_ms=80.0",
        "prompt_tokens": 1_000,
        "reused_tokens": 900,
        "local_tokens": 60,
        "computed_tokens": 40,
        "output_tokens": 20,
        "first_byte_ms": 350.4,
        "total_ms": 1_500.0,
        "prefill_ms": None,
        "read_ms": 7.25,
        "read_bytes": 21_000_000,
        "saved_ms": 2_000.0,
        "prefill_engine": "http://p1:8100",
        "decode_engine": "http://d1:8200",
        "trace_id": "0123456789abcdef0123456789abcdef",
    }
    [held] = document["leases"]
    assert (held["lease_id"], held["state"]) == (leases["trip-42"], "active")
    shown = (await kvturn("turns", lease, "trip-42")).out.splitlines()
    assert shown[0] == "trip-42 of model m"
    assert f"decode-0 retains 1,024 tokens under lease {leases['trip-42']}" in shown[1]
    words = shown[-1].split()
    assert words[:9] == ["2", "reused", "pull", "cheapest", "at_holder", "1,000", "900", "60", "40"]
    assert words[9:13] == ["350", "7.2", "21.0", "2,000"]
    scope = (await kvturn("turns", lease, "scope")).out
    assert "scope~0123456789ab" in scope.splitlines()[-1]


async def test_a_name_that_is_none_or_several_says_what_to_give(guests: Guests) -> None:
    """One line, exit code 1; with the tenant that it names the command works."""
    await busy(guests)
    lease = f"--lease={guests.endpoint}"
    unknown = await kvturn("turns", lease, "nobody")
    assert (unknown.code, unknown.out) == (1, "")
    assert unknown.err == (
        "kvturn turns: the lease service knows no conversation 'nobody';"
        " kvturn conversations lists those that it knows\n"
    )
    several = await kvturn("turns", lease, "twice")
    assert several.code == 1
    assert "give one of --tenant 'a' --model 'm', --tenant 'b' --model 'm'\n" in several.err
    one = await kvturn("turns", lease, "twice", "--tenant", "b", "--json")
    assert (one.code, one.document["tenant"]) == (0, "b")
    nobody = await kvturn("turns", lease, "twice", "--tenant", "")
    assert "no conversation 'twice' of tenant ''" in nobody.err


async def test_leases_and_engines_are_listed(guests: Guests) -> None:
    """By engine, conversation and state; memory as of the engines' last heartbeat."""
    leases = await busy(guests)
    lease = f"--lease={guests.endpoint}"
    document = (await kvturn("leases", lease, "--json")).document
    assert [row["lease_id"] for row in document["leases"]] == sorted(leases.values())
    assert document["more"] is False
    first = document["leases"][0]
    assert (first["conversation_id"], first["engine_id"], first["tokens"], first["blocks"]) == (
        "trip-42",
        "decode-0",
        1_024,
        64,
    )
    for flags, expected in (
        (["--conversation=scope"], [leases["scope"]]),
        (["--conversation=trip-42", "--engine=decode-0"], [leases["trip-42"]]),
        (["--conversation=trip-42", "--engine=other"], []),
        (["--engine=other"], []),
        (["--state=reading"], []),
        (["--limit=1"], [leases["trip-42"]]),
    ):
        found = (await kvturn("leases", lease, "--json", *flags)).document["leases"]
        assert [row["lease_id"] for row in found] == expected, flags
    [decode, prefill] = (await kvturn("engines", lease, "--json")).document["engines"]
    assert (decode["engine_id"], decode["role"]) == ("decode-0", "decode")
    assert (decode["blocks"], decode["active_blocks"]) == (100, 10)
    assert (decode["retained_blocks"], decode["free_blocks"], decode["leases"]) == (30, 60, 2)
    assert (prefill["role"], prefill["vllm_version"]) == ("prefill", "0.29.0")
    table = (await kvturn("engines", lease)).out.splitlines()
    assert table[1].split()[:4] == ["decode-0", "decode", "taking", "turns"]


async def test_names_cannot_act_on_the_terminal(guests: Guests) -> None:
    """Escapes, bells and direction marks are spelt out; wide characters keep columns straight."""
    router = await guests.router()
    await router.turn("red\x1b[31m\x07\u202e", **FIRST)
    await router.turn("日本語の会話", **FIRST)
    shown = (await kvturn("conversations", f"--lease={guests.endpoint}")).out
    assert r"red\x1b[31m\x07\u202e" in shown
    assert all(each.isprintable() or each == "\n" for each in shown)
    wide, narrow = shown.splitlines()[1:]
    # Six characters of two cells each.
    assert wide.index("m ") + 6 == narrow.index(" m ") + 1


# ---- what is done ----------------------------------------------------------------------------


async def test_leases_are_revoked_one_by_one_by_conversation_and_by_engine(guests: Guests) -> None:
    """One that is gone is named and makes the exit code 1; the others are revoked all the same."""
    leases = await busy(guests)
    lease = f"--lease={guests.endpoint}"
    done = await kvturn("revoke", lease, leases["trip-42"], "decode-0.99.1")
    assert (done.code, done.out) == (1, f"revoked {leases['trip-42']}\n")
    assert done.err == (
        "kvturn revoke: decode-0.99.1: no engine retains it; kvturn leases lists what is retained\n"
    )
    done = await kvturn("revoke", lease, "--conversation=scope")
    assert (done.code, done.out) == (0, f"revoked {leases['scope']}\n")
    done = await kvturn("revoke", lease, "--engine=decode-0", "--yes")
    assert (done.code, done.out) == (0, "nothing is retained there; nothing to revoke\n")
    for named in ("--engine=decode-9", "--conversation=trip-9"):
        done = await kvturn("revoke", lease, named, "--yes")
        assert (done.code, done.out) == (1, "")
        assert f"the lease service knows no {named[2:].split('=')[0]} " in done.err
    assert (await kvturn("leases", lease)).out == "no engine retains anything now\n"


async def test_what_was_revoked_and_drained_is_told_as_json_too(guests: Guests) -> None:
    """Each lease with what became of it; the exit code is as without."""
    leases = await busy(guests)
    lease = f"--lease={guests.endpoint}"
    done = await kvturn("revoke", lease, leases["trip-42"], "decode-0.99.1", "--json")
    assert done.code == 1
    [revoked, unknown] = done.document["leases"]
    assert revoked == {"lease_id": leases["trip-42"], "revoked": True, "problem": None}
    assert (unknown["lease_id"], unknown["revoked"]) == ("decode-0.99.1", False)
    assert unknown["problem"].startswith("no engine retains it")
    assert (await kvturn("revoke", lease, "--conversation=trip-42", "--json")).document == {
        "leases": []
    }
    done = await kvturn("drain", lease, "decode-0", "--json")
    assert done.document == {"engine_id": "decode-0", "draining": True}


async def test_an_engine_s_leases_are_revoked_only_when_somebody_agrees(guests: Guests) -> None:
    """Where nobody can be asked, --yes is needed."""
    await busy(guests)
    lease = f"--lease={guests.endpoint}"
    refused = await kvturn("revoke", lease, "--engine=decode-0")
    assert refused.code == 2
    assert "--engine needs --yes with --json, and where nobody can be asked" in refused.err
    assert len((await kvturn("leases", lease, "--json")).document["leases"]) == 2
    done = await kvturn("revoke", lease, "--engine=decode-0", "--yes")
    assert (done.code, done.out.count("revoked ")) == (0, 2)


async def test_an_engine_is_drained_and_taken_up_again(guests: Guests) -> None:
    """The list shows it; one that is not known is refused by name."""
    await guests.engine("decode-0")
    lease = f"--lease={guests.endpoint}"
    for flags, draining in (([], True), (["--undo"], False)):
        assert (await kvturn("drain", lease, "decode-0", *flags)).code == 0
        [engine] = (await kvturn("engines", lease, "--json")).document["engines"]
        assert engine["draining"] is draining
    unknown = await kvturn("drain", lease, "decode-9")
    assert (unknown.code, unknown.err) == (
        1,
        "kvturn drain: the lease service knows no engine decode-9; kvturn engines lists them\n",
    )


# ---- how it is reached -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        ["conversations"],
        ["turns", "c"],
        ["leases"],
        ["engines"],
        ["revoke", "a.1.1"],
        ["drain", "d"],
    ],
)
def test_without_a_lease_service_a_line_names_address_and_fix(
    arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit code 1, nothing on stdout, no traceback."""
    monkeypatch.setenv("KVTURN_OPERATOR_LEASE", "127.0.0.1:1")
    done = Done(main([*arguments, "--timeout=2"]), *capsys.readouterr())
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith(
        f"kvturn {arguments[0]}: no answer from the lease service at 127.0.0.1:1: "
    )
    assert "start it (kvturn up, kvturn lease), or give --lease HOST:PORT" in done.err
    assert done.err.count("\n") == 1


async def test_a_slow_lease_service_has_all_of_the_timeout() -> None:
    """It takes the connection and is silent: that is not given up before the timeout."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        where = f"127.0.0.1:{silent.getsockname()[1]}"
        done = await kvturn("engines", f"--lease={where}", "--timeout=1.3")
    assert done.code == 1
    assert f"no answer from the lease service at {where}: it is silent; " in done.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["turns"], "the following arguments are required: CONVERSATION"),
        (["turns", ""], "CONVERSATION: must have 1 to 256 bytes, not 0"),
        (["turns", "c", "--lease=nowhere"], "--lease: 'nowhere' must be HOST:PORT, or several"),
        (["conversations", "--limit=0"], "--limit: '0' is not a whole number from 1 to 1000"),
        (["conversations", "--watch=soon"], "--watch: 'soon' is not a number of seconds above 0"),
        (["leases", "--state=gone"], "invalid choice: 'gone'"),
        (["leases", "--model=m"], "--model and --tenant need --conversation"),
        (["engines", "--lease-token-file=/nowhere"], "--lease-token-file /nowhere: "),
        (["engines", "--lease-cert=/nowhere"], "--lease-cert needs --lease-ca"),
        (["revoke", "…12.14.1"], "lease ids must be whole; kvturn leases --json shows them so"),
        (["revoke"], "give lease ids, or --conversation, or --engine"),
        (["revoke", "a.1.1", "--engine=d"], "give lease ids, or --conversation, or --engine"),
        (["top"], "needs a terminal"),
    ],
)
def test_what_is_wrong_is_refused_in_a_line(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2, before anybody is asked."""
    try:
        code = main(arguments)
    except SystemExit as end:
        code = int(end.code or 0)
    done = Done(code, *capsys.readouterr())
    assert (done.code, done.out) == (2, "")
    assert words in done.err
    assert done.err.count("\n") == 1


async def test_a_variable_of_all_these_commands_is_refused_if_misspelt() -> None:
    """They share their variables, so each knows all of them and no others."""
    done = await kvturn("engines", KVTURN_OPERATOR_LEESE="127.0.0.1:1")
    assert done.code == 2
    assert "KVTURN_OPERATOR_LEESE is not a setting; did you mean KVTURN_OPERATOR_LEASE" in done.err


async def test_tokens_open_the_lease_service_and_are_never_shown(tmp_path: Path) -> None:
    """Without one it says which flag to set; a router's token looks and does not revoke."""
    tokens = {}
    for role in ("engine", "router", "operator"):
        tokens[role] = tmp_path / role
        tokens[role].write_text(f"secret-of-{role}\n")
    flags = [f"--{role}-tokens-file={file}" for role, file in tokens.items()]
    async with lease_service(tmp_path, *flags) as guests:
        lease = f"--lease={guests.endpoint}"
        bare = await kvturn("engines", lease)
        assert bare.code == 1
        assert "it refuses us (UNAUTHENTICATED)" in bare.err
        assert "set --lease-token-file" in bare.err
        for role, code in (("router", 1), ("operator", 1)):
            token = f"--lease-token-file={tokens[role]}"
            assert (await kvturn("engines", lease, token, "--json")).document == {"engines": []}
            done = await kvturn("revoke", lease, token, "a.1.1")
            assert done.code == code
            assert ("PERMISSION_DENIED" in done.err) is (role == "router")
            assert "secret" not in done.err + done.out


async def test_of_several_lease_services_the_one_that_answers_is_asked(guests: Guests) -> None:
    """The others may be gone."""
    await guests.engine("decode-0")
    done = await kvturn("engines", f"--lease=127.0.0.1:1,{guests.endpoint}", "--json")
    assert [each["engine_id"] for each in done.document["engines"]] == ["decode-0"]


async def test_the_lease_service_of_a_running_up_is_found(guests: Guests, tmp_path: Path) -> None:
    """By what it left in its run folder; what an `up` that is gone left there does not count."""
    holder = ProcessId.of(os.getpid())
    assert holder is not None
    run_state.write(tmp_path, RunState(holder, lease_address=guests.endpoint))
    assert (await kvturn("engines", f"--run-dir={tmp_path}")).code == 0
    gone = ProcessId(holder.pid, holder.start_ticks + 1)
    run_state.write(tmp_path, RunState(gone, lease_address=guests.endpoint))
    assert "127.0.0.1:7600" in (await kvturn("engines", f"--run-dir={tmp_path}")).err


# ---- again and again -------------------------------------------------------------------------


async def test_watching_as_json_is_a_line_each_time_and_outlives_a_restart(guests: Guests) -> None:
    """While the lease service is gone a line on stderr says so; Ctrl-C ends it with 0."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvturn_cli", "engines", f"--lease={guests.endpoint}"),
        *("--json", "--watch=0.1", "--timeout=1"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    async with asyncio.timeout(60):
        for _ in range(2):
            assert json.loads(await process.stdout.readline()) == {"engines": []}
        guests.process.kill()
        assert b"no answer from the lease service" in await process.stderr.readline()
        guests.process.launch()
        await until(guests.process.listens, GUARD_S)
        await guests.engine("decode-0")
        while json.loads(await process.stdout.readline()) == {"engines": []}:
            pass
        process.send_signal(signal.SIGINT)
        assert await process.wait() == 0


async def test_watching_without_a_terminal_shows_table_after_table(guests: Guests) -> None:
    """Each with the time of day and whom it asked."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvturn_cli", "engines", f"--lease={guests.endpoint}"),
        "--watch=0.1",
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    async with asyncio.timeout(60):
        for _ in range(2):
            assert guests.endpoint in (await process.stdout.readline()).decode()
            assert b"no engine has a session" in await process.stdout.readline()
            assert await process.stdout.readline() == b"\n"
        process.terminate()
        assert await process.wait() == 0
