"""`litellm`, as a library: its providers for OpenAI-compatible servers and for vLLM."""

import functools
import json
import os
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # Else it asks the Internet at its import.

import litellm
from weather import QUESTIONS, STEPS_MAX, SYSTEM, TOOL, Calls, main


def chat(
    provider: str, base_url: str, model: str, stream: bool, tag: str | None, calls: Calls
) -> list[str]:
    headers = {} if tag is None else {"X-Conversation-Id": tag}
    messages: list[Any] = [{"role": "system", "content": SYSTEM}]
    texts: list[str] = []
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        for _ in range(STEPS_MAX):
            answer: Any = litellm.completion(
                model=f"{provider}/{model}",
                api_base=base_url,
                api_key="none",
                messages=messages,
                tools=[TOOL],
                stream=stream,
                stream_options={"include_usage": True} if stream else None,
                extra_headers=headers,
                num_retries=0,
            )
            if stream:
                answer = litellm.stream_chunk_builder(list(answer), messages=messages)
            assert answer.usage.prompt_tokens > 0
            message = answer.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            if not message.tool_calls:
                texts.append(message.content or "")
                break
            for call in message.tool_calls:
                told = calls.get_weather(**json.loads(call.function.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": told})
    return texts


if __name__ == "__main__":
    main(openai=functools.partial(chat, "openai"), vllm=functools.partial(chat, "hosted_vllm"))
