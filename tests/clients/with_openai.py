"""The `openai` package: chat completions and responses, with the tool loops of its documentation.

Responses are asked for with the whole history, and, where engines keep them, with only what is new.
"""

import json
from typing import Any

import openai
from weather import FLAT_TOOL, QUESTIONS, STEPS_MAX, SYSTEM, TOOL, Calls, main


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


def responses(base_url: str, model: str, stream: bool, tag: str | None, calls: Calls) -> list[str]:
    history: list[Any] = []
    texts: list[str] = []
    for question in QUESTIONS:
        history.append({"role": "user", "content": question})
        for _ in range(STEPS_MAX):
            answer = respond(base_url, model, stream, tag, history, store=False)
            history += [item.model_dump(exclude_none=True) for item in answer.output]
            told = run_calls(answer, calls)
            history += told
            if not told:
                texts.append(answer.output_text)
                break
    return texts


def kept(base_url: str, model: str, stream: bool, tag: str | None, calls: Calls) -> list[str]:
    texts: list[str] = []
    previous: str | None = None
    for question in QUESTIONS:
        new: list[Any] = [{"role": "user", "content": question}]
        for _ in range(STEPS_MAX):
            more = {} if previous is None else {"previous_response_id": previous}
            answer = respond(base_url, model, stream, tag, new, store=True, **more)
            previous = answer.id
            new = run_calls(answer, calls)
            if not new:
                texts.append(answer.output_text)
                break
    return texts


def respond(
    base_url: str, model: str, stream: bool, tag: str | None, given: list[Any], **more: Any
) -> Any:
    api = openai.OpenAI(base_url=base_url, api_key="none", max_retries=0)
    asked: dict[str, Any] = {"model": model, "input": given, "instructions": SYSTEM, **more}
    asked["tools"] = [FLAT_TOOL]
    asked["extra_body"] = {} if tag is None else {"conversation_id": tag}
    if stream:
        with api.responses.stream(**asked) as events:
            answer: Any = events.get_final_response()
    else:
        answer = api.responses.create(**asked)
    assert answer.usage is not None
    return answer


def run_calls(answer: Any, calls: Calls) -> list[Any]:
    return [
        {
            "type": "function_call_output",
            "call_id": item.call_id,
            "output": calls.get_weather(**json.loads(item.arguments)),
        }
        for item in answer.output
        if item.type == "function_call"
    ]


if __name__ == "__main__":
    main(chat=chat, responses=responses, kept=kept)
