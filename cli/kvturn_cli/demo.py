"""`kvturn demo`: a scripted conversation on the real stack, each turn beside its baseline."""

import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import openai

from kvturn_cli.arguments import Parser
from kvturn_cli.checkout import checkout, current_folder_problem, default_model, default_vllm_python
from kvturn_cli.console import ConsoleProgress, make_console
from kvturn_cli.engine import EngineConfig
from kvturn_cli.interrupts import Interrupted, interruptible
from kvturn_cli.rows import HEADER, UNITS, Row, make_row, summary, table_line, to_json
from kvturn_cli.script import ScriptedTurn, script, user
from kvturn_cli.stack import SHARED_CPU, ConfigError, Stack, StackConfig, StackError
from kvturn_cli.turn import Message, RouterClient, TurnResult

REPLY_TOKENS_MAX = 48
TURN_TIMEOUT_S = 300.0
SPANS_QUIET_S = 1.0
SPANS_TIMEOUT_S = 5.0


class DemoError(Exception):
    """The demo ran but did not show what it has to; says what and why."""


def main(argv: list[str]) -> int:
    """Runs `kvturn demo`."""
    parser = Parser(
        "kvturn demo",
        "Holds a scripted conversation on the real stack and compares the time to the first token"
        " with a baseline that reuses nothing. Writes DIR/turns.json and DIR/traces.jsonl.",
    )
    add = parser.add_argument
    add("--out-dir", type=Path, default=checkout() / "build" / "demo", help="where results go")
    add("--model", type=Path, default=default_model(), help="model folder")
    add("--vllm-python", type=Path, default=default_vllm_python(), help="vLLM's interpreter")
    args = parser.parse_args(argv)
    if problem := current_folder_problem():
        return fail(problem, 2)
    try:
        with interruptible():
            return run(args.out_dir.absolute(), args.model, args.vllm_python)
    except ConfigError as error:
        return fail(str(error), 2)
    except (StackError, DemoError) as error:
        return fail(str(error), 1)
    except Interrupted:
        return fail("interrupted; all stopped", 130)


def fail(message: str, code: int) -> int:
    """Prints one line to stderr and returns the exit code."""
    print(f"kvturn demo: {message}", file=sys.stderr, flush=True)
    return code


def demo_config(out_dir: Path, model: Path, vllm_python: Path) -> StackConfig:
    """Returns the demo's stack: prefill's own prefix caching off, so that it hides nothing."""
    return StackConfig(
        run_dir=out_dir / "logs",
        model=model.absolute(),
        vllm_python=vllm_python.absolute(),
        engines=(
            EngineConfig("prefill", "prefill-0", prefix_caching=False),
            EngineConfig("decode", "decode-0"),
        ),
        trace_file=out_dir / "traces.jsonl",
        # What is compared is one way with another, so the router is not to choose: it reads
        # whatever can be read.
        router_args=("--plan", "pull"),
        # Two engines that compute on the cores on which the lease service answers: a late answer
        # would say something about the machine, not about reuse.
        question_deadline_ms=500,
        lease_args=SHARED_CPU,
    )


def run(out_dir: Path, model: Path, vllm_python: Path) -> int:
    """Runs the whole demo; everything that it started has ended when it returns."""
    console = make_console()
    progress = ConsoleProgress(console)
    turns = read_script()
    stack = Stack(demo_config(out_dir, model, vllm_python), progress)
    out_dir.mkdir(parents=True, exist_ok=True)
    stack.trace_file.unlink(missing_ok=True)
    rows: list[Row] = []
    try:
        stack.start()
        with RouterClient(stack.router_url, "", TURN_TIMEOUT_S) as client:
            conversation = Conversation(client, stack.served_model_name)
            progress.waiting("warming up both paths")
            conversation.warm_up()
            progress.done(HEADER)
            progress.done(UNITS)
            with client.kept_alive(conversation.model, lambda: conversation.conversation_id):
                for number, turn in enumerate(turns, 1):
                    progress.waiting(f"turn {number} of {len(turns)}: {turn.kind}")
                    row = conversation.hold(number, turn)
                    rows.append(row)
                    progress.done(table_line(row))
            progress.waiting("waiting for the last spans")
            wait_until_quiet(stack.trace_file)
    except (openai.OpenAIError, OSError, ValueError) as error:
        stack.check_alive()
        raise DemoError(f"turn {len(rows) + 1} failed: {error}") from error
    finally:
        progress.clear()
        stack.stop()
        if rows:
            (out_dir / "turns.json").write_text(to_json(rows))
    return report(rows, stack, out_dir, progress)


def wait_until_quiet(file: Path) -> None:
    """Returns when the file has not grown for a second, after five seconds at the latest.

    Processes export their spans in batches, and an engine that is stopped drops its last one.
    """
    deadline_s = time.monotonic() + SPANS_TIMEOUT_S
    size, since_s = -1, 0.0
    while (now_s := time.monotonic()) < deadline_s:
        fresh = file.stat().st_size if file.exists() else 0
        if fresh != size:
            size, since_s = fresh, now_s
        elif now_s - since_s > SPANS_QUIET_S:
            return
        time.sleep(0.1)


def report(rows: list[Row], stack: Stack, out_dir: Path, progress: ConsoleProgress) -> int:
    """Tells what came out. Returns the exit code: 1 if a turn that had to reuse did not."""
    progress.done("")
    progress.done(summary(rows))
    progress.done(
        "The demo's router always reads (--plan pull); by default it takes what is fastest."
    )
    progress.done(f"Rows: {out_dir / 'turns.json'}")
    progress.done(f"Traces (OTLP/JSON, one export request a line): {stack.trace_file}")
    missed = [row for row in rows if row.is_missed()]
    if missed:
        names = ", ".join(f"{row.turn} ({row.verdict or 'no verdict'})" for row in missed)
        return fail(f"growing turns that reused nothing: {names}; logs: {stack.config.run_dir}", 1)
    return 0


def read_script() -> list[ScriptedTurn]:
    """Returns the scripted turns. Raises ConfigError where the licence text is not at hand."""
    path = checkout() / "LICENSE"
    try:
        return script(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {error}; run the demo from a kvturn checkout") from error


@dataclass
class Conversation:
    """The scripted conversation, held through a router."""

    client: RouterClient
    model: str

    def __post_init__(self) -> None:
        self.conversation_id = f"demo-{uuid.uuid4().hex[:12]}"
        self.history: list[Message] = []

    def warm_up(self) -> None:
        """Holds a short conversation both ways, so that no measured turn pays for a first time."""
        history = [user("Count the words of this text, please. " + "One two three four. " * 120)]
        for _ in range(2):
            reply = self._send(history, "warm-up", reuse=True).text
            self._send(history, "warm-up", reuse=False)
            history += [{"role": "assistant", "content": reply}, user("And now once more.")]
        self.client.end(self.model, "warm-up")

    def hold(self, number: int, turn: ScriptedTurn) -> Row:
        """Holds one turn with reuse and without; the reply with reuse goes into the history.

        Which of the two goes first alternates, so that neither always finds warmer caches.
        """
        if turn.kind == "after_end":
            self.client.end(self.model, self.conversation_id)
        messages = turn.messages(self.history)
        results: dict[bool, TurnResult] = {}
        for reuse in self._order(number):
            results[reuse] = self._send(messages, self.conversation_id, reuse=reuse)
        self.history = [*messages, {"role": "assistant", "content": results[True].text}]
        return make_row(number, turn.kind, results[True], results[False])

    def _order(self, number: int) -> Iterator[bool]:
        yield from (True, False) if number % 2 else (False, True)

    def _send(self, messages: list[Message], conversation_id: str, *, reuse: bool) -> TurnResult:
        return self.client.turn(
            self.model,
            messages,
            conversation_id if reuse else f"{conversation_id}-baseline",
            reuse=reuse,
            max_tokens=REPLY_TOKENS_MAX,
        )
