"""The images of the compose stack, built as a user builds them.

Third-party images are not pulled: Debian packages in images made here stand in for etcd, HAProxy,
Prometheus, busybox and Python, kvturn's own receiver for the collector. They take the places of the
real ones only by the variables of .env. Jaeger and Grafana come in no package and are not run.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import http.server
import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from docker_engine import FOLDER, INSTALL, ROOT, DockerEngine

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

HERE = Path(__file__).parent
COMPOSE = ROOT / "deploy" / "compose"
BUILD_TIMEOUT_S = 3600
# The Python for which the CPU build of torch is at hand; and a Debian with a recent etcd.
PYTHON = ("bookworm", "python3,python3-venv,ca-certificates")
PARTS = ("trixie", "bash,busybox-static,ca-certificates,etcd-client,etcd-server,haproxy,prometheus")
MACHINE_PATHS = ("PIP_CERT", "PIP_FIND_LINKS", "PIP_CONFIG_FILE", "PIP_CACHE_DIR")


def images(engine: DockerEngine) -> dict[str, str]:
    """Makes what is not made yet and returns the image variables for compose."""
    python = _debian(engine, *PYTHON)
    parts = _debian(engine, *PARTS)
    prometheus = "kvturn-test/prometheus:1"
    _plain(engine, "prometheus", prometheus, f"PARTS_IMAGE={parts}")
    names = {
        "PYTHON_IMAGE": python,
        "ETCD_IMAGE": parts,
        "HAPROXY_IMAGE": parts,
        "BUSYBOX_IMAGE": parts,
        "PROMETHEUS_IMAGE": prometheus,
        "KVTURN_IMAGE": "kvturn-test/kvturn:1",
        "ENGINE_CPU_IMAGE": "kvturn-test/engine-cpu:1",
        "OTEL_COLLECTOR_IMAGE": "kvturn-test/receiver:1",
        "COLLECTOR_IMAGE": "kvturn-test/otel-collector:1",
    }
    with _index(engine, python) as index:
        variables = {**engine.environment, **names, **index, "DOCKER": engine.client}
        _build(variables, "kvturn", "engine-cpu")
        receiver = names["OTEL_COLLECTOR_IMAGE"]
        _plain(engine, "receiver", receiver, f"KVTURN_IMAGE={names['KVTURN_IMAGE']}")
        _build(variables, "otel-collector")
        # vLLM's own image is not at hand: its place takes the other engine's, which has vLLM too.
        variables["VLLM_IMAGE"] = names["ENGINE_CPU_IMAGE"]
        variables["ENGINE_GPU_IMAGE"] = "kvturn-test/engine-gpu:1"
        _build(variables, "engine-gpu")
    engine.run("image", "prune", "--force")
    _say("all images are there\n")
    return names


def _say(text: str) -> None:
    """Prints a line of progress at once, with the time of day."""
    print(f"\n{time.strftime('%H:%M:%S')} {text}", end="", flush=True)


def _build(variables: dict[str, str], *names: str) -> None:
    for name in names:
        log = FOLDER / f"build-{name}.log"
        _say(f"image {name}: building; see {log}")
        FOLDER.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as out:
            done = subprocess.run(
                [COMPOSE / "build.sh", name],
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                timeout=BUILD_TIMEOUT_S,
            )
        assert done.returncode == 0, f"{log}: {log.read_text(errors='replace')[-4000:]}"


def _plain(engine: DockerEngine, name: str, tag: str, base: str) -> None:
    """Builds an image of a Dockerfile of this folder that copies nothing; base: ARGUMENT=IMAGE."""
    with (HERE / "images" / f"{name}.Dockerfile").open("rb") as file:
        engine.run("build", "--quiet", "--tag", tag, "--build-arg", base, "-", given=file)


def _debian(engine: DockerEngine, suite: str, packages: str) -> str:
    """Makes an image of a Debian with some packages; it stays for later runs."""
    tag = f"kvturn-test/{suite}:{hashlib.sha256(packages.encode()).hexdigest()[:12]}"
    if engine.has_image(tag):
        return tag
    debootstrap = shutil.which("debootstrap", path=f"{os.environ['PATH']}:/usr/sbin")
    assert debootstrap is not None, f"there is no debootstrap: {INSTALL}"
    FOLDER.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=FOLDER) as folder:
        # It mounts /proc in there; in a namespace of its own nothing stays mounted.
        alone = ["unshare", "--mount", debootstrap]
        command = [*alone, "--variant=minbase", f"--include={packages}", suite, folder]
        log = FOLDER / f"debootstrap-{suite}.log"
        _say(f"image of Debian {suite}: making; see {log}")
        with log.open("wb") as out:
            status = subprocess.run(command, stdout=out, stderr=out).returncode
        assert status == 0, f"debootstrap of {suite} failed; see {log}"
        tar = ["tar", "-C", folder, "--exclude=./var/cache/apt/archives", "-c", "."]
        with subprocess.Popen(tar, stdout=subprocess.PIPE) as packed:
            engine.run("import", "-", tag, given=packed.stdout)
    return tag


@contextlib.contextmanager
def _index(engine: DockerEngine, image: str) -> Iterator[dict[str, str]]:
    """Yields variables for build.sh that say how this machine reaches package indexes.

    A folder of wheels of this machine is served to the build while it runs.
    """
    setup = _setup()
    lines = {name: text for name, text in setup.uv_environment().items() if name.startswith("UV_")}
    lines |= {name: text for name, text in os.environ.items() if name.startswith("PIP_")}
    for name in (*MACHINE_PATHS, "UV_CACHE_DIR", "UV_CONFIG_FILE", "UV_PYTHON_DOWNLOADS"):
        lines.pop(name, None)
    given = {}
    authorities = os.environ.get("SSL_CERT_FILE") or os.environ.get("PIP_CERT")
    if authorities:
        given["CA_FILE"] = authorities
    options = setup.torch_source()
    with contextlib.ExitStack() as stack:
        if options[0] == "--find-links":
            lines["UV_FIND_LINKS"] = stack.enter_context(
                _served(_host_address(engine, image), Path(options[1]))
            )
            lines["UV_INDEX_STRATEGY"] = options[3]
            given["TORCH_BACKEND"] = ""
        file = stack.enter_context(tempfile.NamedTemporaryFile("w", suffix=".env"))
        file.writelines(f"{name}='{text}'\n" for name, text in sorted(lines.items()))
        file.flush()
        yield {**given, "INDEX_ENV": file.name}


@contextlib.contextmanager
def _served(address: str, folder: Path) -> Iterator[str]:
    """Serves a folder at an address of this machine and yields its URL."""
    handler = functools.partial(_QuietHandler, directory=str(folder))
    with http.server.ThreadingHTTPServer((address, 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://{address}:{server.server_port}/"
        server.shutdown()


def _host_address(engine: DockerEngine, image: str) -> str:
    """Returns the address at which containers reach this machine: their default route's."""
    routes = engine.run("run", "--rm", image, "cat", "/proc/net/route").splitlines()[1:]
    gateway = next(fields[2] for fields in map(str.split, routes) if fields[1] == "00000000")
    return socket.inet_ntoa(int(gateway, 16).to_bytes(4, "little"))


class _QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_request(self, code: object = "-", size: object = "-") -> None:
        """Says nothing of requests."""


def _setup() -> ModuleType:
    """Returns scripts/setup.py, which knows this machine's indexes, as a module."""
    spec = importlib.util.spec_from_file_location("kvturn_setup", ROOT / "scripts" / "setup.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
