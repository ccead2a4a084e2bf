"""Engines that offer the Responses API, as vLLM does, and keep what they made.

`offer_responses(engine)` makes a stub engine answer it. A question becomes a call of the first
tool, if there are tools; what the tool told, or a question without tools, becomes a text.
"""

import json
import re
from typing import Any

from stub_engine import Reply, Seen, StubEngine

RESPONSES = "/v1/responses"
USAGE = {
    "input_tokens": 48,
    "input_tokens_details": {"cached_tokens": 48},
    "output_tokens": 9,
    "output_tokens_details": {"reasoning_tokens": 0},
    "total_tokens": 57,
}


def offer_responses(engine: StubEngine, usage: dict[str, Any] = USAGE) -> dict[str, dict[str, Any]]:
    """Makes the engine answer; returns what it keeps, by id."""
    kept: dict[str, dict[str, Any]] = {}

    async def play(seen: Seen, reply: Reply) -> None:
        request = seen.json
        previous = request.get("previous_response_id")
        if previous is not None and previous not in kept:
            await not_found(reply, previous)
        elif engine.role == "prefill":
            handle = engine.prefill_answer()["kv_transfer_params"]
            details = {"cached_tokens": engine.cached_tokens or 0}
            counted = USAGE | {"input_tokens_details": details, "output_tokens": 1}
            more = {"status": "incomplete", "kv_transfer_params": handle, "usage": counted}
            await reply.json(answer_of("resp_p", request, []) | more)
        else:
            answer = answer_of(request["request_id"], request, output_of(request)) | {
                "usage": usage
            }
            if request.get("store", True):
                kept[answer["id"]] = answer
                serve_kept(engine, answer)
            await tell(answer, bool(request.get("stream")), reply)

    engine.script(RESPONSES, play)
    return kept


def serve_kept(engine: StubEngine, answer: dict[str, Any]) -> None:
    async def get(seen: Seen, reply: Reply) -> None:
        await reply.json(answer)

    async def cancel(seen: Seen, reply: Reply) -> None:
        error = {"message": "Cannot cancel a synchronous response.", "code": 400}
        await reply.json({"error": error}, 400)

    for query in ("", "?stream=false"):
        engine.script(f"{RESPONSES}/{answer['id']}{query}", get)
    engine.script(f"{RESPONSES}/{answer['id']}/cancel", cancel)


async def not_found(reply: Reply, response_id: str) -> None:
    error = {"message": f"Response with id '{response_id}' not found.", "code": 404}
    await reply.json({"error": error | {"param": "response_id"}}, 404)


def answer_of(response_id: str, request: dict[str, Any], output: list[Any]) -> dict[str, Any]:
    """Returns a response."""
    return {
        "id": response_id,
        "created_at": 1,
        "object": "response",
        "model": "m",
        "output": output,
        "parallel_tool_calls": True,
        "temperature": 1.0,
        "tool_choice": "auto",
        "tools": request.get("tools") or [],
        "top_p": 1.0,
        "status": "completed",
        "previous_response_id": request.get("previous_response_id"),
        "usage": USAGE,
        "kv_transfer_params": None,
    }


def output_of(request: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns what the model says: one item."""
    given = request["input"]
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    last = items[-1]
    if last.get("type") == "function_call_output":
        return [message(f"It is {last['output']} now. \u2600")]
    text = last["content"]
    if not isinstance(text, str):
        text = "".join(part["text"] for part in text)
    if not request.get("tools"):
        return [message(f"You said: {text}")]
    city = re.findall(r"in (\w+)\?", text)[-1]
    call = {
        "type": "function_call",
        "id": f"fc_{len(items)}",
        "call_id": f"call_{city}",
        "name": request["tools"][0]["name"],
        "arguments": json.dumps({"city": city}),
        "status": "completed",
    }
    return [call]


def message(text: str) -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": None}
    return {
        "type": "message",
        "id": "msg_1",
        "role": "assistant",
        "status": "completed",
        "content": [part],
    }


async def tell(answer: dict[str, Any], stream: bool, reply: Reply) -> None:
    """Writes a response, whole or as vLLM's events."""
    if not stream:
        await reply.json(answer)
        return
    await reply.begin_stream()
    for data in events(answer):
        await reply.send(data)
    await reply.end_stream(done=False)


def events(answer: dict[str, Any]) -> list[bytes]:
    """Returns the events of a streamed response."""
    begun = answer | {"output": [], "status": "in_progress", "usage": None}
    told: list[dict[str, Any]] = [
        {"type": "response.created", "response": begun},
        {"type": "response.in_progress", "response": begun},
    ]
    for index, item in enumerate(answer["output"]):
        at = {"output_index": index, "item_id": item["id"]}
        started = item | ({"arguments": ""} if "arguments" in item else {"content": []})
        added = {"type": "response.output_item.added", "output_index": index}
        told.append(added | {"item": started | {"status": "in_progress"}})
        if "arguments" in item:
            kind, text = "response.function_call_arguments", item["arguments"]
            ends = {"arguments": text, "name": item["name"]}
        else:
            kind, text = "response.output_text", item["content"][0]["text"]
            part = item["content"][0] | {"text": ""}
            at = at | {"content_index": 0}
            told.append({"type": "response.content_part.added", "part": part} | at)
            ends = {"text": text, "logprobs": []}
        for start in range(0, len(text), 5):
            delta = {"type": f"{kind}.delta", "delta": text[start : start + 5], "logprobs": []}
            told.append(delta | at)
        told.append({"type": f"{kind}.done"} | ends | at)
        told.append({"type": "response.output_item.done", "output_index": index, "item": item})
    told.append({"type": "response.completed", "response": answer})
    return [
        f"event: {one['type']}\ndata: {json.dumps(one | {'sequence_number': number})}\n\n".encode()
        for number, one in enumerate(told)
    ]
