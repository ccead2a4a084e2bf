"""pydantic-ai: its own loop and history, over chat completions."""

import asyncio
from typing import Any

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from weather import QUESTIONS, SYSTEM, Calls, main


def chat(base_url: str, model: str, stream: bool, tag: str | None, calls: Calls) -> list[str]:
    provider = OpenAIProvider(base_url=base_url, api_key="none")
    return asyncio.run(converse(OpenAIChatModel(model, provider=provider), stream, tag, calls))


async def converse(model: Any, stream: bool, tag: str | None, calls: Calls) -> list[str]:
    extra = {} if tag is None else {"conversation_id": tag}
    agent: Any = Agent(model, system_prompt=SYSTEM, model_settings={"extra_body": extra})
    agent.tool_plain(calls.get_weather)
    history: list[Any] = []
    texts: list[str] = []
    for question in QUESTIONS:
        if stream:
            async with agent.run_stream(question, message_history=history) as result:
                texts.append(await result.get_output())
        else:
            result = await agent.run(question, message_history=history)
            texts.append(result.output)
        history = result.all_messages()
    return texts


if __name__ == "__main__":
    main(chat=chat)
