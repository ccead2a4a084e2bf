"""Answers of a decode engine whose model calls a tool when it is asked something.

`engine.script(CHAT, call_tools)` makes a stub engine answer as vLLM does with a tool parser: a
question becomes a call of the first tool, what the tool told becomes a text.
"""

import json
import re
from typing import Any

from stub_engine import Reply, Seen, chunk

USAGE = {
    "prompt_tokens": 48,
    "total_tokens": 57,
    "completion_tokens": 9,
    "prompt_tokens_details": {"cached_tokens": 48},
}


async def call_tools(seen: Seen, reply: Reply) -> None:
    """Answers a chat."""
    request = seen.json
    last = request["messages"][-1]
    if last["role"] == "tool":
        text = f"It is {text_of(last['content'])} now. \u2600"
        message: dict[str, Any] = {"role": "assistant", "content": text}
        deltas = [{"content": text[at : at + 4]} for at in range(0, len(text), 4)]
        finish = "stop"
    else:
        city = re.findall(r"in (\w+)\?", text_of(last["content"]))[-1]
        name = request["tools"][0]["function"]["name"]
        call_id = f"chatcmpl-tool-{len(request['messages'])}"
        arguments = json.dumps({"city": city})
        head = {"id": call_id, "type": "function", "index": 0}
        deltas = [{"tool_calls": [head | {"function": {"name": name, "arguments": ""}}]}]
        deltas += [
            {"tool_calls": [{"index": 0, "function": {"arguments": arguments[at : at + 3]}}]}
            for at in range(0, len(arguments), 3)
        ]
        function = {"name": name, "arguments": arguments}
        call = {"id": call_id, "type": "function", "function": function}
        message = {"role": "assistant", "content": None, "tool_calls": [call]}
        finish = "tool_calls"
    if not request.get("stream"):
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": finish}
        answer = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "m"}
        await reply.json(answer | {"choices": [choice], "usage": USAGE, "kv_transfer_params": None})
        return
    await reply.begin_stream()
    await reply.event(chunk({"role": "assistant", "content": ""}))
    for delta in deltas:
        await reply.event(chunk(delta))
    await reply.event(chunk({}, finish))
    if (request.get("stream_options") or {}).get("include_usage"):
        await reply.event(chunk({}) | {"choices": [], "usage": USAGE})
    await reply.end_stream()


def text_of(content: Any) -> str:
    """Returns a message's text, given as a string or in parts."""
    if isinstance(content, str):
        return content
    return "".join(part["text"] for part in content)
