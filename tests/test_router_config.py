"""Settings, and the router as a process: start, faults in one line, orderly end."""

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
from pathlib import Path

import pytest
from router_harness import Client, turn_body
from router_process import process
from stub_engine import CHAT, Reply, Seen, StubEngine, chunk

from kvturn.otlp import Destination
from kvturn_router.choice.plan import PlanKind, Thresholds
from kvturn_router.config import ConfigError, parse_config

ENGINES = ["--prefill=http://127.0.0.1:1", "--decode=http://127.0.0.1:2"]


def test_defaults_bind_loopback_and_are_documented():
    """Two engines are all that is needed."""
    config = parse_config(ENGINES, {})
    assert (config.host, config.port, config.grpc_port) == ("127.0.0.1", 8000, 8001)
    assert config.lease == ()
    assert config.question_deadline_ms == 50
    assert config.body_bytes_max == 64 << 20


def test_variables_stand_in_for_flags_and_flags_win():
    """KVTURN_ROUTER_GRPC_PORT is --grpc-port; engines are a list with commas."""
    environment = {
        "KVTURN_ROUTER_PREFILL": "http://a:1, http://b:1",
        "KVTURN_ROUTER_DECODE": "http://c:1",
        "KVTURN_ROUTER_GRPC_PORT": "9",
        "KVTURN_ROUTER_STOCK_REUSE": "true",
        "OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4317",
    }
    config = parse_config(["--port=7", "--no-grpc"], environment)
    assert [engine.url for engine in config.prefills] == ["http://a:1", "http://b:1"]
    assert (config.port, config.grpc_port, config.stock_reuse) == (7, None, True)
    assert config.traces == Destination("http://collector:4317")
    assert parse_config([*ENGINES, "--grpc-port=5"], environment).grpc_port == 5


def test_a_lease_service_of_several_processes_is_a_list():
    """With commas between, as flag and as variable; or the flag again for each."""
    config = parse_config([*ENGINES, "--lease=a:1, [::1]:2"], {})
    assert config.lease == ("a:1", "[::1]:2")
    assert parse_config(ENGINES, {"KVTURN_ROUTER_LEASE": "a:1,b:2"}).lease == ("a:1", "b:2")
    assert parse_config([*ENGINES, "--lease=a:1", "--lease=b:2"], {}).lease == ("a:1", "b:2")


@pytest.mark.parametrize(
    ("variable", "meant"),
    [
        ("KVTURN_ROUTER_LEASES", "KVTURN_ROUTER_LEASE (--lease)"),
        ("KVTURN_ROUTER_GRPCPORT", "KVTURN_ROUTER_GRPC_PORT (--grpc-port)"),
        ("KVTURN_ROUTER_GRACE", "KVTURN_ROUTER_GRACE_S (--grace-s)"),
    ],
)
def test_a_misspelt_variable_is_refused_with_the_one_that_was_meant(variable, meant):
    """It would be a setting that silently does not hold; variables of others do not matter."""
    with pytest.raises(ConfigError) as refused:
        parse_config(ENGINES, {"KVTURN_LEASE_PORT": "1", variable: "1"})
    assert str(refused.value).startswith(f"{variable} is not a setting")
    assert meant in str(refused.value)


@pytest.mark.parametrize("flags", [["--lease=h:1"], ["--lease=h:1", "--decode=http://d:1"]])
def test_engines_that_announce_themselves_need_no_flags(flags):
    """With a lease service; without one, and without operators, nobody could name engines."""
    assert parse_config(flags, {}).prefills == ()
    with pytest.raises(ConfigError, match=r"--prefill is missing.*--lease"):
        parse_config(["--decode=http://d:1"], {})


def test_one_engine_is_one_engine_however_it_is_written():
    """localhost is 127.0.0.1, and a slash at the end is nothing."""
    with pytest.raises(ConfigError, match="given twice"):
        parse_config([*ENGINES, "--prefill=http://localhost:1/"], {})


def test_engines_may_have_ipv6_addresses():
    """A literal in brackets."""
    config = parse_config(["--prefill=http://[::1]:8100", "--decode=http://h:1/"], {})
    assert (config.prefills[0].host, config.prefills[0].port) == ("::1", 8100)
    assert config.decodes[0].url == "http://h:1"


def test_what_is_fixed_of_the_choice_is_read_from_flags():
    """Nothing by default; a way; thresholds."""
    assert parse_config(ENGINES, {}).thresholds == Thresholds()
    assert parse_config([*ENGINES, "--plan=local"], {}).thresholds.way is PlanKind.LOCAL
    flags = ("--local-suffix-max-tokens=64", "--pull-min-tokens=256", "--holder-margin=2")
    assert parse_config([*ENGINES, *flags], {}).thresholds == Thresholds(None, 64, 256, 2)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ([], "--prefill"),
        (["--prefill=http://h:1"], "--decode"),
        ([*ENGINES, "--prefill=h:1"], "--prefill"),
        ([*ENGINES, "--prefill=ftp://h:1"], "--prefill"),
        ([*ENGINES, "--decode=http://h:1/v1"], "--decode"),
        ([*ENGINES, "--decode=http://h:99999"], "--decode"),
        ([*ENGINES, ENGINES[0]], "--prefill"),
        ([*ENGINES, "--port=x"], "--port"),
        ([*ENGINES, "--port=70000"], "--port"),
        ([*ENGINES, "--port=5", "--grpc-port=5"], "--grpc-port"),
        ([*ENGINES, "--max-conversations=0"], "--max-conversations"),
        ([*ENGINES, "--max-inflight=-1"], "--max-inflight"),
        ([*ENGINES, "--grace=nan"], "--grace-s"),
        ([*ENGINES, "--question-deadline-ms=0.5"], "--question-deadline-ms"),
        ([*ENGINES, "--lease=nowhere"], "--lease"),
        ([*ENGINES, "--lease=a:1,,b:2"], "--lease"),
        ([*ENGINES, "--lease=a:\u00b2"], "--lease"),
        ([*ENGINES, "--lease=http://a:1"], "--lease"),
        ([*ENGINES, "--lease=::1:7600"], "--lease"),
        ([*ENGINES, "--lease=a b:1"], "--lease"),
        ([*ENGINES, f"--lease={','.join(['a:1'] * 17)}"], "--lease"),
        ([*ENGINES, "--lease=h:1", "--stock-reuse"], "--stock-reuse"),
        ([*ENGINES, "--engine-api-key-file=/does/not/exist"], "--engine-api-key-file"),
        ([*ENGINES, "--otlp-endpoint=collector"], "--otlp-endpoint"),
        ([*ENGINES, "--stock-ttl-s=9"], "--stock-reuse"),
        ([*ENGINES, "--stock-handles-max=9"], "--stock-reuse"),
        ([*ENGINES, "--lease-ca=/etc/ca"], "without --lease:"),
        ([*ENGINES, "--lease-token-file=/etc/token"], "without --lease:"),
        ([*ENGINES, "--plan=fast"], "--plan"),
        ([*ENGINES, "--plan=pull", "--pull-min-tokens=5"], "--pull-min-tokens"),
        ([*ENGINES, "--plan=local", "--local-suffix-max-tokens=5"], "--local-suffix-max-tokens"),
        ([*ENGINES, "--holder-margin=-1"], "--holder-margin"),
        ([*ENGINES, "--tenant-header=x y"], "--tenant-header"),
        ([*ENGINES, "--tenant-header=x,y"], "--tenant-header"),
        ([*ENGINES, "--tenant-header=Authorization"], "--tenant-header"),
        ([*ENGINES, "--session-headers=x-a,cookie"], "--session-headers"),
        ([*ENGINES, "--tls-key=/does/not/exist"], "--tls-key needs --tls-cert"),
        ([*ENGINES, "--lease=h:1", "--lease-key=/does/not/exist"], "--lease-key needs"),
        ([*ENGINES, "--log-level=loud"], "--log-level"),
        ([*ENGINES, "--grpc=5"], "--grpc"),
        ([*ENGINES, "extra"], "extra"),
    ],
)
def test_a_wrong_setting_is_refused_by_name_in_one_line(flags, named):
    """Out of range, contradictory, unknown or missing."""
    with pytest.raises(ConfigError) as refused:
        parse_config(flags, {})
    assert named in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_wrong_variable_is_refused_by_its_own_name():
    """The operator sees what was set where."""
    with pytest.raises(ConfigError, match="KVTURN_ROUTER_PORT"):
        parse_config(ENGINES, {"KVTURN_ROUTER_PORT": "x"})


async def test_an_ipv6_address_is_printed_as_urls_have_it():
    """The line that says where it listens can be used as it is."""
    async with process(*ENGINES, "--host=::1", "--port=0", "--grpc-port=0") as router:
        assert router.process.stdout is not None
        line = (await router.process.stdout.readline()).decode()
        found = re.fullmatch(r"router listening on http://\[::1\]:(\d+), grpc \[::1\]:\d+\n", line)
        assert found is not None
        client = Client(*await asyncio.open_connection("::1", int(found[1])))
        await client.send("GET", "/health")
        assert (await client.answer()).status == 200
        client.close()


async def test_faults_at_start_are_one_line_and_an_exit_code(tmp_path: Path):
    """A bad flag is 2, a port in use is 1; no traceback."""
    async with process(*ENGINES, "--port=x") as bad:
        code, errors = await bad.end()
        assert code == 2
        assert errors.startswith("kvturn router: --port 'x' must be")
        assert errors.count("\n") == 1
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        async with process(*ENGINES, f"--port={port}", "--no-grpc") as bad:
            code, errors = await bad.end()
            assert (code, errors.count("\n")) == (1, 1)
            assert f"127.0.0.1:{port}" in errors
            assert "in use" in errors
        async with process(*ENGINES, "--port=0", f"--grpc-port={port}") as bad:
            code, errors = await bad.end()
            assert (code, errors.count("\n")) == (1, 1)
            assert f"127.0.0.1:{port}" in errors


async def test_it_starts_without_engines_and_ends_in_order():
    """It says where it listens, is alive and not ready, and SIGTERM ends it with 0."""
    async with process(*ENGINES, "--port=0", "--grpc-port=0") as router:
        line = await router.until_listening()
        assert line.startswith("router listening on http://127.0.0.1:")
        assert ", grpc 127.0.0.1:" in line
        client = await router.client()
        await client.send("GET", "/health")
        assert (await client.answer()).status == 200
        await client.send("GET", "/ready")
        answer = await client.answer()
        assert answer.status == 503
        assert answer.json["reason"] == (
            "no prefill engine is healthy; no decode engine is healthy"
        )
        while router.process.returncode is None:  # more signals do no harm until the last
            with contextlib.suppress(ProcessLookupError):
                # send_signal() would take the exit code away.
                os.kill(router.process.pid, signal.SIGTERM)
            await asyncio.sleep(0.005)
        code, errors = await router.end()
        assert code == 0
        assert "Traceback" not in errors


@pytest.mark.parametrize("ends_in_time", [True, False])
async def test_sigterm_lets_streams_finish_within_the_grace(ends_in_time: bool):
    """New turns are refused; a stream that ends in time is whole, another ends with an error."""
    release = asyncio.Event()
    prefill = await StubEngine("prefill").start()
    decode = await StubEngine("decode").start()

    async def play(seen: Seen, reply: Reply) -> None:
        await reply.begin_stream()
        await reply.event(chunk({"content": "The"}))
        await release.wait()
        await reply.end_stream()

    decode.script(CHAT, play)
    flags = [f"--prefill={prefill.url}", f"--decode={decode.url}", "--port=0", "--no-grpc"]
    grace = "--grace=20" if ends_in_time else "--grace=0.1"
    async with process(*flags, grace, "--health-interval-s=0.05") as router:
        await router.until_listening()
        await router.until_ready()
        client, other = await router.client(), await router.client()
        await other.send("GET", "/health")
        await other.answer()
        await client.send("POST", CHAT, json.dumps(turn_body(stream=True)).encode())
        head = await client.head()
        assert await client.piece() is not None
        router.process.send_signal(signal.SIGTERM)
        # Its idle connection is closed, and no new one is accepted.
        assert await other.reader.read() == b""
        with pytest.raises(ConnectionRefusedError):
            await router.client()
        with contextlib.suppress(ProcessLookupError):  # it may have ended by now
            router.process.send_signal(signal.SIGTERM)
        if ends_in_time:
            release.set()
            assert await client.piece() == b"data: [DONE]\n\n"
            assert await client.piece() is None
        else:
            error = json.loads((await client.piece() or b"").removeprefix(b"data: "))
            assert error["error"]["code"] == 503
            assert await client.reader.read() == b""
        assert head.status == 200
        code, errors = await router.end()
        assert code == 0
        grace_s = grace.partition("=")[2]
        assert f"INFO kvturn.router: draining: 1 turns in flight, for up to {grace_s} s" in errors
        assert "Traceback" not in errors
    release.set()
    await prefill.stop()
    await decode.stop()
