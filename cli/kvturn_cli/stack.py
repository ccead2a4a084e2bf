"""Starts and stops a whole kvturn stack on this machine: the processes, their ports, their logs.

`kvturn up`, `kvturn demo` and the real-stack tests share it:

    with Stack(StackConfig(run_dir=Path("build/run"), model=model, vllm_python=python)) as stack:
        requests.get(stack.router_url + "/v1/models")

Everything listens on 127.0.0.1. Each process runs on a leash (leash.py), so nothing outlives the
process that holds the Stack, however that ends.
"""

import contextlib
import json
import os
import shutil
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

import grpc

from kvturn.spelling import one_line
from kvturn.v1 import common_pb2, lease_pb2, lease_pb2_grpc
from kvturn_cli import etcd
from kvturn_cli.console import Progress, Silent
from kvturn_cli.engine import (
    Connector,
    EngineConfig,
    EngineSettings,
    engine_command,
    engine_environment,
    process_environment,
)
from kvturn_cli.ports import HOST, is_free, is_listening, pick_free
from kvturn_cli.process import LeashedProcess
from kvturn_lease import config as lease_config
from kvturn_router import config as router_config

POLL_S = 0.2
PROBE_TIMEOUT_S = 2.0
REGISTER_TIMEOUT_S = 30.0
MODEL_LEN_MAX = 8192
SHARED_CPU = ("--session-ttl=20",)
"""What the lease service of a stack whose engines compute on its own cores is better told: they
may keep each other waiting for longer than sessions usually last."""

# Loopback is never to be asked for through a proxy.
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class ConfigError(Exception):
    """The stack cannot be started as asked; names the flag and the fix. Nothing was started."""

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


class StackError(Exception):
    """A process of the stack ended or did not become ready; names it and its log."""


@dataclass(frozen=True)
class StackConfig:
    """What to start. Ports of 0 mean any free one."""

    run_dir: Path
    """Folder for logs and traces; made if missing."""
    model: Path
    """Model folder with a config.json."""
    vllm_python: Path
    """Interpreter of the vLLM environment."""
    engines: tuple[EngineConfig, ...] = (
        EngineConfig("prefill", "prefill-0"),
        EngineConfig("decode", "decode-0"),
    )
    """The engines, names all different."""
    served_model_name: str = ""
    """Name under which clients ask for the model; empty: the model folder's name."""
    connector: Connector = field(default_factory=Connector)
    """KV connector of every engine."""
    router: bool = True
    """Whether to start the router."""
    lease: bool = True
    """Whether to start the lease service."""
    store: str = etcd.MEMORY
    """Where the lease service keeps records: memory, etcd (starts one), or etcd://H:P,H:P."""
    traces: bool = True
    """Whether to start the OTLP receiver and let every process export to it."""
    router_port: int = 0
    """Router's HTTP port."""
    grpc_port: int = 0
    """Router's gRPC port."""
    lease_port: int = 0
    """Lease service's gRPC port."""
    otlp_port: int = 0
    """OTLP receiver's gRPC port."""
    router_args: tuple[str, ...] = ()
    """More flags for `kvturn router`."""
    lease_args: tuple[str, ...] = ()
    """More flags for `kvturn lease`."""
    trace_file: Path | None = None
    """OTLP/JSON file; None: traces.jsonl in `run_dir`."""
    kv_cache_gib: int = 1
    """KV memory of each engine, GiB."""
    max_model_len: int = 0
    """Longest prompt and answer, tokens; 0: the model's own, at most 8,192."""
    threads: int = 0
    """Computing threads of each engine; 0: the machine's cores shared out, at least 1."""
    question_deadline_ms: int = 50
    """How long router and connectors wait for the lease service before they go on without."""
    start_timeout_s: float = 600.0
    """How long the engines may take to become ready."""
    stop_grace_s: float = 10.0
    """What each process gets between SIGTERM and SIGKILL."""


@dataclass(frozen=True)
class _Waiting:
    """A started process and how to tell that it is ready."""

    process: LeashedProcess
    is_ready: Callable[[], bool]
    where: str


class Stack:
    """The processes of one stack. Use it as a context manager, or call start() and stop()."""

    def __init__(self, config: StackConfig, progress: Progress | None = None) -> None:
        """Chooses the ports; starts nothing. Raises ConfigError."""
        check(config)
        self.config = config
        self._progress = progress or Silent()
        self._processes: list[LeashedProcess] = []
        taken: set[int] = set()

        def choose(port: int) -> int:
            return port or pick_free(taken)

        self.trace_file = config.trace_file or config.run_dir / "traces.jsonl"
        self.router_port = choose(config.router_port)
        self.grpc_port = choose(config.grpc_port)
        self.lease_port = choose(config.lease_port)
        self.otlp_port = choose(config.otlp_port)
        starts_etcd = config.lease and config.store == etcd.START_ETCD
        self._etcd_ports = (choose(0), choose(0)) if starts_etcd else None
        self.router_url = f"http://{HOST}:{self.router_port}"
        self.router_grpc = f"{HOST}:{self.grpc_port}"
        self.lease_address = f"{HOST}:{self.lease_port}"
        self.otlp_endpoint = f"http://{HOST}:{self.otlp_port}" if config.traces else ""
        self.engine_ports = {engine.name: choose(engine.port) for engine in config.engines}
        self._side_channel_ports = {engine.name: choose(0) for engine in config.engines}
        self.served_model_name = config.served_model_name or config.model.resolve().name
        self._check_services()

    # --- What runs -------------------------------------------------------------------------------

    def engine_urls(self, role: str) -> list[str]:
        """Returns the base URLs of the engines of one role, in order of configuration."""
        return [
            f"http://{HOST}:{self.engine_ports[engine.name]}"
            for engine in self.config.engines
            if engine.role == role
        ]

    @property
    def prefill_url(self) -> str:
        """Base URL of the first prefill engine."""
        return self.engine_urls("prefill")[0]

    @property
    def decode_url(self) -> str:
        """Base URL of the first decode engine."""
        return self.engine_urls("decode")[0]

    @property
    def logs(self) -> dict[str, Path]:
        """Log file of each process, by the process's name."""
        return {process.name: process.log for process in self._processes}

    @property
    def processes(self) -> Sequence[LeashedProcess]:
        """The processes, in order of start."""
        return tuple(self._processes)

    def check_alive(self) -> None:
        """Raises StackError if a process has ended."""
        for process in self._processes:
            ending = process.ending()
            if ending:
                raise StackError(
                    f"{process.name} {ending}: {process.last_line()[:300]} (log: {process.log})"
                )

    # --- Start and stop --------------------------------------------------------------------------

    def start(self) -> None:
        """Starts everything and returns when it is ready. Stops all of it when that fails.

        Raises StackError.
        """
        try:
            services = self._start_services()
            engines = [self._start_engine(engine) for engine in self.config.engines]
            self._wait_ready([*services, *engines], self.config.start_timeout_s)
            if self.config.lease and self.config.connector.module:
                self._wait_registered()
            if self.config.router:
                self._wait_ready([self._start_router()], REGISTER_TIMEOUT_S)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Stops everything, within seconds.

        Last the OTLP receiver, to get the last spans, and etcd, for the leader to resign.
        """
        last = [process for process in self._processes if process.name in ("otlp", "etcd")]
        rest = [process for process in self._processes if process not in last]
        for group in (rest, last):
            for process in reversed(group):
                process.terminate()
            for process in group:
                process.wait_stopped()
        self._processes.clear()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def _start_services(self) -> list[_Waiting]:
        """Starts the OTLP receiver, etcd and the lease service, where they are wanted."""
        started = []
        if self.config.traces:
            args = ["--port", str(self.otlp_port), "--http-port", "0"]
            args += ["--file", str(self.trace_file)]
            started.append(self._start_ours("otlp", args, self.otlp_port))
        if self.config.lease:
            if self._etcd_ports is not None:
                started.append(self._start_etcd(*self._etcd_ports))
            started.append(self._start_ours("lease", self._lease_args(), self.lease_port))
        return started

    def _check_services(self) -> None:
        """Raises ConfigError for what a service would refuse when its turn comes.

        So the engines, which take a minute, are not started in vain.
        """
        environment = process_environment()
        if self.config.lease:
            try:
                lease = lease_config.parse_config(self._lease_args(), environment)
            except lease_config.ConfigError as error:
                raise ConfigError(f"kvturn lease would not start: {error}") from None
            if (lease.host, lease.port) != (HOST, self.lease_port):
                raise ConfigError("--lease-arg must not move the lease service; give --lease-port")
            if lease.tls is not None or lease.token_files:
                raise ConfigError(
                    "--lease-arg: what kvturn up starts calls its lease service without TLS and"
                    " tokens; start the parts one by one for those"
                )
        if self.config.router:
            try:
                router = router_config.parse_config(self._router_args(), environment)
            except router_config.ConfigError as error:
                raise ConfigError(f"kvturn router would not start: {error}") from None
            if (router.host, router.port) != (HOST, self.router_port):
                raise ConfigError("--router-arg must not move the router; give --router-port")
            if router.tls is not None:
                raise ConfigError(
                    "--router-arg: kvturn up speaks without TLS with its router; start the parts"
                    " one by one for that"
                )

    def _lease_args(self) -> list[str]:
        args = ["--host", HOST, "--port", str(self.lease_port), *self._otlp_args()]
        return [*args, *self._store_args(), *self.config.lease_args]

    def _router_args(self) -> list[str]:
        args = ["--host", HOST, "--port", str(self.router_port), "--grpc-port", str(self.grpc_port)]
        for role in ("prefill", "decode"):
            for url in self.engine_urls(role):
                args += [f"--{role}", url]
        if self.config.lease:
            args += ["--lease", self.lease_address]
            args += ["--question-deadline-ms", str(self.config.question_deadline_ms)]
        return [*args, *self._otlp_args(), *self.config.router_args]

    def _start_router(self) -> _Waiting:
        waiting = self._start_ours("router", self._router_args(), self.router_port)
        return _Waiting(
            waiting.process, lambda: http_ok(f"{self.router_url}/ready"), self.router_url
        )

    @property
    def store(self) -> str:
        """Where the lease service keeps records, as its --store says it."""
        if self._etcd_ports is None:
            return self.config.store
        return f"{etcd.SCHEME}{HOST}:{self._etcd_ports[0]}"

    def _store_args(self) -> list[str]:
        if self.store == etcd.MEMORY:
            return []
        secret = etcd.secret_file(self.config.run_dir)
        return ["--store", self.store, "--secret-file", str(secret)]

    def _start_etcd(self, client_port: int, peer_port: int) -> _Waiting:
        binary = etcd.find_etcd()
        assert binary is not None
        data_dir = self.config.run_dir / "etcd"
        # What a run before recorded is of no use: none of its engines lives.
        shutil.rmtree(data_dir, ignore_errors=True)
        command = etcd.etcd_command(binary, data_dir, client_port, peer_port)
        process = self._start_process("etcd", command, process_environment())
        return _Waiting(process, lambda: etcd.is_healthy(client_port), f"{HOST}:{client_port}")

    def _otlp_args(self) -> list[str]:
        return ["--otlp-endpoint", self.otlp_endpoint] if self.otlp_endpoint else []

    def _start_ours(self, name: str, args: list[str], port: int) -> _Waiting:
        """Starts one of kvturn's own processes; by default ready when its port is open."""
        command = [sys.executable, "-m", "kvturn_cli", name, *args]
        process = self._start_process(name, command, process_environment())
        return _Waiting(process, lambda: is_listening(port), f"{HOST}:{port}")

    def _start_engine(self, engine: EngineConfig) -> _Waiting:
        settings = self._engine_settings()
        python = engine.python or self.config.vllm_python
        port = self.engine_ports[engine.name]
        process = self._start_process(
            engine.name,
            engine_command(python, engine, port, settings),
            engine_environment(engine, self._side_channel_ports[engine.name], settings),
        )
        url = f"http://{HOST}:{port}"
        return _Waiting(process, lambda: http_ok(f"{url}/health"), url)

    def _engine_settings(self) -> EngineSettings:
        config = self.config
        cores = len(os.sched_getaffinity(0))
        return EngineSettings(
            model=config.model,
            served_model_name=self.served_model_name,
            max_model_len=config.max_model_len or min(model_len(config.model), MODEL_LEN_MAX),
            kv_cache_gib=config.kv_cache_gib,
            threads=config.threads or max(1, cores // len(config.engines)),
            connector=config.connector,
            lease_endpoint=self.lease_address if config.lease else "",
            otlp_endpoint=self.otlp_endpoint,
            question_deadline_ms=config.question_deadline_ms,
        )

    def _start_process(
        self, name: str, command: list[str], environment: dict[str, str]
    ) -> LeashedProcess:
        log = self.config.run_dir / f"{name}.log"
        process = LeashedProcess(name, command, environment, log, self.config.stop_grace_s)
        self._processes.append(process)
        return process

    def _wait_ready(self, pending: list[_Waiting], timeout_s: float) -> None:
        """Waits until all are ready. Raises StackError when one ends or takes too long."""
        began_s = time.monotonic()
        while pending:
            self.check_alive()
            elapsed_s = time.monotonic() - began_s
            for waiting in [waiting for waiting in pending if waiting.is_ready()]:
                pending.remove(waiting)
                self._progress.done(
                    f"{waiting.process.name} is ready on {waiting.where} ({elapsed_s:.1f} s)"
                )
            if pending and elapsed_s > timeout_s:
                first = pending[0].process
                raise StackError(
                    f"{first.name} was not ready within {timeout_s:.0f} s; on a slow machine give"
                    f" kvturn up a longer --start-timeout. Its log {first.log} ends:"
                    f" {first.last_line()[:300]}"
                )
            if pending:
                names = ", ".join(waiting.process.name for waiting in pending)
                self._progress.waiting(f"starting {names} ({elapsed_s:.0f} s)")
                time.sleep(POLL_S)

    def _wait_registered(self) -> None:
        """Waits until every decode engine has a session at the lease service."""
        wanted = len(self.engine_urls("decode"))
        began_s = time.monotonic()
        while registered_decode_engines(self.lease_address) < wanted:
            self.check_alive()
            if time.monotonic() - began_s > REGISTER_TIMEOUT_S:
                raise StackError(self._unregistered())
            self._progress.waiting("waiting for the decode engine to register its session")
            time.sleep(POLL_S)

    def _unregistered(self) -> str:
        """Returns what is known of a decode engine that did not register.

        The lease service may be to blame: without its etcd it does not lead, and says so.
        """
        lease = next(process for process in self._processes if process.name == "lease")
        engine = next(engine.name for engine in self.config.engines if engine.role == "decode")
        return (
            "no decode engine registered with the lease service, which last said:"
            f" {lease.last_line()[:300]} (logs: {lease.log}, {self.logs[engine]})"
        )


def check(config: StackConfig) -> None:
    """Raises ConfigError, naming the flag and the fix, for what would fail at start."""
    if not (config.model / "config.json").is_file():
        raise ConfigError(
            f"--model {config.model}: no model there (no config.json);"
            " give a model folder, or run make setup for the small one"
        )
    pythons = {config.vllm_python, *(e.python for e in config.engines if e.python)}
    for python in sorted(pythons):
        if not os.access(python, os.X_OK):
            raise ConfigError(
                f"--vllm-python {python}: no Python there;"
                " give the interpreter of a vLLM environment, or run make setup"
            )
    problem = etcd.problem_of(config.store)
    if problem:
        raise ConfigError(problem)
    flags = {"--router-port": config.router_port, "--grpc-port": config.grpc_port}
    flags |= {"--lease-port": config.lease_port, "--otlp-port": config.otlp_port}
    flags |= {f"--{engine.role}-port": engine.port for engine in config.engines if engine.port}
    seen: dict[int, str] = {}
    for flag, port in flags.items():
        if port and port in seen:
            raise ConfigError(f"{flag} {port}: {seen[port]} has the same port; change one of them")
        if port and not is_free(port):
            raise ConfigError(
                f"{flag} {port}: the port is in use; choose another, 0 for any free one"
            )
        seen[port] = flag
    try:
        config.run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--run-dir {config.run_dir}: {error.strerror}") from error


def model_len(model: Path) -> int:
    """Returns the model's longest context in tokens; 8,192 where its config does not say."""
    try:
        body = json.loads((model / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"--model {model}: config.json cannot be read: {error}") from error
    if not isinstance(body, dict):
        raise ConfigError(f"--model {model}: config.json is no JSON object")
    for part in (body, body.get("text_config")):
        length = part.get("max_position_embeddings") if isinstance(part, dict) else None
        if isinstance(length, int):
            return length
    return MODEL_LEN_MAX


def http_ok(url: str) -> bool:
    """Tells whether a GET is answered with a 2xx status."""
    try:
        with contextlib.closing(_opener.open(url, timeout=PROBE_TIMEOUT_S)) as answer:
            return 200 <= int(answer.status) < 300
    except (urllib.error.URLError, OSError, ValueError):
        return False


def registered_decode_engines(lease_address: str) -> int:
    """Returns how many decode engines hold a session; 0 when the lease service is silent."""
    options = [("grpc.enable_http_proxy", 0)]
    with grpc.insecure_channel(lease_address, options=options) as channel:
        stub = lease_pb2_grpc.LeaseServiceStub(channel)
        try:
            answer = stub.ListEngines(lease_pb2.ListEnginesRequest(), timeout=PROBE_TIMEOUT_S)
        except grpc.RpcError:
            return 0
        decoding = (common_pb2.ENGINE_ROLE_DECODE, common_pb2.ENGINE_ROLE_BOTH)
        return sum(engine.description.role in decoding for engine in answer.engines)
