"""Who holds the conversations: our own client, or vLLM's multi-turn benchmark."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import subprocess
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import openai

from bench.sweep.cell import Row, Run
from bench.sweep.prose import Length, text
from kvturn_cli.turn import RouterClient, TurnResult

if TYPE_CHECKING:
    import ssl
    from collections.abc import Iterator, Sequence

_ERROR_CHARS = 200
_SCRIPT = "benchmark_serving_multi_turn.py"
_NEEDED_FLAGS = ("--send-conversation-id", "--stats-json-output", "--header")


class DriverError(Exception):
    """The sweep cannot be run as asked; names what and the fix."""


@dataclass(frozen=True)
class Target:
    """The router, and what is asked of it."""

    url: str
    model: str
    """Name under which it serves the model."""
    api_key: str
    tls: ssl.SSLContext | None
    timeout_s: float
    label: str
    """Name of the sweep, part of each conversation's id."""
    suffix_tokens: int
    """Tokens that each turn after the first adds."""
    answer_tokens: int
    """Longest answer."""

    def client(self) -> RouterClient:
        """Returns a client of the router."""
        return RouterClient(self.url, self.api_key, self.timeout_s, self.tls)


class Driver(Protocol):
    """Measures one run."""

    def measure(self, run: Run) -> Sequence[Row]:
        """Holds its conversations and returns a row for each turn."""


def question(run: Run, target: Target, length: Length, number: int, turn: int) -> str:
    """Returns what the client says in a turn of a conversation."""
    seed = f"{run.conversation(target.label, number)}/{turn}"
    words = length.words(run.cell.context) if turn == 1 else length.more_words(target.suffix_tokens)
    return text(seed, words)


@dataclass(frozen=True)
class OwnDriver:
    """Conversations as an OpenAI client holds them: it sends back the answers that it got."""

    target: Target
    length: Length

    def measure(self, run: Run) -> list[Row]:
        """Holds the run's conversations side by side."""
        barrier = threading.Barrier(run.cell.concurrency)
        with concurrent.futures.ThreadPoolExecutor(run.cell.concurrency) as pool:
            jobs = [
                pool.submit(self._converse, run, number, barrier)
                for number in range(run.cell.concurrency)
            ]
            return [row for job in jobs for row in job.result()]

    def _converse(self, run: Run, number: int, barrier: threading.Barrier) -> list[Row]:
        rows: list[Row] = []
        messages: list[dict[str, str]] = []
        name = run.conversation(self.target.label, number)
        with self.target.client() as client:
            barrier.wait()
            for turn in range(1, run.cell.turns + 1):
                said = question(run, self.target, self.length, number, turn)
                messages.append({"role": "user", "content": said})
                row, answer = self._turn(client, run, name, turn, messages)
                rows.append(row)
                if row.error:
                    break
                messages.append({"role": "assistant", "content": answer})
            with contextlib.suppress(Exception):  # What it holds goes when it is idle.
                client.end(self.target.model, name)
        return rows

    def _turn(
        self, client: RouterClient, run: Run, name: str, turn: int, messages: list[dict[str, str]]
    ) -> tuple[Row, str]:
        began_s = time.perf_counter()
        try:
            result: TurnResult = client.turn(
                self.target.model,
                messages,
                name,
                reuse=run.arm == "on",
                max_tokens=self.target.answer_tokens,
            )
        except openai.OpenAIError as error:
            return _failed(run, name, turn, str(error)), ""
        latency_ms = (time.perf_counter() - began_s) * 1_000
        row = Row(
            **vars(run.cell),
            arm=run.arm,
            repeat=run.repeat,
            conversation=name,
            turn=turn,
            prompt_tokens=result.prompt_tokens,
            reused_tokens=result.reused_tokens,
            local_tokens=result.local_tokens,
            verdict=result.verdict,
            read_bytes=result.read_bytes,
            read_ms=round(result.read_ms, 3),
            ttft_ms=round(result.ttft_ms, 2),
            latency_ms=round(latency_ms, 2),
            error="",
        )
        return row, result.text


def _failed(run: Run, name: str, turn: int, why: str) -> Row:
    why = " ".join(why.split())[:_ERROR_CHARS]
    return Row(
        **vars(run.cell),
        arm=run.arm,
        repeat=run.repeat,
        conversation=name,
        turn=turn,
        prompt_tokens=0,
        reused_tokens=0,
        local_tokens=0,
        verdict="",
        read_bytes=0,
        read_ms=0.0,
        ttft_ms=0.0,
        latency_ms=0.0,
        error=why,
    )


@dataclass(frozen=True)
class VllmDriver:
    """vLLM's own benchmark, a process for each run. It is told neither verdicts nor reuse."""

    target: Target
    length: Length
    python: str
    """Interpreter that has what the benchmark imports."""
    folder: Path
    """Folder of the benchmark."""
    tokenizer: str
    """Model folder or name, for the benchmark's tokenizer."""
    scratch: Path
    """Folder for its input and output."""

    def measure(self, run: Run) -> list[Row]:
        """Runs the benchmark once."""
        given, stats = self.scratch / "conversations.json", self.scratch / "stats.json"
        given.write_text(json.dumps(self._conversations(run)))
        stats.unlink(missing_ok=True)
        command = [self.python, _SCRIPT, "--input-file", str(given), "--url", self.target.url]
        command += ["--model", self.tokenizer, "--served-model-name", self.target.model]
        command += ["--num-clients", str(run.cell.concurrency), "--no-early-stop"]
        command += ["--max-active-conversations", str(run.cell.concurrency)]
        command += ["--limit-min-tokens", "1", "--limit-max-tokens", str(self.target.answer_tokens)]
        command += ["--request-timeout-sec", str(round(self.target.timeout_s))]
        command += ["--send-conversation-id", "--stats-json-output", str(stats)]
        if run.arm == "off":
            command += ["--header", "X-Kvturn-Reuse=off"]
        log = self.scratch / "vllm-benchmark.log"
        with log.open("a") as output:
            done = subprocess.run(command, cwd=self.folder, stdout=output, stderr=output)
        if done.returncode or not stats.is_file():
            raise DriverError(f"{_SCRIPT} ended with status {done.returncode}; see {log}")
        return self._rows(run, json.loads(stats.read_text()))

    def _conversations(self, run: Run) -> list[dict[str, Any]]:
        """Answers are there for their place only: the benchmark sends back those that it got."""
        return [
            {
                "id": run.conversation(self.target.label, number),
                "messages": [
                    message
                    for turn in range(1, run.cell.turns + 1)
                    for message in (
                        {
                            "role": "user",
                            "content": question(run, self.target, self.length, number, turn),
                        },
                        {"role": "assistant", "content": "yes"},
                    )
                ],
            }
            for number in range(run.cell.concurrency)
        ]

    def _rows(self, run: Run, stats: Sequence[dict[str, Any]]) -> list[Row]:
        rows = [
            Row(
                **vars(run.cell),
                arm=run.arm,
                repeat=run.repeat,
                conversation=str(one["conversation_id"]),
                turn=(one["input_num_turns"] + 1) // 2,
                prompt_tokens=one["input_num_tokens"],
                reused_tokens=-1,
                local_tokens=-1,
                verdict="",
                read_bytes=-1,
                read_ms=-1.0,
                ttft_ms=round(one["ttft_ms"], 2),
                latency_ms=round(one["latency_ms"], 2),
                error="",
            )
            for one in stats
        ]
        missing = run.cell.concurrency * run.cell.turns - len(rows)
        return rows + [_failed(run, "", 0, "the benchmark reports no such turn")] * max(missing, 0)


def places(source: str, python: str) -> Iterator[Path]:
    """Yields where vLLM's benchmark may lie: the given source tree, or else the usual ones."""
    if source:
        yield Path(source) / "benchmarks" / "multi_turn"
        return
    code = "import importlib.util as u; s = u.find_spec('vllm'); print(s.origin if s else '')"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True)
    if done.returncode == 0 and done.stdout.strip():
        yield Path(done.stdout.strip()).parent.parent / "benchmarks" / "multi_turn"
    for tree in (Path("/vllm-workspace"), Path.home() / "vllm"):
        yield tree / "benchmarks" / "multi_turn"


def vllm_benchmark(source: str, python: str) -> Path:
    """Returns the folder of vLLM's benchmark, which runs with `python`.

    Raises DriverError if there is none, if it cannot do what a sweep needs, or does not run.
    """
    folder = next((one for one in places(source, python) if (one / _SCRIPT).is_file()), None)
    if folder is None:
        raise DriverError(
            f"VLLM_SOURCE={source}: no benchmarks/multi_turn/{_SCRIPT} there or in the usual"
            " places; git clone --depth 1 --branch v0.32.0"
            " https://github.com/vllm-project/vllm, and name its folder"
        )
    env = {**os.environ, "COLUMNS": "200"}
    command = [python, _SCRIPT, "--help"]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no word"])[-1]
        raise DriverError(
            f"VLLM_PYTHON={python}: {_SCRIPT} does not run ({last});"
            f" {python} -m pip install -r {folder / 'requirements.txt'}"
        )
    lacking = [flag for flag in _NEEDED_FLAGS if flag not in done.stdout]
    if lacking:
        raise DriverError(
            f"VLLM_SOURCE: the benchmark in {folder} has no {', '.join(lacking)};"
            " take that of vLLM 0.32.0, which measures older engines too"
        )
    return folder
