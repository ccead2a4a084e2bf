"""Drives two turns of a new conversation through the router, and ends it."""

import asyncio
import contextlib
import itertools
import json
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote

from kvturn_cli.doctor.facts import DrivenTurn, Facts
from kvturn_cli.doctor.probes.http import Exchange, Question, Unanswered, ask, on_thread
from kvturn_cli.doctor.probes.router import RouterAccess
from kvturn_cli.doctor.traffic import DOCTORS

CHAT = "/v1/chat/completions"
PAUSE_S = 1.0
"""Between the turns, as a client's own: decode's grant has long arrived then."""
END_TIMEOUT_S = 3.0
THRESHOLD_DEFAULT_TOKENS = 64
WORDS_LEAST = 400
"""What the first prompt should have at least. A word of ours is one token or two."""
REPLY_SPARE_TOKENS = 48
"""By how much the first reply should exceed what is worth a read."""
SECOND_REPLY_TOKENS = 16
_SHOWN_MAX = 300
_SUBJECTS = ("The river", "A ship", "Our town", "The garden", "My brother", "The old road")
_VERBS = ("carries", "remembers", "crosses", "follows", "finds", "keeps")
_OBJECTS = ("the morning", "seven stones", "a long story", "the bridge", "green light", "its name")
FIRST_QUESTION = "Tell me in many sentences what you think of this story."
SECOND_QUESTION = "Thank you. Which word of it did you like best?"

Message = Mapping[str, str]


def lengths(facts: Facts) -> tuple[int, int]:
    """Returns how long the first prompt should be, in words, and its reply, in tokens.

    Enough for a read to be worth it, whatever prefill's own cache holds; both together at most
    three quarters of the shortest context.
    """
    settings = [one.settings for one in facts.engines if one.settings]
    threshold = max((one.kv_recompute_threshold for one in settings), default=0)
    least = facts.router.settings.pull_min_tokens if facts.router.settings else None
    threshold = max(threshold or THRESHOLD_DEFAULT_TOKENS, least or 0)
    quarter = min((one.max_model_len for one in settings if one.max_model_len), default=8192) // 4
    return (
        min(max(WORDS_LEAST, 2 * threshold), quarter),
        min(threshold + REPLY_SPARE_TOKENS, quarter),
    )


def story(length_words: int) -> str:
    """Returns a text of at least so many words that nobody has sent before."""
    words: list[str] = [f"Story {secrets.token_hex(8)}."]
    while len(words) < length_words:
        sentence = " ".join(map(secrets.choice, (_SUBJECTS, _VERBS, _OBJECTS)))
        words += f"{sentence}.".split()
    return " ".join(words)


async def drive_turns(
    access: RouterAccess, model: str, length: tuple[int, int], timeout_s: float
) -> list[DrivenTurn]:
    """Returns both turns, the first alone if it fails; ends the conversation in any case."""
    words, reply_tokens = length
    conversation = DOCTORS + secrets.token_hex(8)
    messages = [{"role": "user", "content": f"{story(words)}\n\n{FIRST_QUESTION}"}]
    try:
        first, reply = await _turn(access, model, conversation, messages, reply_tokens, timeout_s)
        if first.problem:
            return [first]
        await asyncio.sleep(PAUSE_S)
        messages += [
            {"role": "assistant", "content": reply},
            {"role": "user", "content": SECOND_QUESTION},
        ]
        second, _ = await _turn(
            access, model, conversation, messages, SECOND_REPLY_TOKENS, timeout_s
        )
        return [first, second]
    finally:
        path = f"/kvturn/v1/conversations/{quote(conversation, safe='')}?model={quote(model)}"
        question = access.question(path, access.api_key, method="DELETE", timeout_s=END_TIMEOUT_S)
        with contextlib.suppress(Unanswered):  # Its KV is freed when idle, at the latest.
            await ask(question)


async def _turn(
    access: RouterAccess,
    model: str,
    conversation: str,
    messages: Sequence[Message],
    max_tokens: int,
    timeout_s: float,
) -> tuple[DrivenTurn, str]:
    body = {
        "model": model,
        "messages": messages,
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    question = access.question(
        CHAT,
        access.api_key,
        headers={"Content-Type": "application/json", "X-Conversation-Id": conversation},
        method="POST",
        body=json.dumps(body).encode(),
        timeout_s=timeout_s,
    )
    try:
        return await on_thread(lambda: _streamed(question), timeout_s)
    except Unanswered as problem:
        return DrivenTurn(str(problem)), ""


def _streamed(question: Question) -> tuple[DrivenTurn, str]:
    """Reads the stream of a turn. Returns the turn and the reply."""
    began_s = time.perf_counter()
    try:
        with Exchange(question) as exchange:
            if exchange.status != 200:
                text = b"".join(exchange.pieces()).decode(errors="replace")
                return DrivenTurn(f"HTTP {exchange.status}: {_message(text)}"), ""
            return _read(exchange, began_s)
    except Unanswered as problem:
        return DrivenTurn(str(problem)), ""
    except (TypeError, ValueError, AttributeError, OverflowError, RecursionError):
        return DrivenTurn("what answers there streams no chat of OpenAI's API"), ""


def _read(exchange: Exchange, began_s: float) -> tuple[DrivenTurn, str]:
    reply, ttft_ms, usage, ended = "", 0.0, None, False
    for event in _events(exchange):
        if event == "[DONE]":
            ended = True
            continue
        try:
            chunk = json.loads(event)
        except ValueError:
            return DrivenTurn(f"its stream has an event that is no JSON: {event[:_SHOWN_MAX]}"), ""
        if "error" in chunk:
            return DrivenTurn(f"its stream ended in an error: {_message(event)}"), ""
        usage = chunk.get("usage") or usage
        for choice in chunk.get("choices", ()):
            piece = (choice.get("delta") or {}).get("content") or ""
            if piece and not reply:
                ttft_ms = (time.perf_counter() - began_s) * 1_000
            reply += piece
    if not ended:
        return DrivenTurn("its stream broke off"), ""
    return _driven(exchange.headers, usage, ttft_ms), reply


def _events(exchange: Exchange) -> Iterator[str]:
    rest = b""
    for piece in itertools.chain(exchange.pieces(), (b"\n\n",)):
        *whole, rest = (rest + piece).split(b"\n")
        for line in whole:
            if line.startswith(b"data:"):
                yield line[5:].strip().decode(errors="replace")


def _driven(
    headers: Mapping[str, str], usage: Mapping[str, Any] | None, ttft_ms: float
) -> DrivenTurn:
    def number(name: str) -> float:
        try:
            return float(headers.get(f"x-kvturn-{name}", "") or 0)
        except ValueError:
            return 0.0

    told = usage or {}
    details = told.get("prompt_tokens_details")
    prompt_tokens, local_tokens = int(number("prompt-tokens")), int(number("local-tokens"))
    if headers.get("x-kvturn-plan") == "local" and not local_tokens:
        # Of a turn that decode serves alone only the answer's end tells.
        local_tokens = int((details or {}).get("cached_tokens") or 0)
    return DrivenTurn(
        verdict=headers.get("x-kvturn-verdict", ""),
        plan=headers.get("x-kvturn-plan", ""),
        plan_reason=headers.get("x-kvturn-plan-reason", ""),
        conversation_id=headers.get("x-kvturn-conversation", ""),
        prompt_tokens=prompt_tokens or int(told.get("prompt_tokens") or 0),
        reused_tokens=int(number("reused-tokens")),
        local_tokens=local_tokens,
        read_ms=number("read-ms"),
        read_bytes=int(number("read-bytes")),
        ttft_ms=ttft_ms,
        usage_told=usage is not None,
        details_told=details is not None,
    )


def _message(text: str) -> str:
    """Returns an error's message, of an answer in OpenAI's shape."""
    try:
        error = json.loads(text)["error"]
        message = str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError):
        message = text
    return " ".join(message.split())[:_SHOWN_MAX]
