"""The scripts and units of deploy/baremetal: what they refuse, start and end. No engine runs here.

A stand-in for the command `kvturn` shows what the scripts do with processes: it can refuse to
start, take its time, leave children in other sessions, and ignore SIGTERM.
"""

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from kvturn_cli.checkout import default_vllm_python
from kvturn_cli.ports import pick_free
from kvturn_connector.config import ConnectorConfig
from kvturn_router.config import parse_config

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "deploy" / "baremetal"
SCRIPTS = ("start.sh", "sweep.sh", "cleanup.sh")
UNITS = sorted((FOLDER / "systemd").iterdir())
GUARD_S = 120
LATE_ADDRESS_S = 300
TRY_S = 5
"""What a try of a unit takes that finds no address, at most."""
PAIR = ("P_IP=10.0.0.5", "D_IP=10.0.0.6")
LOCAL = ("P_IP=127.0.0.1", "D_IP=127.0.0.1")
ENGINE = (*PAIR, "MODEL=meta-llama/Llama-3.1-8B-Instruct")
STAND_IN = """
    #!/bin/sh
    # Serves HTTP on the port after --port, or does what STAND_IN says.
    case ${STAND_IN-} in
    refuses) echo "stand-in: --host: I do not like it" && exit 2 ;;
    slow) echo loading && exec sleep 600 ;;
    stubborn) trap "" TERM && setsid sleep 600 & ;;
    esac
    while [ "$1" != --port ]; do shift; done
    cd "$(dirname "$0")/www" && exec PYTHON -m http.server --bind 127.0.0.1 "$2"
"""


def script(
    name: str, *words: str, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs a script of the folder with few variables around it."""
    kept = {key: os.environ[key] for key in ("PATH", "HOME") if key in os.environ}
    return subprocess.run(
        [str(FOLDER / name), *words],
        env={**kept, **(env or {})},
        capture_output=True,
        text=True,
        timeout=GUARD_S,
    )


def dry(*words: str, name: str = "start.sh") -> list[str]:
    """Returns the command that a script would run, read as a shell reads it."""
    done = script(name, "--dry-run", *words)
    assert done.returncode == 0, done.stderr
    return shlex.split(done.stdout)


def connector_of(command: Sequence[str]) -> dict[str, object]:
    """Returns the --kv-transfer-config of an engine's command."""
    found = json.loads(command[command.index("--kv-transfer-config") + 1])
    assert isinstance(found, dict)
    return found


@pytest.fixture
def run_dir(tmp_path: Path) -> Iterator[Path]:
    """A RUN_DIR; all that a test leaves running in it is ended."""
    folder = tmp_path / "run"
    yield folder
    script("cleanup.sh", f"RUN_DIR={folder}", "STOP_GRACE=1")


@pytest.fixture
def stand_in(tmp_path: Path) -> Path:
    """The stand-in for the command kvturn."""
    file = tmp_path / "kvturn"
    file.write_text(textwrap.dedent(STAND_IN).lstrip().replace("PYTHON", sys.executable))
    file.chmod(0o755)
    (tmp_path / "www").mkdir()
    (tmp_path / "www" / "health").touch()
    return file


def lease_words(run_dir: Path, kvturn: Path, port: int) -> tuple[str, ...]:
    return ("ROLE=lease", *LOCAL, f"LEASE_PORT={port}", f"KVTURN={kvturn}", f"RUN_DIR={run_dir}")


def writers_to(log: Path) -> set[int]:
    """Returns the pids whose standard output is a file."""
    found = set()
    for end in Path("/proc").glob("[0-9]*/fd/1"):
        try:
            if end.resolve() == log:
                found.add(int(end.parts[2]))
        except OSError:
            continue
    return found


# --- What would be run ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCRIPTS)
def test_help_names_every_option_and_variable(name: str) -> None:
    """Variables stand in the help with what they mean; options that are parsed are told of."""
    done = script(name, "--help")
    assert done.returncode == 0
    options = re.findall(
        r"^ +(--[a-z-]+)\)| (--[a-z-]+) \|", (FOLDER / name).read_text(), re.MULTILINE
    )
    assert options
    for option in {one or other for one, other in options} - {"--help"}:
        assert option in done.stdout
    for variable in re.findall(r"\b([A-Z][A-Z_]+)=", done.stdout):
        assert re.search(rf"^  {variable} +\S", done.stdout, re.MULTILINE), variable


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_an_engine_is_started_for_its_node_with_a_connector_that_accepts_its_settings(
    role: str,
) -> None:
    """Addresses follow from the role; the connector's own check passes."""
    command = dry(f"ROLE={role}", *ENGINE)
    own = {"prefill": "10.0.0.5", "decode": "10.0.0.6"}[role]
    port = {"prefill": "8100", "decode": "8200"}[role]
    assert command[command.index("--host") + 1] == own
    assert f"VLLM_NIXL_SIDE_CHANNEL_HOST={own}" in command
    connector = connector_of(command)
    assert connector["kv_role"] == {"prefill": "kv_producer", "decode": "kv_consumer"}[role]
    assert connector["kv_load_failure_policy"] == "recompute"
    extra = connector["kv_connector_extra_config"]
    assert isinstance(extra, dict)
    config = ConnectorConfig.from_extra(extra)
    assert config.active
    assert config.http_address == f"http://{own}:{port}"
    assert extra["kvturn_lease_endpoint"] == "10.0.0.5:7600"
    assert "--enable-prompt-tokens-details" in command


def test_without_bidir_the_connector_is_as_stock() -> None:
    """No key of ours, nothing that reads back."""
    extra = connector_of(dry("ROLE=prefill", "BIDIR=off", *ENGINE))["kv_connector_extra_config"]
    assert extra == {"backends": ["UCX"]}


def test_the_backend_says_how_kv_travels() -> None:
    """LIBFABRIC is held to one provider, so that it cannot go by TCP; UCX gets its variables."""
    libfabric = dry("ROLE=decode", "BACKEND=LIBFABRIC", *ENGINE)
    extra = connector_of(libfabric)["kv_connector_extra_config"]
    assert isinstance(extra, dict)
    assert extra["backends"] == ["LIBFABRIC"]
    assert "FI_PROVIDER=efa" in libfabric
    ucx = dry("ROLE=decode", "UCX_TLS=rc,cuda_copy", "UCX_NET_DEVICES=mlx5_0:1", *ENGINE)
    assert {"UCX_TLS=rc,cuda_copy", "UCX_NET_DEVICES=mlx5_0:1"} <= set(ucx)
    assert not any(word.startswith("FI_") for word in ucx)


def test_more_settings_reach_vllm_and_the_connector() -> None:
    """GPUs, tensor parallelism, extra arguments and keys."""
    command = dry(
        *(
            "ROLE=decode",
            "TP=2",
            "GPUS=4,5",
            "VLLM_ARGS=--seed 7\n--max-num-seqs 8",
            "PREFIX_CACHING=off",
        ),
        *('EXTRA_CONFIG={"decoder_kv_blocks_ttl": 60}', *ENGINE),
    )
    assert "CUDA_VISIBLE_DEVICES=4,5" in command
    assert command[command.index("--tensor-parallel-size") + 1] == "2"
    assert command[-4:] == ["--seed", "7", "--max-num-seqs", "8"]
    assert "--no-enable-prefix-caching" in command
    extra = connector_of(command)["kv_connector_extra_config"]
    assert isinstance(extra, dict)
    assert ConnectorConfig.from_extra(extra).max_hold_ns == 60 * 10**9


def test_a_key_of_ones_own_stands_once_in_the_place_of_the_scripts() -> None:
    """Of lease services there may be several, though LEASE_IP is one."""
    both = "10.0.0.5:7600,10.0.0.6:7600"
    more = f'EXTRA_CONFIG={{"kvturn_lease_endpoint": "{both}"}}'
    command = dry("ROLE=prefill", *ENGINE, more)
    text = command[command.index("--kv-transfer-config") + 1]
    assert text.count("kvturn_lease_endpoint") == 1
    assert text.count(both) == 1


def test_the_router_accepts_its_command() -> None:
    """Also with IPv6 addresses, which stand in brackets in URLs."""
    command = dry("ROLE=router", "P_IP=fd00::5", "D_IP=fd00::6")
    config = parse_config(command[command.index("router") + 1 :], {})
    assert [engine.url for engine in config.prefills] == ["http://[fd00::5]:8100"]
    assert [engine.url for engine in config.decodes] == ["http://[fd00::6]:8200"]


def test_what_is_started_does_not_go_through_a_proxy() -> None:
    """What the environment says about proxies stays, the nodes are added to its exceptions."""
    done = script("start.sh", "--dry-run", "ROLE=prefill", *ENGINE, env={"no_proxy": "example.com"})
    assert "no_proxy=example.com,10.0.0.5,10.0.0.6,10.0.0.5 " in done.stdout


def test_a_file_holds_the_variables_of_all_scripts(tmp_path: Path) -> None:
    """The example is read by each script; words on the command line win; quotes are taken off."""
    example = str(FOLDER / "node.env")
    decode = dry("--file", example, "ROLE=decode", "D_IP=10.0.0.7")
    assert decode[decode.index("--host") + 1] == "10.0.0.7"
    sweep = dry("--file", example, name="sweep.sh")
    assert sweep[sweep.index("--url") + 1] == "http://10.0.0.5:8000"
    own = tmp_path / "own.env"
    own.write_text('# mine\nMODEL="/models/a"\nCONTEXTS=100\nHF_TOKEN=x\n')
    command = dry("--file", str(own), "ROLE=prefill", *PAIR)
    assert command[command.index("--model") + 1] == "/models/a"


# --- What is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ((), "ROLE is not set (what to start"),
        (("ROLE=prefil",), "ROLE=prefil: must be prefill, decode, lease or router"),
        (
            ("ROLE=prefill", "D_IP=10.0.0.6"),
            "P_IP is not set (address of the prefill node): give it, e.g. P_IP=10.0.0.5",
        ),
        (("ROLE=prefill", *PAIR), "MODEL is not set"),
        (("ROLE=prefill", *ENGINE, "P_PORT=0"), "P_PORT=0: must be a port, 1 to 65535"),
        (("ROLE=prefill", *ENGINE, "P_PORT=70000"), "P_PORT=70000: must be a port"),
        (("ROLE=prefill", *ENGINE, "BIDIR=yes"), "BIDIR=yes: must be on or off"),
        (("ROLE=prefill", *ENGINE, "TP=two"), "TP=two: must be a number from 1"),
        (("ROLE=prefill", *ENGINE, "P_IP=10.0.0.5:80/x"), "P_IP=10.0.0.5:80/x: must be an address"),
        (("ROLE=prefill", *ENGINE, "GPUS=a"), "GPUS=a: must be GPU numbers"),
        (("ROLE=prefill", *ENGINE, "MODLE=x"), "there is no variable MODLE"),
        (("ROLE=prefill", *ENGINE, "EXTRA_CONFIG={a}"), "EXTRA_CONFIG={a}: not a JSON object"),
        (("ROLE=prefill", *ENGINE, "EXTRA_CONFIG=[]"), "EXTRA_CONFIG=[]: must be a JSON object"),
        (("ROLE=prefill", *ENGINE, "SIDE_PORT=8100"), "SIDE_PORT=8100: P_PORT has the same port"),
        (
            ("ROLE=router", *PAIR, "LEASE_PORT=8000"),
            "LEASE_PORT=8000: ROUTER_PORT has the same port on 10.0.0.5; change one of them",
        ),
        (("ROLE=router", *PAIR, "GRPC_PORT=8000"), "GRPC_PORT=8000: ROUTER_PORT has the same"),
        (("ROLE=router", *LOCAL, "D_PORT=8100"), "D_PORT=8100: P_PORT has the same"),
        (("ROLE=prefill", *ENGINE, "LEASE_PORT=5600"), "LEASE_PORT=5600: SIDE_PORT has the same"),
        (
            ("ROLE=prefill", *ENGINE, 'EXTRA_CONFIG={"backends": ["LIBFABRIC"]}'),
            ": backends is what BACKEND says; take it out and set BACKEND",
        ),
        (
            ("ROLE=prefill", *ENGINE, 'EXTRA_CONFIG={"bidirectional_kv_xfer": false}'),
            ": bidirectional_kv_xfer is what BIDIR says",
        ),
        (
            ("ROLE=prefill", *ENGINE, "BIDIR=off", 'EXTRA_CONFIG={"kvturn_engine_name": "a"}'),
            ": kvturn_engine_name is what NAME says",
        ),
        (
            ("ROLE=prefill", *ENGINE, 'EXTRA_CONFIG={"a": 1, "a": 2}'),
            ": a stands in it twice; take one out",
        ),
        (
            ("ROLE=prefill", *ENGINE, 'EXTRA_CONFIG={"a": {}}, "kv_role": {"a": 1}'),
            ": not a JSON object",
        ),
        (
            ("ROLE=decode", *ENGINE, "VLLM_ARGS=--port=9000"),
            "VLLM_ARGS: --port is what D_PORT says; take it out and set D_PORT",
        ),
        (("ROLE=decode", *ENGINE, "VLLM_ARGS=--max_model_len 9"), "--max_model_len is what MAX_M"),
        (("ROLE=lease", *PAIR, "LEASE_ARGS=--port 1"), "LEASE_ARGS: --port is what LEASE_PORT"),
        (("ROLE=router", *PAIR, "ROUTER_ARGS=--grpc-port 1"), "--grpc-port is what GRPC_PORT"),
        (("ROLE=prefill", *ENGINE, "D_IP=127.0.0.1"), "reached on its own machine only"),
        (("ROLE=prefill", *ENGINE, "DEVICE=cpu", "BACKEND=LIBFABRIC"), "set BACKEND=UCX"),
        (("ROLE=prefill", *ENGINE, "RUN_DIR=here"), "RUN_DIR=here: must be an absolute path"),
        (("ROLE=prefill", *ENGINE, "P_IP=0.0.0.0"), "P_IP=0.0.0.0: nobody can reach that; give"),
        (("ROLE=decode", *ENGINE, "D_IP=::"), "D_IP=::: nobody can reach that; give an address"),
        (("ROLE=router", *PAIR, "LEASE_IP=0.0.0.0"), "LEASE_IP=0.0.0.0: nobody can reach that"),
        (("ROLE=prefill", *ENGINE, "P_IP=10.0.0.300"), "P_IP=10.0.0.300: is no IPv4 address; it"),
        (("ROLE=lease", *PAIR, "LEASE_IP=10.0.5"), "LEASE_IP=10.0.5: is no IPv4 address; it has"),
        (
            ("ROLE=decode", *ENGINE, "VLLM_ARGS=--chat-template '/a b'"),
            "VLLM_ARGS: '/a begins with",
        ),
        (("--foreground", "ROLE=lease", *PAIR), "--dry-run and --foreground: give one"),
        (("--fast",), "--fast: there is no such option"),
        (("--file",), "--file : cannot be read"),
        (("prefill",), "prefill: neither an option nor VARIABLE=VALUE"),
    ],
)
def test_a_wrong_word_is_named_with_its_fix(words: Sequence[str], told: str) -> None:
    """One line, status 2."""
    done = script("start.sh", "--dry-run", *words)
    assert done.returncode == 2
    assert not done.stdout
    assert [line for line in done.stderr.splitlines() if told in line], done.stderr


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ((), "ROUTER_URL is not set"),
        (("CONTEXTS=1,x",), "CONTEXTS=1,x: must be numbers with commas"),
        (("ARMS=both",), "ARMS=both: must be on, off or on,off"),
        (("P_IP=10.0.0.5", "DRIVER=vllm"), "MODEL is not set"),
        (
            ("P_IP=10.0.0.5", "DRIVER=vllm", "MODEL=/m", "API_KEY_FILE=/etc/key"),
            "API_KEY_FILE=/etc/key: vLLM's benchmark takes keys on its command line only",
        ),
        (("ROUTER_URL=10.0.0.5:8000",), "ROUTER_URL=10.0.0.5:8000: must be an http://"),
        (("--report",), "--report: give the folders"),
        (("--report", "--dry-run"), "--report: --dry-run is no folder; give folders of results"),
    ],
)
def test_a_wrong_word_for_a_sweep_is_named(words: Sequence[str], told: str) -> None:
    """As of start.sh."""
    done = script("sweep.sh", *words)
    assert done.returncode == 2
    assert told in done.stderr


def test_a_misspelt_line_of_a_file_is_named(tmp_path: Path) -> None:
    """By its number."""
    file = tmp_path / "node.env"
    file.write_text("P_IP=10.0.0.5\nD-IP=10.0.0.6\nMODLE=x\n")
    done = script("start.sh", "--file", str(file), "ROLE=lease", "D_IP=10.0.0.6")
    assert done.returncode == 2
    assert f"--file {file}: line 2 is not NAME=VALUE" in done.stderr
    assert f"--file {file}: line 3: there is no variable MODLE" in done.stderr


def test_what_the_machine_lacks_is_told_all_at_once(tmp_path: Path) -> None:
    """Address, GPU, vLLM, NIXL, connector, model and EFA, each in one line; nothing is started."""
    bare = tmp_path / "python3"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", bare], check=True)
    done = script(
        *("start.sh", "--check", "ROLE=prefill", "P_IP=192.0.2.1", "D_IP=192.0.2.2"),
        *("BACKEND=LIBFABRIC", f"VLLM_PYTHON={bare}/bin/python", f"MODEL={tmp_path}"),
        *("LEASE_IP=127.0.0.1", f"LEASE_PORT={pick_free(set())}", f"RUN_DIR={tmp_path}/run"),
        env={"PATH": "/usr/bin:/bin"},
    )
    assert done.returncode == 2
    for told in (
        "192.0.2.1 is not an address of this machine",
        "DEVICE=gpu: there is no nvidia-smi",
        "has no vLLM; pip install",
        f"has no kvturn connector; {bare}/bin/python -m pip install",
        "cannot import NIXL (ModuleNotFoundError",
        f"MODEL={tmp_path}: there is no config.json in it",
        "BACKEND=LIBFABRIC: there is no fi_info here",
        "warning: nobody listens on 127.0.0.1:",
    ):
        assert done.stderr.count(told) == 1, done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("version", "providers", "told"),
    [
        ("2.4.0", "tcp", "fi_info -p efa finds nothing, NIXL would go by TCP"),
        ("1.17.0", "efa tcp", "libfabric 1.17.0 is older than 1.21"),
        ("2.4.0", "efa", None),
    ],
)
def test_a_libfabric_without_efa_is_found_before_nixl_goes_by_tcp(
    tmp_path: Path, version: str, providers: str, told: str | None
) -> None:
    """An fi_info that answers as the real one does."""
    info = tmp_path / "fi_info"
    info.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && {{ echo "fi_info: {version}"; '
        f'echo "libfabric: {version}"; exit; }}\n'
        f'for one in {providers}; do [ "$2" = "$one" ] && exit 0; done; exit 61\n'
    )
    info.chmod(0o755)
    done = script(
        *("start.sh", "--check", "ROLE=prefill", *LOCAL, "BACKEND=LIBFABRIC", "MODEL=/models/a"),
        f"VLLM_PYTHON={sys.executable}",
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
    )
    found = [line for line in done.stderr.splitlines() if "BACKEND=LIBFABRIC" in line]
    assert len(found) == (0 if told is None else 1), found
    assert told is None or told in found[0]


@pytest.mark.parametrize("taken", ["nixl_cu12", "nixl_cu13"])
def test_the_plugin_that_nixl_takes_is_looked_at_and_no_other(tmp_path: Path, taken: str) -> None:
    """NIXL for two versions of CUDA, of which one needs what is not there.

    What CUDA's own packages bring is on no loader's path, and is not missing.
    """
    lacking = {
        "nixl_cu12": "libfabric.so.1 libhwloc.so.15 libcudart.so.12",
        "nixl_cu13": "libcudart.so.13 libcuda.so.1 libserdes.so",
    }
    for package, libraries in lacking.items():
        plugin = tmp_path / f"{package}.libs" / "nixl" / "libplugin_LIBFABRIC.so"
        plugin.parent.mkdir(parents=True)
        plugin.write_text("".join(f"\t{name} => not found\n" for name in libraries.split()))
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").touch()
    (tmp_path / "nixl").mkdir()
    (tmp_path / "nixl" / "__init__.py").write_text(f"import {taken} as _pkg\n")
    for name, text in {"fi_info": "exit 0", "ldd": 'exec cat "$1"'}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    done = script(
        *("start.sh", "--check", "ROLE=prefill", *LOCAL, "BACKEND=LIBFABRIC", "MODEL=/models/a"),
        f"VLLM_PYTHON={sys.executable}",
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", "PYTHONPATH": str(tmp_path)},
    )
    found = [line for line in done.stderr.splitlines() if "BACKEND=LIBFABRIC" in line]
    if taken == "nixl_cu13":
        assert not found
    else:
        (line,) = found
        assert "plugin does not find libfabric.so.1 libhwloc.so.15; install them" in line


@pytest.mark.parametrize("version", ["0.29.0", "0.32.0"])
def test_the_guide_quotes_what_engines_log(version: str) -> None:
    """Lines of an engine's log are ones of vLLM's NIXL connector or of NIXL's plugin."""
    environment = default_vllm_python(version).parent.parent
    sources = [
        file.read_bytes()
        for pattern in (
            "vllm/distributed/kv_transfer/kv_connector/v1/nixl/*.py",
            "nixl_cu*.libs/nixl/libplugin_LIBFABRIC.so",
        )
        for file in environment.glob(f"lib/python*/site-packages/{pattern}")
    ]
    if not sources:
        pytest.skip("no such vLLM here: make setup")
    rows = re.findall(
        r"^\| engine's log: (.*?) \|", (FOLDER / "README.md").read_text(), re.MULTILINE
    )
    quoted = [
        part for row in rows for text in re.findall(r"`([^`]+)`", row) for part in text.split(": ")
    ]
    assert len(quoted) >= len(rows) > 1
    for part in quoted:
        assert any(part.encode() in source for source in sources), part


# --- Processes -----------------------------------------------------------------------------------


def test_starting_twice_is_starting_once(run_dir: Path, stand_in: Path) -> None:
    """The same settings: success, the same process. Others: refused. Then all of it ends."""
    port = pick_free(set())
    words = lease_words(run_dir, stand_in, port)
    first = script("start.sh", *words)
    assert first.returncode == 0, first.stderr
    assert "lease is ready" in first.stdout
    pid = int((run_dir / "lease.pid").read_text())
    again = script("start.sh", *words)
    assert again.returncode == 0
    assert f"lease runs already (pid {pid}" in again.stdout
    other = script("start.sh", *words, "LEASE_ARGS=--idle 5")
    assert other.returncode == 2
    assert "with other settings; run cleanup.sh lease first" in other.stderr
    shown = script("cleanup.sh", "--dry-run", f"RUN_DIR={run_dir}")
    assert shown.stdout == f"lease: {pid}\n"
    ended = script("cleanup.sh", f"RUN_DIR={run_dir}")
    assert (ended.returncode, ended.stdout) == (0, f"stopping lease ({pid})\n")
    assert not writers_to(run_dir / "logs" / "lease.log")
    assert [file.name for file in run_dir.iterdir()] == ["logs"]
    nothing = script("cleanup.sh", f"RUN_DIR={run_dir}")
    assert (nothing.returncode, nothing.stdout) == (0, f"nothing runs under {run_dir}\n")


def test_cleanup_after_a_crash_ends_what_was_left_and_nobody_else(
    run_dir: Path, stand_in: Path
) -> None:
    """The process is killed, its child in another session ignores SIGTERM; a stranger runs on.

    The pid file is made to name the stranger, as after a restart of the machine.
    """
    words = lease_words(run_dir, stand_in, pick_free(set()))
    done = script("start.sh", *words, env={"STAND_IN": "stubborn"})
    assert done.returncode == 0, done.stderr
    log = run_dir / "logs" / "lease.log"
    scratch = Path((run_dir / "lease.scratch").read_text().strip())
    assert scratch.is_dir()
    pids = writers_to(log)
    assert len(pids) == 2
    leader = int((run_dir / "lease.pid").read_text())
    os.kill(leader, signal.SIGKILL)
    while Path(f"/proc/{leader}/fd/1").exists():
        time.sleep(0.01)
    refused = script("start.sh", *words)
    assert refused.returncode == 2
    assert f"processes of an earlier start are left ({min(pids - {leader})})" in refused.stderr
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as stranger:
        (run_dir / "lease.pid").write_text(f"{stranger.pid}\n")
        ended = script("cleanup.sh", f"RUN_DIR={run_dir}", "STOP_GRACE=1")
        assert ended.returncode == 0, ended.stderr
        assert not writers_to(log)
        assert not scratch.exists()
        assert stranger.poll() is None
        stranger.kill()


def test_what_does_not_start_is_shown_with_the_end_of_its_log(
    run_dir: Path, stand_in: Path
) -> None:
    """It ends, or it is not ready in time: either way nothing is left."""
    words = lease_words(run_dir, stand_in, pick_free(set()))
    done = script("start.sh", *words, env={"STAND_IN": "refuses"})
    assert done.returncode == 1
    assert "lease ended before it was ready" in done.stderr
    assert "  | stand-in: --host: I do not like it" in done.stderr
    slow = script("start.sh", *words, "READY_TIMEOUT=3", env={"STAND_IN": "slow"})
    assert slow.returncode == 1
    assert "lease was not ready within READY_TIMEOUT=3 seconds" in slow.stderr
    assert "  | loading" in slow.stderr
    assert not writers_to(run_dir / "logs" / "lease.log")


def test_interrupting_a_start_ends_what_it_started(run_dir: Path, stand_in: Path) -> None:
    """SIGTERM while it waits."""
    words = lease_words(run_dir, stand_in, pick_free(set()))
    env = {"PATH": os.environ["PATH"], "STAND_IN": "slow"}
    log = run_dir / "logs" / "lease.log"
    with subprocess.Popen([FOLDER / "start.sh", *words], env=env, stdout=-3) as start:
        until = time.monotonic() + GUARD_S
        while not (log.is_file() and log.read_text()):
            assert time.monotonic() < until
            time.sleep(0.02)
        start.terminate()
        assert start.wait(GUARD_S) == 130
    assert not writers_to(log)


def test_a_port_in_use_is_named(run_dir: Path, stand_in: Path) -> None:
    """Before anything is started."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = script("start.sh", *lease_words(run_dir, stand_in, port))
    assert done.returncode == 2
    assert f"LEASE_PORT={port}: the port cannot be used on 127.0.0.1" in done.stderr
    assert not list((run_dir / "logs").iterdir())


def test_the_real_services_start_and_end(run_dir: Path) -> None:
    """Lease service and router, as they are, on loopback."""
    taken: set[int] = set()
    lease, router, grpc = (pick_free(taken) for _ in range(3))
    words = (*LOCAL, f"LEASE_PORT={lease}", f"ROUTER_PORT={router}", f"GRPC_PORT={grpc}")
    kvturn = f"KVTURN={Path(sys.executable).parent / 'kvturn'}"
    for role in ("lease", "router"):
        done = script("start.sh", f"ROLE={role}", *words, kvturn, f"RUN_DIR={run_dir}")
        assert done.returncode == 0, done.stderr
    unknown = script("cleanup.sh", f"RUN_DIR={run_dir}", "prefill-0")
    assert unknown.returncode == 2
    assert "prefill-0: nothing of that name was started" in unknown.stderr
    ended = script("cleanup.sh", f"RUN_DIR={run_dir}", "--purge")
    assert re.findall(r"stopping (\w+)", ended.stdout) == ["router", "lease"]
    assert not list((run_dir / "logs").iterdir())


def test_in_the_foreground_it_is_the_process_itself(run_dir: Path, stand_in: Path) -> None:
    """As systemd runs it: the pid is the service's; --wait ends when it is ready, or has ended."""
    words = lease_words(run_dir, stand_in, pick_free(set()))
    env = {"PATH": os.environ["PATH"]}
    command = [FOLDER / "start.sh", "--foreground", *words]
    with subprocess.Popen(command, env=env, stdout=-3, stderr=-3) as service:
        ready = script("start.sh", "--wait", *words, env={"MAINPID": str(service.pid)})
        assert ready.returncode == 0, ready.stderr
        assert b"http.server" in Path(f"/proc/{service.pid}/cmdline").read_bytes()
        service.kill()
        service.wait()
        gone = script("start.sh", "--wait", *words, env={"MAINPID": str(service.pid)})
    assert gone.returncode == 1
    assert "lease ended before it was ready" in gone.stderr
    assert not run_dir.exists()


# --- Units ---------------------------------------------------------------------------------------


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd-analyze")
def test_systemd_accepts_the_units(tmp_path: Path) -> None:
    """With the checkout in the place of /opt/kvturn; instances of the template, too."""
    files = []
    for unit in UNITS:
        file = tmp_path / unit.name.replace("@.", "@prefill.")
        file.write_text(unit.read_text().replace("/opt/kvturn", str(ROOT)))
        files.append(file)
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *files], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_units_are_tried_until_an_address_is_there_and_not_for_ever(unit: Path) -> None:
    """At a boot each try fails within seconds, and the next comes when RestartSec is over."""
    set_to = dict(re.findall(r"^(\w+)=(\d+)$", unit.read_text(), re.MULTILINE))
    tries, pause_s = int(set_to["StartLimitBurst"]), int(set_to["RestartSec"])
    tried_s = (tries - 1) * pause_s
    assert tried_s >= LATE_ADDRESS_S
    assert tried_s + tries * TRY_S < int(set_to["StartLimitIntervalSec"])


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_units_run_a_script_in_the_foreground_as_no_root(unit: Path) -> None:
    """And wait until it is ready; the script knows the words that they give."""
    text = unit.read_text()
    commands = re.findall(r"^ExecStart(?:Post)?=/opt/kvturn/(\S+) (.+)$", text, re.MULTILINE)
    assert [words.split()[0] for _, words in commands] == ["--foreground", "--wait"]
    assert all((ROOT / file).is_file() for file, _ in commands)
    assert "User=kvturn\n" in text
    assert "NoNewPrivileges=yes\n" in text
    role = re.search(r"ROLE=(\w+)$", commands[0][1])
    assert dry(f"ROLE={role[1] if role else 'decode'}", *ENGINE)
