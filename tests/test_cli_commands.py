"""The command line: bad flags in one line, variables for flags, up and down that are safe."""

import contextlib
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from kvturn_command import kvturn

from kvturn_cli import run_state, up
from kvturn_cli.interrupts import Interrupted
from kvturn_cli.process import ProcessId
from kvturn_cli.run_state import RunState
from kvturn_cli.up import stack_config, up_parser
from kvturn_lease import config as lease_config


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nonsense"], "no command 'nonsense'; one of up, down"),
        (["up", "--router-port", "x"], "--router-port: 'x' is not a port; give 0 to 65535"),
        (["up", "--router-port", "65536"], "'65536' is not a port"),
        (["up", "--kv-cache-gib", "0"], "--kv-cache-gib: '0' is not a whole number of at least 1"),
        (["up", "--start-timeout", "-1"], "--start-timeout: '-1' is not a number of seconds"),
        (["up", "--router"], "unrecognized arguments: --router; did you mean --router-arg?"),
        (["up", "--grcp-port=1"], "--grcp-port=1; did you mean --grpc-port?"),
        (["router", "--grcp-port=1"], "--grcp-port=1; did you mean --grpc-port?"),
        (["lease", "--session-tll", "3"], "--session-tll 3; did you mean --session-ttl?"),
        (["lease", "--session-ttl=3"], "--session-ttl (KVTURN_LEASE_SESSION_TTL) must be at"),
        (["route"], "no command 'route'; one of up, down, chat, demo, top, "),
        (["down", "extra"], "unrecognized arguments: extra"),
        (["chat", "--max-tokens", "0"], "--max-tokens"),
        (["demo", "--model", "/nowhere"], "--model /nowhere: no model there"),
        (["otlp"], "--file"),
        (["router", "--lease=a:1", "--host=a..b"], "--host 'a..b' must be an address or a name of"),
        (["lease", "--host=a..b"], "--host (KVTURN_LEASE_HOST) must be an address or a name of"),
        (["lease", "--host="], "--host (KVTURN_LEASE_HOST) must be an address or a name of"),
        (["lease", "--metrics-port=0", "--metrics-host=a/b"], "--metrics-host (KVTURN_LEASE_MET"),
        (["otlp", "--file=f", "--host=a b"], "--host: 'a b' is no address or name of this machine"),
        (["router", f"--lease={'a' * 64}:1"], "must be HOST:PORT"),
        (["router", "--prefill=http://a..b:1"], "must have a host whose parts have 1 to 63"),
        (["chat", "--url=http://a..b:1"], "is no http://HOST:PORT"),
        (["router", "--lease=a:1", "--otlp-endpoint=http://a:0"], "--otlp-endpoint must be a URL"),
        (["lease", "--otlp-endpoint=http://a:99999"], "must be a URL like http://HOST:4317, not"),
        (["lease", "--otlp-protocol=nan"], "must be grpc or http/protobuf, not 'nan'"),
        (["up", "--router-port=--"], "--router-port=--: -- is no value; give another"),
        (["router", "--prefill=--"], "--prefill=--: -- is no value; give another"),
        (["lease", "--port=--"], "--port=--: -- is no value; give another"),
        (["router", "--lease=a:1", "--lease-ca=a\nb\x1b[31m"], "--lease-ca a\\nb\\x1b[31m: cannot"),
        (["lease", "--secret-file=a\nb", "--store=etcd://a:1"], "--secret-file a\\nb: cannot be"),
        (["up", "--model=a\nb"], "a\\nb: no model there"),
        (["chat", "--url=a\nb"], "is no http://HOST:PORT"),
        (["router", f"--port={'9' * 5_000}"], "999 ... 999"),
        (["up", f"--lease-port={'9' * 5_000}"], "999 ... 999"),
    ],
)
def test_a_wrong_argument_is_refused_by_name_in_one_line(arguments: list[str], words: str) -> None:
    """One line on stderr, code 2."""
    done = kvturn(*arguments)
    assert done.code == 2
    assert words in done.err
    assert done.err.count("\n") == 1


def test_a_variable_stands_in_for_a_flag_and_is_refused_by_its_name() -> None:
    """KVTURN_UP_ROUTER_PORT is --router-port; a wrong value names the variable."""
    done = kvturn("up", KVTURN_UP_ROUTER_PORT="many")
    assert done.code == 2
    assert "KVTURN_UP_ROUTER_PORT=many: 'many' is not a port" in done.err


@pytest.mark.parametrize("command", ["up", "chat", "down"])
def test_a_misspelt_variable_is_refused_with_the_one_that_was_meant(command: str) -> None:
    """Of each command its own; those of the others do not matter."""
    misspelt = f"KVTURN_{command.upper()}_RUNDIR"
    done = kvturn(command, **{misspelt: "x", "KVTURN_OTLP_FILES": "x"})
    assert done.code == 2
    assert f"{misspelt} is not a setting; did you mean {misspelt[:-3]}_DIR (--run-dir)?" in (
        done.err
    )
    assert done.err.count("\n") == 1


def test_a_variable_that_is_nobody_s_is_warned_of(tmp_path: Path) -> None:
    """It looks as if it were a setting; what it was meant for does not hold."""
    done = kvturn("down", f"--run-dir={tmp_path}", KVTURN_ROUTR_PORT="1", KVTURN_ETCD="etcd")
    assert done.code == 0
    assert done.err.startswith("kvturn down: warning: KVTURN_ROUTR_PORT: no setting of kvturn;")
    assert done.err.count("\n") == 1


@pytest.mark.parametrize("command", ["up", "demo"])
def test_a_current_folder_that_is_gone_is_told(tmp_path: Path, command: str) -> None:
    """It would be what relative paths are of, and where processes are started."""
    gone = tmp_path / "gone"
    gone.mkdir()
    script = f'cd {gone}; rmdir {gone}; exec "$@"'
    done = subprocess.run(
        ["bash", "-c", script, "bash", sys.executable, "-m", "kvturn_cli", command],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr == f"kvturn {command}: the current folder is gone; go to another one\n"


@pytest.mark.parametrize("command", ["router --lease=a:1", "lease", "otlp --file=/dev/null"])
def test_a_service_that_may_open_next_to_no_files_is_refused(command: str) -> None:
    """At these limits libraries fail in their own ways, up to a crash."""
    done = subprocess.run(
        ["bash", "-c", f"ulimit -n 40; exec {sys.executable} -m kvturn_cli {command} --port=0"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "only 40 files may be open at once, and 64 are the least; raise the" in done.stderr
    assert done.stderr.count("\n") == 1


def test_flags_win_over_variables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Both set: the flag counts; switches and lists have variables too."""
    monkeypatch.setenv("KVTURN_UP_ROUTER_PORT", "9001")
    monkeypatch.setenv("KVTURN_UP_LEASE_PORT", "9002")
    monkeypatch.setenv("KVTURN_UP_NO_PREFILL_PREFIX_CACHING", "1")
    arguments = [
        "--router-port",
        "9003",
        "--run-dir",
        str(tmp_path),
        "--decode-arg=--max-num-seqs=4",
        "--lease-arg=--session-ttl=30",
    ]
    config = stack_config(up_parser().parse_args(arguments))
    assert config.router_port == 9003
    assert config.lease_port == 9002
    prefill, decode = config.engines
    assert not prefill.prefix_caching
    assert decode.prefix_caching
    assert decode.args == ("--max-num-seqs=4",)
    assert lease_config.parse_config(config.lease_args, {}).lessor.session_ttl_ns == 30e9


def test_up_refuses_a_port_in_use_and_leaves_nothing(tmp_path: Path) -> None:
    """The port is named by its flag; no state, no process remains."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    with contextlib.closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        arguments = ["--run-dir", str(tmp_path / "run"), "--model", str(model)]
        arguments += ["--vllm-python", sys.executable, "--decode-port", port]
        # Any free ones: the defaults may be in use where the test runs.
        for name in ("router", "grpc", "lease", "prefill"):
            arguments += [f"--{name}-port", "0"]
        for detach in ([], ["--detach"]):
            done = kvturn("up", *arguments, *detach)
            assert done.code == 2
            assert f"--decode-port {port}: the port is in use" in done.err
            assert done.err.count("\n") == 1
    assert run_state.read(tmp_path / "run") is None


def test_a_second_up_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    """The lock of a living `up` is seen, whatever the state file says."""
    with run_state.hold(tmp_path):
        for detach in ([], ["--detach"]):
            done = kvturn("up", "--run-dir", str(tmp_path), *detach)
            assert done.code == 2
            assert "already up" in done.err
            assert "kvturn down" in done.err
            assert done.err.count("\n") == 1


def test_an_interrupted_up_that_takes_long_to_stop_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It does not say that all stopped, and tells where to look and how to stop it."""
    child = subprocess.Popen(["sleep", "60"])

    def interrupted(*_: object) -> int:
        raise Interrupted

    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: child)
    monkeypatch.setattr(child, "terminate", lambda: None)
    monkeypatch.setattr(up, "relay", interrupted)
    monkeypatch.setattr(up, "DOWN_TIMEOUT_S", 0.01)
    try:
        assert up.detach(tmp_path, []) == 1
    finally:
        child.kill()
        child.wait()
    assert capsys.readouterr().err == (
        f"kvturn up: still stopping; see {tmp_path}/up.log, or kvturn down --run-dir {tmp_path}\n"
    )


def test_down_is_idempotent(tmp_path: Path) -> None:
    """With nothing up, also with a broken state file, it says so and succeeds."""
    assert kvturn("down", "--run-dir", str(tmp_path)).code == 0
    run_state.state_file(tmp_path).write_text("{broken")
    done = kvturn("down", "--run-dir", str(tmp_path))
    assert done.code == 0
    assert "nothing to stop" in done.out


def test_down_never_stops_a_process_that_merely_has_the_number(tmp_path: Path) -> None:
    """The state names this test's process with another start time: it survives."""
    ours = ProcessId.of(os.getpid())
    assert ours is not None
    recycled = ProcessId(ours.pid, ours.start_ticks - 1)
    run_state.write(tmp_path, RunState(recycled, (recycled,), True, "http://127.0.0.1:1", "m"))
    done = kvturn("down", "--run-dir", str(tmp_path))
    assert done.code == 0
    assert "already ended" in done.out
    assert run_state.read(tmp_path) is None


def test_down_stops_the_holder_and_its_children(tmp_path: Path) -> None:
    """Both processes that the state names are ended."""
    sleepers = [subprocess.Popen(["sleep", "600"]) for _ in range(2)]
    ids = [ProcessId.of(sleeper.pid) for sleeper in sleepers]
    assert ids[0]
    assert ids[1]
    # The child is the holder's own to stop; a test has no such holder, so it is ended here.
    run_state.write(tmp_path, RunState(ids[0], (ids[1],), True))
    sleepers[1].terminate()
    done = kvturn("down", "--run-dir", str(tmp_path))
    assert done.code == 0
    assert "kvturn is stopped." in done.out
    for sleeper in sleepers:
        assert sleeper.wait(5) == -15


def test_arguments_and_variables_must_be_utf8() -> None:
    """Whatever the command: such text can neither be sent nor shown."""
    for arguments in (
        ("turns", "\udcff"),
        ("engines", "--lease=\udcff:1"),
        ("chat", "--url=http://\udcff"),
        ("lease", "--host=\udcff"),
    ):
        done = kvturn(*arguments)
        assert done.code == 2
        assert done.err.count("\n") == 1
        assert "is not UTF-8; give names and files in UTF-8" in done.err
    done = kvturn("router", KVTURN_ROUTER_HOST="\udcff")
    assert (done.code, "KVTURN_ROUTER_HOST is not UTF-8" in done.err) == (2, True)


def test_a_pipe_in_place_of_a_file_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    """Files of keys and certificates are read again when they change; nobody may ever write."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for arguments in (
        ("engines", f"--lease-ca={pipe}"),
        ("engines", f"--lease-token-file={pipe}"),
        ("chat", f"--ca={pipe}"),
        ("doctor", f"--engine-ca={pipe}"),
        ("doctor", f"--etcd-ca={pipe}"),
        ("doctor", "--etcd-user=u", f"--etcd-password-file={pipe}"),
        ("lease", f"--secret-file={pipe}"),
        ("lease", f"--engine-tokens-file={pipe}"),
        ("lease", "--store=etcd://127.0.0.1:1", f"--etcd-ca={pipe}"),
    ):
        done = kvturn(*arguments)
        assert done.code == 2
        assert done.err.count("\n") == 1
        flag = arguments[-1].partition("=")[0]
        assert f"{flag} {pipe}: is a pipe; give a file" in done.err


def started(module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs a module to its end in a Python of its own; stderr tells what it imported."""
    return subprocess.run(
        [sys.executable, "-X", "importtime", "-m", module, *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_help_names_every_command_and_imports_none() -> None:
    """`kvturn --help` succeeds, bare `kvturn` does not; both tell the commands, at once."""
    for arguments, code in ((["--help"], 0), ([], 2)):
        done = started("kvturn_cli", *arguments)
        assert done.returncode == code
        for name in ("up", "down", "chat", "demo", "router", "lease", "otlp"):
            assert f"\n  {name} " in done.stdout
        assert "kvturn_cli" in done.stderr
        assert not {"grpc", "rich", "asyncio"} & set(done.stderr.split())


@pytest.mark.parametrize("service", ["kvturn_router", "kvturn_lease"])
def test_a_service_imports_opentelemetry_only_where_spans_are_exported(service: str) -> None:
    """Without a collector nothing of it is needed, and loading it takes long."""
    done = started(service, "--help")
    assert done.returncode == 0
    assert "grpc" in done.stderr.split()
    assert "opentelemetry" not in done.stderr
