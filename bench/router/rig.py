"""What routers are measured between: fake engines behind them, a client before them."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.router.machine import OTHER_CPU, BenchError, Program

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

HERE = Path(__file__).parent
BUILD = HERE.parent.parent / "build" / "bench-router"

_START_TIMEOUT_S = 60.0
_ASK_TIMEOUT_S = 30.0


def build() -> None:
    """Compiles the engines and the client, where their sources are newer. Raises BenchError."""
    BUILD.mkdir(parents=True, exist_ok=True)
    for name in ("nodes", "load"):
        source, program = HERE / f"{name}.c", BUILD / name
        changed_s = max(file.stat().st_mtime for file in (source, HERE / "polling.h"))
        if program.exists() and program.stat().st_mtime > changed_s:
            continue
        try:
            subprocess.run(["cc", "-O2", "-o", program, source], check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise BenchError(f"{source.name} cannot be compiled with cc: {error}") from None


def until(ready: Callable[[], bool], program: Program, what: str) -> None:
    """Waits until `ready` says so. Raises BenchError if the program ends, or takes too long."""
    deadline_s = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline_s:
        if not program.running:
            raise BenchError(f"{what} ended at start; see {program.log}")
        with contextlib.suppress(OSError, http.client.HTTPException):
            if ready():
                return
        time.sleep(0.05)
    raise BenchError(f"{what} was not ready within {_START_TIMEOUT_S:g} s; see {program.log}")


def ask(port: int, path: str, body: bytes | None = None) -> tuple[int, bytes]:
    """Sends one HTTP request to a port of this machine; returns status and body."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_ASK_TIMEOUT_S)
    try:
        headers = {"content-type": "application/json"} if body is not None else {}
        connection.request("GET" if body is None else "POST", path, body, headers)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


@dataclass(frozen=True, slots=True)
class Nodes:
    """The fake engines, all in one process."""

    program: Program
    prefills: Sequence[int]
    decodes: Sequence[int]
    """Ports."""

    def pace(self, interval_us: int) -> None:
        """Sets the time between the chunks of an answer; 0: all at once."""
        ask(self.prefills[0], f"/ctl?interval_us={interval_us}")

    def stats(self) -> dict[str, int]:
        """Returns what they counted so far."""
        counts: dict[str, int] = json.loads(ask(self.prefills[0], "/stats")[1])
        return counts


@contextlib.contextmanager
def nodes(pairs: int) -> Iterator[Nodes]:
    """Runs so many prefill and so many decode engines."""
    args = [str(BUILD / "nodes"), *["--prefill", "0"] * pairs, *["--decode", "0"] * pairs]
    log = BUILD / "nodes.log"
    with Program(args, OTHER_CPU, log) as program:
        ports: list[int] = []

        def listening() -> bool:
            ports[:] = map(int, re.findall(r"127\.0\.0\.1:(\d+)\n", log.read_text()))
            return len(ports) == 2 * pairs

        until(listening, program, "the fake engines")
        yield Nodes(program, ports[:pairs], ports[pairs:])


@dataclass(frozen=True, slots=True)
class Load:
    """What the client does: `arguments` as in load.c, `interval_us` the engines' pace."""

    arguments: str
    interval_us: int = 0


@dataclass(frozen=True, slots=True)
class Loaded:
    """What the client saw: answers, and times of the first byte and of the whole in us."""

    good: int
    bad: int
    seconds: float
    first_p50_us: float
    first_p99_us: float
    total_p50_us: float
    client_cpu_s: float


def load(to: Sequence[str], what: Load) -> Loaded:
    """Runs the client to its end. Raises BenchError if it cannot."""
    args = ["taskset", "-c", str(OTHER_CPU), str(BUILD / "load"), *to, *what.arguments.split()]
    with subprocess.Popen(args, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        text = process.stdout.read()
        cpu_s = _wait(process)
    try:
        said: dict[str, Any] = json.loads(text)
    except ValueError:
        raise BenchError(f"the client ended with {process.returncode}: {text[:200]!r}") from None
    none = {"p50": 0, "p99": 0}
    first, total = said.get("first_us", none), said.get("total_us", none)
    return Loaded(
        good=said["good"],
        bad=said["bad_status"] + said["bad_answer"] + said["lost"],
        seconds=said["seconds"],
        first_p50_us=first["p50"],
        first_p99_us=first["p99"],
        total_p50_us=total["p50"],
        client_cpu_s=cpu_s,
    )


def _wait(process: subprocess.Popen[bytes]) -> float:
    """Returns the CPU time of a process, when it has ended."""
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return usage.ru_utime + usage.ru_stime
