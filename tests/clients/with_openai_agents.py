"""OpenAI's agent framework: its own loop and history, over chat completions and responses."""

import asyncio
from typing import Any

import openai
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from weather import QUESTIONS, STEPS_MAX, SYSTEM, Calls, main

set_tracing_disabled(True)


def chat(base_url: str, model: str, stream: bool, tag: str | None, calls: Calls) -> list[str]:
    api = openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0)
    return asyncio.run(converse(OpenAIChatCompletionsModel(model, api), stream, tag, calls))


def responses(base_url: str, model: str, stream: bool, tag: str | None, calls: Calls) -> list[str]:
    api = openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0)
    return asyncio.run(converse(OpenAIResponsesModel(model, api), stream, tag, calls))


async def converse(model: Any, stream: bool, tag: str | None, calls: Calls) -> list[str]:
    agent = Agent(
        name="weather",
        instructions=SYSTEM,
        model=model,
        tools=[function_tool(calls.get_weather)],
        model_settings=ModelSettings(
            include_usage=True, extra_headers={} if tag is None else {"X-Conversation-Id": tag}
        ),
    )
    history: list[Any] = []
    texts: list[str] = []
    for question in QUESTIONS:
        history.append({"role": "user", "content": question})
        if stream:
            result: Any = Runner.run_streamed(agent, history, max_turns=STEPS_MAX)
            async for _ in result.stream_events():
                pass
        else:
            result = await Runner.run(agent, history, max_turns=STEPS_MAX)
        assert result.context_wrapper.usage.input_tokens > 0
        texts.append(str(result.final_output))
        history = result.to_input_list()
    return texts


if __name__ == "__main__":
    main(chat=chat, responses=responses)
