"""One chat turn through a router, as a client sees it: the reply, the time, the reuse."""

import contextlib
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote

import openai
from openai.types import CompletionUsage

Message = dict[str, str]

KEEPALIVE_INTERVAL_S = 10.0
SIGN_OF_LIFE_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class TurnResult:
    """What a turn gave and what it cost."""

    text: str
    """The reply."""
    ttft_ms: float
    """From sending the request to the first piece of the reply."""
    conversation_id: str
    """The conversation, minted by the router if the client named none."""
    verdict: str
    """Why KV was reused or not (common.proto); empty when not told by a kvturn router."""
    plan: str
    """How the router had the turn served (common.proto's PlanKind); empty as above."""
    prompt_tokens: int
    """Tokens of the prompt."""
    reused_tokens: int
    """Tokens whose KV prefill read from the decode engine."""
    local_tokens: int
    """Tokens that the engine which computed the prompt found in its own prefix cache."""
    prefill_ms: float
    """Duration of the prefill leg."""
    read_ms: float
    """Duration of the KV read."""
    read_bytes: int
    """Bytes read."""
    saved_ms: float | None = None
    """What reuse saved until the first token, as the router estimates it; None if it does not."""


def read_report(
    headers: Mapping[str, str], text: str, ttft_ms: float, usage: CompletionUsage | None = None
) -> TurnResult:
    """Returns the turn that a router's x-kvturn-* headers report; what is absent counts as 0.

    Of a turn that decode served alone only `usage`, at the answer's end, tells the tokens.
    """

    def number(name: str) -> float:
        try:
            return float(headers.get(f"x-kvturn-{name}", "") or 0)
        except ValueError:
            return 0.0

    prompt_tokens = int(number("prompt-tokens"))
    local_tokens = int(number("local-tokens"))
    if not prompt_tokens and usage is not None:
        prompt_tokens = usage.prompt_tokens
        details = usage.prompt_tokens_details
        local_tokens = (details.cached_tokens if details else None) or 0
    return TurnResult(
        text=text,
        ttft_ms=ttft_ms,
        conversation_id=headers.get("x-kvturn-conversation", ""),
        verdict=headers.get("x-kvturn-verdict", ""),
        plan=headers.get("x-kvturn-plan", ""),
        prompt_tokens=prompt_tokens,
        reused_tokens=int(number("reused-tokens")),
        local_tokens=local_tokens,
        prefill_ms=number("prefill-ms"),
        read_ms=number("read-ms"),
        read_bytes=int(number("read-bytes")),
        saved_ms=number("saved-ms") if "x-kvturn-saved-ms" in headers else None,
    )


@contextlib.contextmanager
def _openais() -> Iterator[None]:
    """Raises openai.OpenAIError for an answer that is none of OpenAI's API, or breaks off.

    The client passes on whatever it stumbles over in such an answer, each of another kind.
    """
    try:
        yield
    except (openai.OpenAIError, OSError):
        raise
    except Exception as error:
        raise openai.OpenAIError(
            f"the answer is none of OpenAI's API ({type(error).__name__}: {error})"[:300]
        ) from error


class RouterClient:
    """Talks to one router with the `openai` client, never through a proxy."""

    def __init__(
        self, url: str, api_key: str, timeout_s: float, tls: ssl.SSLContext | None = None
    ) -> None:
        """`url` is the router's base URL without /v1; `timeout_s` bounds each request.

        `tls` judges the certificate of an https router; None: by the system's authorities.
        """
        self._url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

        def drop_key(request: Any) -> None:
            """Without a key a turn has no tenant, yet the openai client insists on sending one."""
            if not api_key:
                request.headers.pop("Authorization", None)

        self._http = openai.DefaultHttpxClient(
            trust_env=False,
            timeout=timeout_s,
            event_hooks={"request": [drop_key]},
            verify=True if tls is None else tls,
        )
        self._openai = openai.OpenAI(
            base_url=f"{self._url}/v1",
            api_key=api_key or "none",
            http_client=self._http,
            max_retries=0,
            timeout=timeout_s,
        )

    def close(self) -> None:
        """Closes the connections."""
        self._openai.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def models(self) -> list[str]:
        """Returns the names of the models served. Raises openai.OpenAIError."""
        with _openais():
            return [str(model.id) for model in self._openai.models.list()]

    def turn(
        self,
        model: str,
        messages: Sequence[Message],
        conversation_id: str,
        *,
        reuse: bool = True,
        max_tokens: int,
        temperature: float = 0.0,
        on_text: Callable[[str], None] = lambda _: None,
    ) -> TurnResult:
        """Sends a turn and reads its stream to the end; `on_text` gets each piece as it comes.

        `reuse=False` asks for neither reading nor retaining KV: a baseline.
        Raises openai.OpenAIError.
        """
        headers = {"X-Conversation-Id": conversation_id}
        if not reuse:
            headers["X-Kvturn-Reuse"] = "off"
        sent: Any = list(messages)
        began_s = time.perf_counter()
        answer = self._openai.chat.completions.with_raw_response.create(
            model=model,
            messages=sent,
            stream=True,
            stream_options={"include_usage": True},
            max_tokens=max_tokens,
            temperature=temperature,
            extra_headers=headers,
        )
        pieces: list[str] = []
        first_s: float | None = None
        usage: CompletionUsage | None = None
        came = False
        with _openais(), answer.parse() as stream:
            for chunk in stream:
                came = True
                usage = chunk.usage or usage
                piece = chunk.choices[0].delta.content if chunk.choices else None
                if piece:
                    first_s = first_s or time.perf_counter()
                    pieces.append(piece)
                    on_text(piece)
        if not came:
            raise openai.OpenAIError("the answer is no stream of OpenAI's API")
        ttft_ms = ((first_s or time.perf_counter()) - began_s) * 1_000
        return read_report(answer.headers, "".join(pieces), ttft_ms, usage)

    def keep_alive(self, model: str, conversation_id: str) -> None:
        """Tells that the client is still there. Raises an httpx error when nobody hears it."""
        self._http.post(
            f"{self._conversation(conversation_id)}/keepalive",
            params={"model": model},
            headers=self._headers,
            timeout=SIGN_OF_LIFE_TIMEOUT_S,
        ).raise_for_status()

    @contextlib.contextmanager
    def kept_alive(self, model: str, conversation_id: Callable[[], str]) -> Iterator[None]:
        """Sends a sign of life every few seconds while the block runs.

        `conversation_id` tells of which conversation, "" for none at the time.
        """
        done = threading.Event()

        def beat() -> None:
            while not done.wait(KEEPALIVE_INTERVAL_S):
                name = conversation_id()
                if name:
                    with contextlib.suppress(Exception):  # The next one may be heard.
                        self.keep_alive(model, name)

        thread = threading.Thread(target=beat, name="keepalive", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join(SIGN_OF_LIFE_TIMEOUT_S)

    def end(self, model: str, conversation_id: str) -> None:
        """Ends the conversation: its KV is freed at once. Raises an httpx error."""
        self._http.delete(
            self._conversation(conversation_id),
            params={"model": model},
            headers=self._headers,
            timeout=SIGN_OF_LIFE_TIMEOUT_S,
        ).raise_for_status()

    def _conversation(self, conversation_id: str) -> str:
        return f"{self._url}/kvturn/v1/conversations/{quote(conversation_id, safe='')}"
