"""The `openai` package: chat completions, with the tool loop of its own documentation."""

import json
from typing import Any

import openai
from weather import QUESTIONS, STEPS_MAX, SYSTEM, TOOL, Calls, main


def chat(base_url: str, model: str, stream: bool, tag: str | None, calls: Calls) -> list[str]:
    api = openai.OpenAI(base_url=base_url, api_key="none", max_retries=0)
    extra = {} if tag is None else {"conversation_id": tag}
    messages: list[Any] = [{"role": "system", "content": SYSTEM}]
    texts: list[str] = []
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        for _ in range(STEPS_MAX):
            asked = {"model": model, "messages": messages, "tools": [TOOL], "extra_body": extra}
            if stream:
                with api.chat.completions.stream(
                    **asked, stream_options={"include_usage": True}
                ) as events:
                    answer = events.get_final_completion()
            else:
                answer = api.chat.completions.create(**asked)
            assert answer.usage is not None
            message = answer.choices[0].message
            messages.append(message.model_dump(exclude_none=True, exclude={"parsed"}))
            if not message.tool_calls:
                texts.append(message.content or "")
                break
            for call in message.tool_calls:
                told = calls.get_weather(**json.loads(call.function.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": told})
    return texts


if __name__ == "__main__":
    main(chat=chat)
