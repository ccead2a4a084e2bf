"""bench/sweep: what it asks of a router, what it makes of the answers, what it refuses."""

import csv
import json
import sys
import textwrap
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from bench.sweep.__main__ import main
from bench.sweep.cell import Cell, Row, cells, runs
from bench.sweep.prose import Length, text
from bench.sweep.table import lines, markdown, ratio

WORD_TOKENS = 3
TEMPLATE_TOKENS = 20


class FakeRouter(ThreadingHTTPServer):
    """Streams answers with the headers of a kvturn router; three tokens for each word."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.turns: list[tuple[str, int, bool]] = []
        """Conversation, messages and whether reuse was asked for, of each turn."""
        self.ended: list[str] = []
        self.fails_at_messages = 0
        self.not_ready = 0
        """Times that it says that no engine is usable."""
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: FakeRouter

    def _answer(self, status: int, body: bytes, **headers: object) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": len(body), **headers}.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        if self.path == "/ready":
            ready = not self.server.not_ready
            self.server.not_ready -= not ready
            self._answer(200 if ready else 503, b"" if ready else b"no decode engine is healthy")
            return
        models = {"object": "list", "data": [{"id": "tiny", "object": "model"}]}
        self._answer(200, json.dumps(models).encode(), Content_Type="application/json")

    def do_DELETE(self) -> None:
        self.server.ended.append(self.path.rpartition("/")[2].partition("?")[0])
        self._answer(200, b"{}")

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        reuse = self.headers.get("X-Kvturn-Reuse") != "off"
        count = len(asked["messages"])
        self.server.turns.append((self.headers["X-Conversation-Id"], count, reuse))
        if count == self.server.fails_at_messages:
            self._answer(503, b'{"error": {"message": "no engine"}}')
            return
        words = sum(len(message["content"].split()) for message in asked["messages"])
        prompt = TEMPLATE_TOKENS + WORD_TOKENS * words
        reused = prompt // 2 if reuse and count > 1 else 0
        chunk = {"id": "1", "object": "chat.completion.chunk", "created": 1, "model": "tiny"}
        choice = {"index": 0, "delta": {"content": "one two"}, "finish_reason": "stop"}
        event = json.dumps({**chunk, "choices": [choice]})
        self._answer(
            200,
            f"data: {event}\n\ndata: [DONE]\n\n".encode(),
            Content_Type="text/event-stream",
            x_kvturn_verdict="reused" if reused else "first_turn" if reuse else "turned_off",
            x_kvturn_prompt_tokens=prompt,
            x_kvturn_reused_tokens=reused,
            x_kvturn_read_ms=2 if reused else 0,
            x_kvturn_read_bytes=4_000_000 if reused else 0,
        )

    def log_message(self, *args: Any) -> None:
        """Says nothing."""


@pytest.fixture
def router() -> Iterator[FakeRouter]:
    """A router to measure."""
    with FakeRouter() as running:
        yield running
        running.shutdown()


def row(arm: str, turn: int, ttft_ms: float, error: str = "") -> Row:
    return Row(
        *(500, 3, 1, arm, 0, "c", turn, 600),
        *(400 if arm == "on" else 0, 0, "reused" if arm == "on" else "turned_off"),
        *(4_000_000, 2.0, ttft_ms, ttft_ms + 10, error),
    )


def test_a_sweep_measures_every_cell_in_both_arms(router: FakeRouter, tmp_path: Path) -> None:
    """Turns off ask for no reuse; each conversation is its own and is ended; the table compares."""
    out = tmp_path / "out"
    words = ["--contexts", "200,400", "--turns", "2", "--concurrency", "1,3", "--repeats", "2"]
    assert main(["--url", router.url, "--out", str(out), "--label", "x", *words]) == 0
    with (out / "rows.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * 2 * 2 * (1 + 3) * 2
    measured = [turn for turn in router.turns if "length" not in turn[0] and "--1-" not in turn[0]]
    assert len(measured) == len(rows)
    assert all(reuse == ("-on-" in name) for name, _, reuse in measured)
    conversations = {name for name, _, _ in measured}
    assert len(conversations) == len(rows) / 2
    assert conversations <= set(router.ended)
    first = [int(one["prompt_tokens"]) for one in rows if one["turn"] == "1"]
    wanted = [int(one["context"]) for one in rows if one["turn"] == "1"]
    assert all(abs(got - want) <= 2 * WORD_TOKENS for got, want in zip(first, wanted, strict=True))
    with (out / "table.csv").open() as file:
        table = list(csv.DictReader(file))
    assert [line["reuse"] for line in table] == ["on", "off"] * 4
    assert all(int(line["reused tokens"]) > 0 for line in table if line["reuse"] == "on")
    assert {line["reused tokens"] for line in table if line["reuse"] == "off"} == {"0"}
    assert {line["read GB/s"] for line in table} == {"2.00", ""}
    assert (out / "table.md").read_text().startswith("| context | turns |")


def test_turns_that_fail_are_counted_and_told(
    router: FakeRouter, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The conversation ends there, the sweep goes on, the status is 1."""
    router.fails_at_messages = 5
    out = tmp_path / "out"
    words = ["--contexts", "200", "--turns", "3", "--concurrency", "1", "--repeats", "1"]
    assert main(["--url", router.url, "--out", str(out), *words]) == 1
    told = capsys.readouterr()
    assert "2 turns failed, the first: " in told.err
    assert "reuse off, 1 failed" in told.out


def test_a_router_that_is_not_ready_yet_is_waited_for(
    router: FakeRouter,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Engines that have just come up are not usable at once; one that never is ends it."""
    monkeypatch.setattr("bench.sweep.__main__._LOOK_S", 0)
    words = ["--contexts", "200", "--turns", "2", "--concurrency", "1", "--repeats", "1"]
    router.not_ready = 2
    assert main(["--url", router.url, "--out", str(tmp_path / "out"), *words]) == 0
    waited = [line for line in capsys.readouterr().err.splitlines() if "waiting for" in line]
    assert len(waited) == 2
    assert "no decode engine is healthy" in waited[0]
    monkeypatch.setattr("bench.sweep.__main__.READY_S", 0)
    router.not_ready = 10
    assert main(["--url", router.url, "--out", str(tmp_path / "never"), *words]) == 2
    assert "is not ready: no decode engine is healthy" in capsys.readouterr().err


def test_nobody_to_measure_is_told_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No router there; results that are none."""
    assert main(["--url", "http://127.0.0.1:1", "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("sweep: ROUTER_URL=http://127.0.0.1:1: the router")
    assert main(["--report", str(tmp_path / "none")]) == 2
    assert "no rows.csv of a sweep there" in capsys.readouterr().err


def test_reports_of_several_sweeps_are_one_table(
    router: FakeRouter, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One measured with reuse, one without, as when engines are started anew in between."""
    words = ["--contexts", "200", "--turns", "2", "--concurrency", "1", "--repeats", "1"]
    for arm in ("on", "off"):
        out = str(tmp_path / arm)
        assert main(["--url", router.url, "--out", out, "--arms", arm, *words]) == 0
    capsys.readouterr()
    assert main(["--report", str(tmp_path / "on"), str(tmp_path / "off")]) == 0
    on, off = capsys.readouterr().out.splitlines()[2:]
    assert on.startswith("| 200 | 2 | 1 | on |")
    assert off.startswith("| 200 | 2 | 1 | off |")


def test_the_benchmark_of_vllm_can_drive(router: FakeRouter, tmp_path: Path) -> None:
    """A stand-in that takes the real one's flags and writes its kind of statistics."""
    folder = tmp_path / "vllm" / "benchmarks" / "multi_turn"
    folder.mkdir(parents=True)
    (folder / "benchmark_serving_multi_turn.py").write_text(
        textwrap.dedent(
            """
            import argparse, json, pathlib
            parser = argparse.ArgumentParser()
            for flag in ("input-file", "url", "model", "served-model-name", "num-clients",
                         "max-active-conversations", "limit-min-tokens", "limit-max-tokens",
                         "request-timeout-sec", "stats-json-output", "header"):
                parser.add_argument("--" + flag, action="append")
            for flag in ("no-early-stop", "send-conversation-id"):
                parser.add_argument("--" + flag, action="store_true")
            args = parser.parse_args()
            assert args.send_conversation_id and args.model == ["/models/tiny"]
            ttft_ms = 40.0 if args.header == ["X-Kvturn-Reuse=off"] else 10.0
            given = json.loads(pathlib.Path(args.input_file[0]).read_text())
            pathlib.Path(args.stats_json_output[0]).write_text(json.dumps([
                {"conversation_id": one["id"], "input_num_turns": n, "input_num_tokens": 99 * n,
                 "ttft_ms": ttft_ms, "latency_ms": 2 * ttft_ms}
                for one in given for n in range(1, len(one["messages"]), 2)
            ]))
            """
        )
    )
    out = tmp_path / "out"
    words = ["--contexts", "200", "--turns", "2", "--concurrency", "2", "--repeats", "1"]
    words += ["--driver", "vllm", "--vllm-source", str(tmp_path / "vllm")]
    words += ["--vllm-python", sys.executable, "--tokenizer", "/models/tiny"]
    assert main(["--url", router.url, "--out", str(out), *words]) == 0
    with (out / "table.csv").open() as file:
        on, off = csv.DictReader(file)
    assert (on["measured"], on["TTFT ms"], on["times as fast"]) == ("2", "10", "4.00")
    assert (off["measured"], off["TTFT ms"], off["reused tokens"]) == ("2", "40", "")


def test_a_benchmark_of_vllm_that_is_not_there_is_named(
    router: FakeRouter, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With where it comes from."""
    words = ["--driver", "vllm", "--vllm-source", str(tmp_path), "--vllm-python", sys.executable]
    assert main(["--url", router.url, "--out", str(tmp_path), *words]) == 2
    told = capsys.readouterr().err
    assert f"VLLM_SOURCE={tmp_path}: no benchmarks/multi_turn/" in told
    assert "git clone" in told


def test_medians_are_of_the_turns_after_the_first_that_did_not_fail() -> None:
    """First turns and failed ones do not count; failures are shown."""
    measured = [row("on", 1, 900), row("on", 2, 10), row("on", 3, 30), row("on", 3, 0, "broken")]
    measured += [row("off", 1, 900), row("off", 2, 40), row("off", 3, 60)]
    on, off = lines(measured)
    assert (on.count, on.failed, on.ttft_ms.median) == (2, 1, 20)
    assert (on.ttft_ms.low, on.ttft_ms.high) == (15, 25)
    assert ratio(on, (on, off)) == 2.5
    assert ratio(off, (on, off)) is None
    assert "| 20 | 15 to 25 | 2.50 |" in markdown([on, off])


def test_arms_take_turns_in_being_first() -> None:
    """Neither gains by its place."""
    wanted = cells([100], [2], [1])
    assert wanted == [Cell(100, 2, 1)]
    assert [run.arm for run in runs(wanted, ("on", "off"), 3)] == [
        *("on", "off", "off", "on", "on", "off")
    ]


def test_prompts_have_the_wanted_length_and_nothing_in_common() -> None:
    """Lengths are learned from two prompts; texts are the same for the same seed only."""
    length = Length.of((50, 170), (250, 770))
    assert length == Length(3.0, 20.0)
    assert length.words(2000) == 660
    assert length.more_words(90) == 30
    assert text("a", 40) == text("a", 40)
    assert text("a", 40)[:30] != text("b", 40)[:30]
    with pytest.raises(ValueError, match="tell no length"):
        Length.of((50, 170), (250, 170))
