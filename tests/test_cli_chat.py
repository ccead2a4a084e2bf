"""The chat and the client under it, against a router that is a small fake of the HTTP contract."""

import contextlib
import http.server
import json
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from certificates import Authority
from kvturn_command import kvturn

from kvturn_cli.chat import reuse_line
from kvturn_cli.turn import RouterClient, read_report

REPORT = {
    "x-kvturn-conversation": "c-1",
    "x-kvturn-verdict": "reused",
    "x-kvturn-prompt-tokens": "640",
    "x-kvturn-reused-tokens": "512",
    "x-kvturn-local-tokens": "0",
    "x-kvturn-prefill-ms": "120.5",
    "x-kvturn-read-ms": "12.25",
    "x-kvturn-read-bytes": "11796480",
}

LOCAL_REPORT = {
    "x-kvturn-conversation": "c-1",
    "x-kvturn-verdict": "local",
    "x-kvturn-plan": "local",
    "x-kvturn-prompt-tokens": "0",
    "x-kvturn-local-tokens": "0",
}


class FakeRouter(http.server.ThreadingHTTPServer):
    """Answers every chat with "Hello there." in pieces and notes each request."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), FakeRouterHandler)
        self.requests: list[tuple[str, str, dict[str, str], Any]] = []
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.models = json.dumps({"object": "list", "data": [{"id": "tiny", "object": "model"}]})
        """What it answers when it is asked for its models."""


class FakeRouterHandler(http.server.BaseHTTPRequestHandler):
    server: FakeRouter

    def log_message(self, *arguments: Any) -> None:
        pass

    def _note(self) -> Any:
        text = self.rfile.read(int(self.headers.get("content-length") or 0))
        body = json.loads(text) if text else None
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.server.requests.append((self.command, self.path, headers, body))
        return body

    def _answer(self, content_type: str, text: str, headers: dict[str, str] | None = None) -> None:
        self.send_response(200)
        for name, value in {"content-type": content_type, **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def do_GET(self) -> None:
        self._note()
        self._answer("application/json", self.server.models)

    def do_DELETE(self) -> None:
        self._note()
        self._answer("application/json", "{}")

    def do_POST(self) -> None:
        body = self._note()
        if "keepalive" in self.path:
            self._answer("application/json", "{}")
            return
        last = body["messages"][-1]["content"]
        if "fail" in last:
            self.send_error(503)
            return
        if "other" in last:
            self._answer("application/json", '{"choices": []}')
            return
        if "half" in last:
            self._answer(
                "text/event-stream", 'data: {"choices": [{"delta": 5}]}\n\ndata: {"cho\n\n'
            )
            return
        deltas: list[dict[str, str]] = [{"role": "assistant"}, {"content": "Hello"}]
        deltas.append({"content": " there."})
        events = "".join(
            f"data: {json.dumps({'choices': [{'index': 0, 'delta': delta}]})}\n\n"
            for delta in deltas
        )
        usage = {"prompt_tokens": 300, "completion_tokens": 2, "total_tokens": 302}
        usage["prompt_tokens_details"] = {"cached_tokens": 256}  # type: ignore[assignment]
        events += f"data: {json.dumps({'choices': [], 'usage': usage})}\n\n"
        told = LOCAL_REPORT if "local" in last else REPORT
        self._answer("text/event-stream", f"{events}data: [DONE]\n\n", told)


@pytest.fixture
def router() -> Iterator[FakeRouter]:
    """Runs the fake router."""
    with running(FakeRouter()) as server:
        yield server


@contextlib.contextmanager
def running(server: FakeRouter) -> Iterator[FakeRouter]:
    """Runs a fake router until the block ends."""
    with server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_a_turn_reports_reply_time_and_reuse(router: FakeRouter) -> None:
    """The reply comes in pieces, the numbers from the router's headers."""
    pieces: list[str] = []
    with RouterClient(router.url, "", 10) as client:
        messages = [{"role": "user", "content": "hi"}]
        result = client.turn("tiny", messages, "c-1", max_tokens=9, on_text=pieces.append)
    assert pieces == ["Hello", " there."]
    assert result.text == "Hello there."
    assert 0 < result.ttft_ms < 10_000
    assert (result.verdict, result.prompt_tokens, result.reused_tokens) == ("reused", 640, 512)
    assert (result.prefill_ms, result.read_ms, result.read_bytes) == (120.5, 12.25, 11_796_480)
    _, path, headers, body = router.requests[-1]
    assert path == "/v1/chat/completions"
    assert headers["x-conversation-id"] == "c-1"
    assert "x-kvturn-reuse" not in headers
    assert "authorization" not in headers
    assert body["stream"] is True
    assert body["max_tokens"] == 9


def test_a_baseline_turns_reuse_off_and_a_key_is_sent(router: FakeRouter) -> None:
    """X-Kvturn-Reuse: off goes out; a key goes with every request, signs of life included."""
    with RouterClient(router.url, "secret", 10) as client:
        messages = [{"role": "user", "content": "hi"}]
        client.turn("tiny", messages, "c/1", reuse=False, max_tokens=9)
        client.keep_alive("tiny", "c/1")
        client.end("tiny", "c/1")
    turn, alive, end = router.requests
    assert turn[2]["x-kvturn-reuse"] == "off"
    assert alive[:2] == ("POST", "/kvturn/v1/conversations/c%2F1/keepalive?model=tiny")
    assert end[:2] == ("DELETE", "/kvturn/v1/conversations/c%2F1?model=tiny")
    assert {request[2]["authorization"] for request in router.requests} == {"Bearer secret"}


def test_a_turn_that_decode_serves_alone_tells_its_tokens_at_its_end(router: FakeRouter) -> None:
    """Its headers come before anybody knows them; the usage of the last chunk says them."""
    with RouterClient(router.url, "", 10) as client:
        messages = [{"role": "user", "content": "local"}]
        result = client.turn("tiny", messages, "c-1", max_tokens=9)
    assert (result.plan, result.verdict) == ("local", "local")
    assert (result.prompt_tokens, result.local_tokens, result.reused_tokens) == (300, 256, 0)
    assert router.requests[-1][3]["stream_options"] == {"include_usage": True}
    assert "served it alone, 256 of 300 prompt tokens from its cache" in reuse_line(result)


def test_headers_that_are_absent_or_broken_count_as_nothing() -> None:
    """A plain OpenAI server in the router's place gives a turn without a verdict."""
    result = read_report({"x-kvturn-read-ms": "soon"}, "text", 1.0)
    assert (result.verdict, result.prompt_tokens, result.read_ms) == ("", 0, 0.0)


def chat(router_url: str, text: str, *flags: str) -> subprocess.CompletedProcess[str]:
    """Runs `kvturn chat` with piped input."""
    command = [sys.executable, "-m", "kvturn_cli", "chat", "--url", router_url]
    return subprocess.run(
        [*command, "--system", "Be kind.", *flags],
        input=text,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_a_piped_chat_shows_replies_and_reuse(router: FakeRouter) -> None:
    """Two turns share a conversation and grow; /new takes another; each is ended."""
    done = chat(router.url, "first\nsecond\n/new\nthird\n/nonsense\n\n")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Hello there.") == 3
    line = "reused: 512 of 640 prompt tokens reused"
    assert done.stdout.count(line) == 3
    assert "read 11.8 MB in 12.2 ms" in done.stdout
    turns = [request for request in router.requests if request[1] == "/v1/chat/completions"]
    conversations = [request[2]["x-conversation-id"] for request in turns]
    assert conversations[0] == conversations[1] != conversations[2]
    assert [message["content"] for message in turns[1][3]["messages"]] == [
        "Be kind.",
        "first",
        "Hello there.",
        "second",
    ]
    assert len(turns[2][3]["messages"]) == 2
    assert [request[0] for request in router.requests].count("DELETE") == 2


def test_a_failed_turn_is_one_line_and_the_chat_goes_on(router: FakeRouter) -> None:
    """The failed message stays out of the history; the exit code tells of a last failure."""
    done = chat(router.url, "please fail\nagain\n")
    assert done.returncode == 0
    assert done.stderr.count("the turn failed") == 1
    assert len(router.requests[-2][3]["messages"]) == 2
    assert chat(router.url, "please fail\n").returncode == 1


def test_a_router_that_is_not_there_is_one_line() -> None:
    """The line names the address and the fix."""
    done = chat("http://127.0.0.1:1", "hello\n")
    assert done.returncode == 1
    assert "no router at http://127.0.0.1:1; run kvturn up" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_router_with_a_certificate_of_our_own_needs_its_authority(tmp_path: Path) -> None:
    """Each mismatch is one line with the flag to set; with --ca the chat is held."""
    ours = Authority(tmp_path)
    pair = ours.issue()
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(pair.cert, pair.key)
    server = FakeRouter()
    server.socket = tls.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    plain, url = server.url, server.url.replace("http:", "https:")
    with running(server):
        for done, words in (
            (chat(url, "hello\n"), f"the certificate of {url} is not trusted; give --ca FILE"),
            (chat(plain, "hello\n"), "closes connections; if the router has --tls-cert, give"),
            (chat(url, "hello\n", "--ca", "/nowhere"), "--ca /nowhere: cannot be read: No such"),
        ):
            assert words in done.stderr
            assert done.returncode in (1, 2)
            assert done.stderr.count("\n") == 1
        assert "Hello there." in chat(url, "hello\n", "--ca", str(ours.ca)).stdout


@pytest.mark.parametrize(
    "models", ["[" * 100_000, '{"data": 5}', '{"data": [5]}', "null", "<html>", '"x"']
)
def test_what_answers_no_models_is_no_router(router: FakeRouter, models: str) -> None:
    """One line, exit code 1, whatever it answers."""
    router.models = models
    done = kvturn("chat", "--url", router.url, stdin="hello\n")
    assert done.code == 1
    assert done.err.startswith(f"kvturn chat: {router.url} tells no models: ")
    assert done.err.count("\n") == 1


@pytest.mark.parametrize("text", ["other", "half"])
def test_an_answer_that_is_no_chat_fails_the_turn_in_one_line(
    router: FakeRouter, text: str
) -> None:
    """No stream at all, and one of something else; the chat goes on after it."""
    done = kvturn("chat", "--url", router.url, stdin=f"{text}\nhello\n")
    assert done.code == 0
    assert done.err.startswith("kvturn chat: the turn failed: the answer is ")
    assert done.err.count("\n") == 1
    assert "Hello there." in done.out


@pytest.mark.parametrize("url", ["nowhere", "ftp://h:1", "http://", "http://[", "http://a b:1"])
def test_a_router_that_is_no_url_is_refused_by_name(url: str) -> None:
    """Before anybody is asked."""
    done = kvturn("chat", "--url", url)
    assert done.code == 2
    assert done.err.startswith(f"kvturn chat: --url: {url!r} ")
    assert done.err.count("\n") == 1


def test_a_model_that_is_not_served_is_refused_with_those_that_are(router: FakeRouter) -> None:
    """Before anybody has typed a message."""
    done = chat(router.url, "hello\n", "--model", "tiiny")
    assert done.returncode == 1
    assert done.stderr == f"kvturn chat: --model tiiny: {router.url} serves tiny\n"
