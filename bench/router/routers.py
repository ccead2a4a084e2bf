"""The routers that are measured, and how each is started.

The peers are what `pip install` gives, with the flags that their documentation
tells for two-step prefill and decode. vLLM's example proxy is part of vLLM's
source distribution and not of this repository: `--example-proxy` says where it
lies.
"""

from __future__ import annotations

import contextlib
import json
import re
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bench.router.machine import OTHER_CPU, ROUTER_CPU, Program
from bench.router.rig import BUILD, ask, until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from bench.router.rig import Nodes

ENVS = Path(__file__).parent.parent.parent / ".envs"

Starts = "Callable[[int, Nodes], list[str]]"


@dataclass(frozen=True, slots=True)
class Router:
    """One router under measurement, or, without `command`, none.

    `command` gives its arguments, for its own port and the engines. `workers`
    are told to it through POST /workers once it listens. `needs` is what must
    be there for it, `traced` says that it works with a lease service and traces
    every turn. `pairs` are engines of each role, `known` conversations that it
    has served before it is measured.
    """

    name: str
    about: str
    command: Callable[[int, Nodes], list[str]] | None
    needs: Path | None = None
    workers: bool = False
    traced: bool = False
    pairs: int = 1
    known: int = 0

    @property
    def missing(self) -> str:
        """Returns why it cannot be measured here, "" if it can."""
        if self.needs is None or self.needs.exists():
            return ""
        return f"{self.needs} is not there"


@contextlib.contextmanager
def running(router: Router, nodes: Nodes) -> Iterator[tuple[Program | None, Sequence[str]]]:
    """Runs a router, ready to serve; yields it and what the client must be told to reach it."""
    if router.command is None:
        yield None, ["--prefill", str(nodes.prefills[0]), "--decode", str(nodes.decodes[0])]
        return
    port = _free_port()
    with contextlib.ExitStack() as stack:
        args = router.command(port, nodes)
        if router.traced:
            args += [f"--lease=127.0.0.1:{stack.enter_context(_lease_service())}"]
            args += [f"--otlp-endpoint=http://127.0.0.1:{stack.enter_context(_collector())}"]
        log = BUILD / f"{router.name.replace(' ', '-').replace(',', '')}.log"
        program = stack.enter_context(Program(args, ROUTER_CPU, log))
        if router.workers:
            _tell_workers(program, port, nodes)
        until(lambda: _answers(port), program, router.name)
        yield program, ["--to", str(port)]


def spans_exported() -> int:
    """Returns how many spans the collector has got so far."""
    told = re.findall(r"^(\d+) spans$", _COLLECTOR_LOG.read_text(), re.MULTILINE)
    return int(told[-1]) if told else 0


_COLLECTOR_LOG = BUILD / "collector.log"


@contextlib.contextmanager
def _lease_service() -> Iterator[int]:
    args = [sys.executable, "-m", "kvturn_lease", "--port=0"]
    with _listening(args, BUILD / "lease.log", "the lease service") as port:
        yield port


@contextlib.contextmanager
def _collector() -> Iterator[int]:
    args = [sys.executable, "-m", "bench.router.collector", "0"]
    with _listening(args, _COLLECTOR_LOG, "the collector") as port:
        yield port


@contextlib.contextmanager
def _listening(args: list[str], log: Path, what: str) -> Iterator[int]:
    with Program(args, OTHER_CPU, log) as program:
        found: list[str] = []

        def listening() -> bool:
            found[:] = re.findall(r"listening on 127\.0\.0\.1:(\d+)", log.read_text())
            return bool(found)

        until(listening, program, what)
        yield int(found[0])


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _answers(port: int) -> bool:
    content = "[c=00000000c0de n=00000000abcd] hi"
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": content}],
        "max_tokens": 2,
        "stream": True,
    }
    status, answer = ask(port, "/v1/chat/completions", json.dumps(body).encode())
    return status == 200 and b"[DONE]" in answer


def _tell_workers(program: Program, port: int, nodes: Nodes) -> None:
    for role, engine in (("prefill", nodes.prefills[0]), ("decode", nodes.decodes[0])):
        worker = {
            "url": f"http://127.0.0.1:{engine}",
            "worker_type": role,
            "runtime_type": "vllm",
            "kv_connector": "NixlConnector",
            "kv_role": "kv_both",
            "model_id": "m",
        }
        body = json.dumps(worker).encode()
        until(lambda body=body: ask(port, "/workers", body)[0] < 300, program, "SMG")  # type: ignore[misc]


def _kvturn(port: int, nodes: Nodes) -> list[str]:
    engines = [f"--prefill=http://127.0.0.1:{engine}" for engine in nodes.prefills]
    engines += [f"--decode=http://127.0.0.1:{engine}" for engine in nodes.decodes]
    return [sys.executable, "-m", "kvturn_router", f"--port={port}", "--no-grpc", *engines]


def _relay(port: int, nodes: Nodes) -> list[str]:
    ports = (port, nodes.prefills[0], nodes.decodes[0])
    return [sys.executable, "-m", "bench.router.relay", *map(str, ports)]


def _vllm_router(port: int, nodes: Nodes) -> list[str]:
    return [
        str(ENVS / "vllm-router" / "bin" / "vllm-router"),
        *("--vllm-pd-disaggregation", "--kv-connector", "nixl", "--policy", "round_robin"),
        *("--prefill", f"http://127.0.0.1:{nodes.prefills[0]}"),
        *("--decode", f"http://127.0.0.1:{nodes.decodes[0]}"),
        *("--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(_free_port())),
        *("--worker-startup-check-interval", "1"),
    ]


def _smg(port: int, nodes: Nodes) -> list[str]:
    del nodes
    return [
        str(ENVS / "smg" / "bin" / "smg"),
        *("launch", "--pd-disaggregation", "--policy", "round_robin", "--log-level", "warn"),
        *("--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(_free_port())),
    ]


def routers(example_proxy: Path | None) -> list[Router]:
    """Returns all routers, ours first and the one that ratios refer to second."""
    source = example_proxy or Path("--example-proxy")

    def example(port: int, nodes: Nodes) -> list[str]:
        return [
            str(ENVS / "example-proxy" / "bin" / "python"),
            str(source),
            *("--host", "127.0.0.1", "--port", str(port)),
            *("--prefiller-host", "127.0.0.1", "--prefiller-port", str(nodes.prefills[0])),
            *("--decoder-host", "127.0.0.1", "--decoder-port", str(nodes.decodes[0])),
        ]

    return [
        Router("kvturn", "one prefill and one decode engine", _kvturn),
        Router(
            "vllm-router",
            "0.1.17 (Rust), two-step P/D with NIXL",
            _vllm_router,
            needs=ENVS / "vllm-router" / "bin" / "vllm-router",
        ),
        Router(
            "kvturn, leased and traced",
            "with a lease service, and every turn traced to a collector: five spans",
            _kvturn,
            traced=True,
        ),
        Router("kvturn, 200 engines", "100 of each role", _kvturn, pairs=100),
        Router(
            "kvturn, 100,000 known",
            "after 100,000 conversations of one turn each",
            _kvturn,
            known=100_000,
        ),
        Router(
            "smg",
            "1.13.0 (Rust), two-step P/D with NIXL",
            _smg,
            needs=ENVS / "smg" / "bin" / "smg",
            workers=True,
        ),
        Router(
            "example proxy",
            "vLLM 0.33's disagg_proxy_multiturn.py (FastAPI, httpx)",
            example,
            needs=source,
        ),
        Router(
            "least relay",
            "no router: what even the least one in Python must do between two engines (relay.py)",
            _relay,
        ),
        Router("none", "the client itself calls prefill, then decode", None),
    ]
