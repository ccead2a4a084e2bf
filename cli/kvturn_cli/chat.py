"""`kvturn chat`: a chat in the terminal that shows what each turn reused."""

import contextlib
import signal
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import openai
from rich.console import Console

from kvturn.tls import trusting
from kvturn.watched import FileFault
from kvturn_cli import run_state
from kvturn_cli.arguments import Parser, base_url, positive
from kvturn_cli.checkout import default_run_dir
from kvturn_cli.console import make_console
from kvturn_cli.interrupts import Interrupted, ctrl_c_as_exception, interruptible
from kvturn_cli.turn import Message, RouterClient, TurnResult

DEFAULT_URL = "http://127.0.0.1:8000"
TURN_TIMEOUT_S = 600.0
HELP = "/new begins another conversation, /end ends this one, /quit leaves."


def main(argv: list[str]) -> int:
    """Runs `kvturn chat`."""
    parser = Parser("kvturn chat", f"Chats through a kvturn router. {HELP}")
    add = parser.add_argument
    add(
        "--url",
        type=base_url,
        default=None,
        help=f"router; default: the one of kvturn up, or {DEFAULT_URL}",
    )
    add("--run-dir", type=Path, default=default_run_dir(), help="the run folder given to kvturn up")
    add("--model", default=None, help="model name; default: the first that the router serves")
    add("--api-key", default="", help="API key, sent as a bearer token")
    add("--ca", type=Path, default=None, help="authorities of an https router; else the system's")
    add("--system", default="", help="system message")
    add("--max-tokens", type=positive, default=512, help="longest reply, tokens")
    args = parser.parse_args(argv)
    state = run_state.read(args.run_dir)
    url = args.url or (state.router_url if state and state.ready else DEFAULT_URL)
    try:
        tls = trusting("--ca", args.ca)
    except FileFault as fault:
        return fail(str(fault), 2)
    with RouterClient(url, args.api_key, TURN_TIMEOUT_S, tls) as client:
        try:
            models = client.models()
        except openai.APIConnectionError as error:
            return fail(no_router(url, error))
        except openai.AuthenticationError:
            return fail(
                f"{url} {'does not know' if args.api_key else 'needs'} an API key: --api-key"
            )
        except openai.OpenAIError as error:
            return fail(f"{url} tells no models: {error}")
        model = args.model or next(iter(models), "")
        if model not in models:
            return fail(f"--model {model}: {url} serves {', '.join(models) or 'no model'}")
        chat = Chat(client, model, args.system, args.max_tokens, make_console())
        with client.kept_alive(model, chat.kept_conversation):
            return run(chat)


def run(chat: "Chat") -> int:
    """Runs a chat; returns the exit code. Whatever ends it, its conversation ends, too."""
    try:
        with interruptible(signal.SIGTERM, signal.SIGHUP), ctrl_c_as_exception():
            try:
                return chat.run()
            finally:
                chat.end()
    except (Interrupted, KeyboardInterrupt):
        return 130


def fail(message: str, code: int = 1) -> int:
    """Prints one line to stderr and returns the exit code."""
    print(f"kvturn chat: {message}", file=sys.stderr)
    return code


def no_router(url: str, error: openai.APIConnectionError) -> str:
    """Returns what to say of a router that cannot be talked to."""
    why = str(error.__cause__ or error)
    if "CERTIFICATE_VERIFY_FAILED" in why:
        return f"the certificate of {url} is not trusted; give --ca FILE, its authority's ({why})"
    if "WRONG_VERSION_NUMBER" in why or "record layer failure" in why:
        return f"{url} speaks no TLS; give http://"
    if "disconnected without sending" in why or "ECONNRESET" in why:
        return f"{url} closes connections; if the router has --tls-cert, give https:// and --ca"
    return f"no router at {url}; run kvturn up, or give --url ({why})"


def reuse_line(result: TurnResult) -> str:
    """Returns the line shown under a reply."""
    if result.plan == "local":
        return (
            f"{result.verdict}: decode served it alone, {result.local_tokens} of"
            f" {result.prompt_tokens} prompt tokens from its cache, TTFT {result.ttft_ms:.0f} ms"
        )
    line = (
        f"{result.verdict or 'no verdict'}: {result.reused_tokens} of {result.prompt_tokens} prompt"
        f" tokens reused, TTFT {result.ttft_ms:.0f} ms, prefill {result.prefill_ms:.0f} ms"
    )
    if result.local_tokens:
        line += f", {result.local_tokens} tokens from prefill's own cache"
    if result.read_bytes:
        line += f", read {result.read_bytes / 1e6:.1f} MB in {result.read_ms:.1f} ms"
    if result.saved_ms is not None:
        line += f", about {result.saved_ms:.0f} ms saved"
    return line


class Chat:
    """A chat: its history, its conversation, its terminal."""

    def __init__(
        self, client: RouterClient, model: str, system: str, max_tokens: int, console: Console
    ) -> None:
        self._client = client
        self._model = model
        self._system = system
        self._max_tokens = max_tokens
        self._console = console
        self._conversation_id = ""
        self._history: list[Message] = []
        self._open = False
        self._begin()

    def _begin(self) -> None:
        self._conversation_id = f"chat-{uuid.uuid4().hex[:12]}"
        self._history = [{"role": "system", "content": self._system}] if self._system else []
        self._open = False

    def run(self) -> int:
        """Reads and answers until /quit, Ctrl-C at the prompt, or the end of the input."""
        self._tell(f"{self._model}. {HELP}")
        failed = False
        for text in self._lines():
            if text == "/quit":
                break
            if text in ("/new", "/end"):
                self.end()
                if text == "/new":
                    self._begin()
                self._tell("a new conversation" if text == "/new" else "conversation ended")
            elif text.startswith("/"):
                self._tell(HELP)
            elif text:
                failed = not self._turn(text)
        return 1 if failed else 0

    def _lines(self) -> Iterator[str]:
        """Yields what the user types; on a pipe each line is shown as if it were typed."""
        interactive = sys.stdin.isatty()
        if interactive:
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401 (input() edits lines once it is there)
        while True:
            try:
                text = input("you> " if interactive else "").strip()
            except (EOFError, KeyboardInterrupt):
                print()
                return
            if not interactive:
                print(f"you> {text}")
            yield text

    def _turn(self, text: str) -> bool:
        """Sends one message and shows the reply as it comes; tells whether it came."""
        messages = [*self._history, {"role": "user", "content": text}]
        pieces: list[str] = []

        def show(piece: str) -> None:
            pieces.append(piece)
            print(piece, end="", flush=True)

        self._open = True
        try:
            result = self._client.turn(
                self._model,
                messages,
                self._conversation_id,
                max_tokens=self._max_tokens,
                on_text=show,
            )
        except KeyboardInterrupt:
            print()
            self._tell("interrupted; the part that came is kept")
        except openai.OpenAIError as error:
            print()
            fail(f"the turn failed: {error}")
            return False
        else:
            print()
            self._tell(reuse_line(result))
        self._history = [*messages, {"role": "assistant", "content": "".join(pieces)}]
        return True

    def end(self) -> None:
        """Ends the conversation, if it has begun, so that its KV is freed at once."""
        if self._open:
            self._open = False
            with contextlib.suppress(Exception):  # Its KV is freed when idle, at the latest.
                self._client.end(self._model, self._conversation_id)

    def kept_conversation(self) -> str:
        """Returns the conversation to keep alive, "" before its first turn and after its end."""
        return self._conversation_id if self._open else ""

    def _tell(self, text: str) -> None:
        self._console.print(text, style="dim", markup=False, highlight=False, soft_wrap=True)
