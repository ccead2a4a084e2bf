"""The launcher: what it starts, what it refuses, and that nothing outlives it.

The engines here are fakes that open their port and answer /health, started as vLLM would be.
"""

import dataclasses
import itertools
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import textwrap
import time
import urllib.request
from pathlib import Path

import pytest
from certificates import Authority

from kvturn_cli.console import Silent
from kvturn_cli.engine import (
    STOCK_CONNECTOR,
    Connector,
    EngineConfig,
    EngineSettings,
    connector_json,
    data_type,
    engine_command,
    engine_environment,
)
from kvturn_cli.ports import is_free, pick_free
from kvturn_cli.process import ProcessId
from kvturn_cli.stack import MODEL_LEN_MAX, ConfigError, Stack, StackConfig, StackError, model_len

GUARD_S = 120
FAKE_ENGINE = """\
#!{python}
# Stands in for a vLLM interpreter: serves /health on --port, leaves a child and a grandchild.
import http.server, os, subprocess, sys, time
arguments = dict(zip(sys.argv, sys.argv[1:]))
if os.environ.get("FAKE_FAILS"):
    print("ValueError: no such attention backend")
    sys.exit(3)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        open(os.environ["FAKE_PIDS"], "a").write(str(os.getpid()) + chr(10))
    time.sleep(600)
open(os.environ["FAKE_PIDS"], "a").write(str(os.getpid()) + chr(10))

class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

http.server.ThreadingHTTPServer(("127.0.0.1", int(arguments["--port"])), Health).serve_forever()
"""


@pytest.fixture
def fake_python(tmp_path: Path) -> Path:
    """Returns a program that takes a vLLM interpreter's place."""
    path = tmp_path / "fake-python"
    path.write_text(FAKE_ENGINE.format(python=sys.executable))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Returns a folder that passes for a model."""
    folder = tmp_path / "tiny-model"
    folder.mkdir()
    (folder / "config.json").write_text('{"max_position_embeddings": 512}')
    return folder


@pytest.mark.parametrize(
    ("config", "said"),
    [("[]", "is no JSON object"), ("{", "cannot be read"), ('{"text_config": []}', "")],
)
def test_a_model_whose_config_is_none_is_refused(model: Path, config: str, said: str) -> None:
    """Before anything starts; one that does not tell its context is given the usual one."""
    (model / "config.json").write_text(config)
    if not said:
        assert model_len(model) == MODEL_LEN_MAX
        return
    with pytest.raises(ConfigError, match=said):
        model_len(model)


def config_of(tmp_path: Path, fake_python: Path, model: Path, **env: str) -> StackConfig:
    """Returns a stack of two fake engines and the trace receiver."""
    variables = {"FAKE_PIDS": str(tmp_path / "pids"), **env}
    return StackConfig(
        run_dir=tmp_path / "run",
        model=model,
        vllm_python=fake_python,
        engines=(
            EngineConfig("prefill", "prefill-0", env=variables),
            EngineConfig("decode", "decode-0", env=variables),
        ),
        connector=STOCK_CONNECTOR,
        router=False,
        lease=False,
        start_timeout_s=GUARD_S,
        stop_grace_s=2,
    )


def started(tmp_path: Path) -> list[ProcessId]:
    """Returns the processes of both fake engines, as soon as each has said that it is there."""
    until = time.monotonic() + GUARD_S
    while len(pids := (tmp_path / "pids").read_text().split()) < 4:
        assert time.monotonic() < until
        time.sleep(0.01)
    return [found for pid in pids if (found := ProcessId.of(int(pid)))]


def test_a_stack_starts_its_engines_and_leaves_nothing(
    tmp_path: Path, fake_python: Path, model: Path
) -> None:
    """Engines answer; after stop they and the grandchildren that left their session are gone."""
    with Stack(config_of(tmp_path, fake_python, model)) as stack:
        for url in (stack.prefill_url, stack.decode_url):
            assert urllib.request.urlopen(f"{url}/health", timeout=GUARD_S).status == 200
        assert set(stack.logs) == {"otlp", "prefill-0", "decode-0"}
        running = started(tmp_path)
        assert len(running) == 4
        ports = list(stack.engine_ports.values())
    assert not [process for process in running if process.is_running()]
    assert all(is_free(port) for port in ports)


def test_an_engine_that_ends_while_starting_is_named_with_its_log(
    tmp_path: Path, fake_python: Path, model: Path
) -> None:
    """The error tells the engine, its last words and its log; everything else is stopped."""
    stack = Stack(config_of(tmp_path, fake_python, model, FAKE_FAILS="1"))
    with pytest.raises(StackError, match=r"ended with status 3: ValueError.*\(log: .*\.log\)"):
        stack.start()
    assert stack.processes == ()


def test_an_engine_that_does_not_register_is_told_with_the_lease_service(
    tmp_path: Path, fake_python: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error has the lease service's last words and both logs: either may be the cause."""
    monkeypatch.setattr("kvturn_cli.stack.REGISTER_TIMEOUT_S", 0.0)
    config = config_of(tmp_path, fake_python, model)
    stack = Stack(dataclasses.replace(config, lease=True, connector=Connector()))
    words = r"last said: lease service listening on .*\(logs: .*/lease\.log, .*/decode-0\.log\)"
    with pytest.raises(StackError, match=words):
        stack.start()
    assert stack.processes == ()


def test_an_engine_that_ends_while_running_is_noticed(
    tmp_path: Path, fake_python: Path, model: Path
) -> None:
    """kill -9 of an engine ends its leash, which check_alive reports."""
    with Stack(config_of(tmp_path, fake_python, model)) as stack:
        decode = next(process for process in stack.processes if process.name == "decode-0")
        assert decode.id is not None
        children = Path(f"/proc/{decode.id.pid}/task/{decode.id.pid}/children").read_text()
        os.kill(int(children.split()[0]), signal.SIGKILL)
        assert decode.id.wait(10)
        with pytest.raises(
            StackError,
            match=r"decode-0 ended with status 137 \(killed by SIGKILL; out of memory\?\)",
        ):
            stack.check_alive()


def test_nothing_outlives_a_holder_that_is_killed(
    tmp_path: Path, fake_python: Path, model: Path
) -> None:
    """kill -9 of the process that holds the stack takes engines and grandchildren with it."""
    code = textwrap.dedent(f"""
        import sys, time
        from pathlib import Path
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from test_cli_stack import config_of
        from kvturn_cli.stack import Stack
        paths = [Path(path) for path in {[str(tmp_path), str(fake_python), str(model)]!r}]
        Stack(config_of(*paths)).start()
        print("up", flush=True)
        time.sleep(600)
    """)
    holder = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "up\n"
    running = started(tmp_path)
    assert len(running) == 4
    holder.kill()
    holder.wait()
    holder.stdout.close()
    assert all(process.wait(GUARD_S) for process in running)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("model", r"--model .*no-model: no model there \(no config.json\); .*make setup"),
        ("python", r"--vllm-python .*no-python: no Python there; .*make setup"),
        ("port", r"--router-port \d+: the port is in use; choose another"),
        ("twice", r"--grpc-port \d+: --router-port has the same port"),
    ],
)
def test_what_cannot_start_is_refused_before_anything_starts(
    fault: str, words: str, tmp_path: Path, fake_python: Path, model: Path
) -> None:
    """Each fault is one line that names the flag and the fix."""
    config = config_of(tmp_path, fake_python, model)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        free = pick_free(set())
        changes: dict[str, dict[str, object]] = {
            "model": {"model": tmp_path / "no-model"},
            "python": {"vllm_python": tmp_path / "no-python"},
            "port": {"router_port": taken.getsockname()[1]},
            "twice": {"router_port": free, "grpc_port": free},
        }
        with pytest.raises(ConfigError, match=words) as caught:
            Stack(dataclasses.replace(config, **changes[fault]), Silent())  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            {"router_args": ("--plan=fast",)},
            "router would not start: --plan 'fast' must be one of auto",
        ),
        ({"router_args": ("--prot=1",)}, "unrecognized arguments: --prot=1; did you mean --port?"),
        ({"router_args": ("--port=1",)}, "--router-arg must not move the router; give --router-p"),
        ({"lease_args": ("--idle=no",)}, r"lease would not start: --idle .* seconds"),
        ({"lease_args": ("--host=::",)}, "--lease-arg must not move the lease service; give"),
        ({"lease_args": ("TOKENS",)}, "--lease-arg: .* without TLS and tokens; start the parts"),
        ({"router_args": ("TLS",)}, "--router-arg: kvturn up speaks without TLS with its router"),
    ],
)
def test_arguments_of_services_are_refused_before_the_engines_start(
    arguments: dict[str, tuple[str]], words: str, tmp_path: Path, fake_python: Path, model: Path
) -> None:
    """Not after the minute that engines take; and none that parts the stack from itself."""
    pair = Authority(tmp_path).issue()
    tokens = tmp_path / "tokens"
    tokens.write_text("a-token-that-is-long\n")
    spelt = {
        "TOKENS": (f"--engine-tokens-file={tokens}", f"--router-tokens-file={tokens}"),
        "TLS": (f"--tls-cert={pair.cert}", f"--tls-key={pair.key}"),
    }
    changes = {name: spelt.get(value[0], value) for name, value in arguments.items()}
    config = dataclasses.replace(config_of(tmp_path, fake_python, model), lease=True, router=True)
    with pytest.raises(ConfigError, match=words):
        Stack(dataclasses.replace(config, **changes))  # type: ignore[arg-type]


def settings_of(connector: Connector) -> EngineSettings:
    """Returns settings as a stack would have them."""
    return EngineSettings(
        model=Path("/models/m"),
        served_model_name="m",
        max_model_len=4096,
        kv_cache_gib=2,
        threads=3,
        connector=connector,
        lease_endpoint="127.0.0.1:7600",
        otlp_endpoint="http://127.0.0.1:4317",
        question_deadline_ms=50,
    )


def test_an_engine_s_command_line_loads_our_connector_on_loopback() -> None:
    """What vLLM is told: address, model, connector, and more flags last, so that they win."""
    engine = EngineConfig("decode", "decode-0", args=("--max-num-seqs", "4"))
    command = engine_command(Path("/py"), engine, 8200, settings_of(Connector()))
    assert command[:3] == ["/py", "-m", "vllm.entrypoints.openai.api_server"]
    flags = dict(itertools.pairwise(command))
    assert flags["--host"] == "127.0.0.1"
    assert flags["--port"] == "8200"
    assert flags["--max-model-len"] == "4096"
    assert flags["--otlp-traces-endpoint"] == "http://127.0.0.1:4317"
    assert command[-2:] == ["--max-num-seqs", "4"]
    assert "--no-enable-prefix-caching" not in command
    assert flags["--distributed-executor-backend"].endswith("UniProcExecutor")
    two_ranks = dataclasses.replace(engine, args=("--tensor-parallel-size", "2"))
    parallel = engine_command(Path("/py"), two_ranks, 8200, settings_of(Connector()))
    assert "--distributed-executor-backend" not in parallel
    assert json.loads(flags["--kv-transfer-config"]) == {
        "kv_connector": "KvturnConnector",
        "kv_connector_module_path": "kvturn_connector.connector",
        "kv_role": "kv_consumer",
        "kv_buffer_device": "cpu",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "backends": ["UCX"],
            "bidirectional_kv_xfer": True,
            "kvturn_lease_endpoint": "127.0.0.1:7600",
            "kvturn_question_deadline_ms": 50,
            "kvturn_engine_name": "decode-0",
            "kvturn_http_address": "http://127.0.0.1:8200",
            "kvturn_nixl_progress_delay_us": 1000,
            "kvturn_otlp_endpoint": "http://127.0.0.1:4317",
        },
    }


def test_a_stock_engine_gets_no_key_of_ours() -> None:
    """The stock connector without prefix caching, and keys changed or taken away."""
    changes = {"bidirectional_kv_xfer": False, "backends": None}
    engine = EngineConfig("prefill", "p", prefix_caching=False, connector_config=changes)
    settings = settings_of(STOCK_CONNECTOR)
    body = json.loads(connector_json(engine, 1, settings))
    assert body["kv_connector_extra_config"] == {"bidirectional_kv_xfer": False}
    assert body["kv_role"] == "kv_producer"
    assert "kv_connector_module_path" not in body
    assert "--no-enable-prefix-caching" in engine_command(Path("/py"), engine, 1, settings)


def test_an_engine_s_environment_keeps_traffic_on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    """No proxy, no hub, no usage report, UCX and side channel on loopback; own variables win."""
    for name in ("http_proxy", "HTTPS_PROXY", "VIRTUAL_ENV", "PYTHONDONTWRITEBYTECODE"):
        monkeypatch.setenv(name, "x")
    engine = EngineConfig("decode", "d", env={"OMP_NUM_THREADS": "7"})
    environment = engine_environment(engine, 5600, settings_of(Connector()))
    assert not {"http_proxy", "HTTPS_PROXY", "VIRTUAL_ENV"} & set(environment)
    assert "PYTHONDONTWRITEBYTECODE" not in environment
    assert environment["UCX_NET_DEVICES"] == "lo"
    assert environment["VLLM_HOST_IP"] == environment["VLLM_NIXL_SIDE_CHANNEL_HOST"] == "127.0.0.1"
    assert environment["VLLM_NIXL_SIDE_CHANNEL_PORT"] == "5600"
    assert environment["HF_HUB_OFFLINE"] == environment["DO_NOT_TRACK"] == "1"
    assert environment["VLLM_CPU_KVCACHE_SPACE"] == "2"
    assert environment["OMP_NUM_THREADS"] == "7"


@pytest.mark.parametrize(
    ("cpu_info", "wanted"),
    [
        ("flags\t\t: fpu sse avx2 avx512f avx512_bf16\n", "bfloat16"),
        ("flags\t\t: fpu sse avx2\n", "float32"),
        ("Features\t: fp asimd\n", "bfloat16"),
        (None, "bfloat16"),
    ],
)
def test_engines_compute_in_the_type_that_the_processor_is_fast_with(
    tmp_path: Path, cpu_info: str | None, wanted: str
) -> None:
    """AVX-512 on x86; elsewhere, and where nothing is told, vLLM's own choice for the model."""
    file = tmp_path / "cpuinfo"
    if cpu_info is not None:
        file.write_text(cpu_info)
    assert data_type(file) == wanted
