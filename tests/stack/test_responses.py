"""The Responses API on real engines: the whole history each time, or only what is new."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from conversation import Conversation
from prose import document
from routers import Answered, ask, turns_of
from test_life_of_a_turn import wait_until
from test_local import BLOCK_TOKENS

if TYPE_CHECKING:
    from kvturn_cli.stack import Stack

RESPONSES = "/v1/responses"


def respond(stack: Stack, history: Any, **body: Any) -> tuple[dict[str, Any], Answered]:
    """Asks for a response; returns it, and the answer it came in."""
    asked = {"model": stack.served_model_name, "input": history, "max_output_tokens": 16, **body}
    answered = ask(stack.router_url, asked, path=RESPONSES)
    last = answered.events[-1]
    return (last["response"] if body.get("stream") else last), answered


def text_of(response: dict[str, Any]) -> str:
    """What the assistant said."""
    return "".join(
        part["text"] for item in response["output"] for part in item.get("content") or ()
    )


def cached(response: dict[str, Any]) -> int:
    return int(response["usage"]["input_tokens_details"]["cached_tokens"])


def reported(stack: Stack, conversation: str, number: int) -> dict[str, Any]:
    """What the router tells of a conversation's turn of that number, its last."""
    wait_until(lambda: len(turns_of(stack, conversation)) == number, "the turn's report")
    return turns_of(stack, conversation)[-1]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_growing_history_reuses(stack: Stack, *, stream: bool) -> None:
    """The second response's input is the first one's, its output and one more question."""
    question = document(f"responses {stream}") + "\nWhat is the capital of France?"
    history: list[Any] = [{"role": "user", "content": question}]
    first, answered = respond(stack, history, stream=stream, store=False)
    assert answered.told["verdict"] == "first_turn"
    assert cached(first) == int(answered.told["local-tokens"])
    history += [*first["output"], {"role": "user", "content": "And of Italy?"}]
    second, answered = respond(stack, history, stream=stream, store=False)
    assert answered.goes_on, answered.told
    assert text_of(second)
    reused, local = int(answered.told["reused-tokens"]), int(answered.told["local-tokens"])
    assert cached(second) == reused + local > 180
    assert second["usage"]["input_tokens"] == int(answered.told["prompt-tokens"])


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_response_goes_on_from_a_kept_one(stack: Stack, *, stream: bool) -> None:
    """Only what is new is sent: the engine that keeps the response has its history, and its KV."""
    question = document(f"kept {stream}", 300) + "\nWhat is the capital of France?"
    latest, answered = respond(stack, question)
    name = answered.told["conversation"]
    held = Conversation(stack, name).resolve(1).token_count
    for number, asked in ((2, "And of Italy?"), (3, "And of Spain?")):
        second, answered = respond(stack, asked, previous_response_id=latest["id"], stream=stream)
        assert answered.told["conversation"] == name
        assert (answered.told["plan"], answered.told["verdict"]) == ("local", "local")
        assert second["previous_response_id"] == latest["id"]
        assert second["usage"]["input_tokens"] > latest["usage"]["input_tokens"]
        assert cached(second) == held // BLOCK_TOKENS * BLOCK_TOKENS > BLOCK_TOKENS
        report = reported(stack, name, number)
        assert report["local_tokens"] == cached(second)
        assert report["prompt_tokens"] == second["usage"]["input_tokens"]
        # What it leaves is retained in place of what it found.
        held = Conversation(stack, name).resolve(number).token_count
        assert held >= second["usage"]["input_tokens"]
        latest = second
