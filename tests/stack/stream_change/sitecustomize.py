"""Makes vLLM 0.32 stream `kv_transfer_params` as 0.33 does: in the chunk with the finish reason.

On the path of an engine's Python this file is run at its start; it waits for vLLM's chat serving
module and wraps one method of it. Nothing in the installed package is touched.
"""

import importlib.abc
import importlib.machinery
import json
import sys
from collections.abc import AsyncIterator
from types import ModuleType
from typing import Any

SERVING = "vllm.entrypoints.openai.chat_completion.serving"
PREFIX = "data: "


def change(serving: ModuleType) -> None:
    """Wraps the streaming generator of `OpenAIServingChat`."""
    stock = serving.OpenAIServingChat.chat_completion_stream_generator

    async def changed(
        self: Any, request: Any, results: AsyncIterator[Any], *args: Any, **kwargs: Any
    ) -> AsyncIterator[str]:
        params: list[dict[str, Any]] = []

        async def watched() -> AsyncIterator[Any]:
            async for result in results:
                if result.kv_transfer_params:
                    params.append(result.kv_transfer_params)
                yield result

        async for event in stock(self, request, watched(), *args, **kwargs):
            yield with_params(event, params[-1]) if params else event

    serving.OpenAIServingChat.chat_completion_stream_generator = changed


def with_params(event: str, params: dict[str, Any]) -> str:
    """Adds the parameters to the chunk that carries a finish reason."""
    if '"finish_reason":"' not in event:
        return event
    chunk = json.loads(event.removeprefix(PREFIX))
    chunk["kv_transfer_params"] = params
    return f"{PREFIX}{json.dumps(chunk)}\n\n"


class Finder(importlib.abc.MetaPathFinder):
    """Lets the serving module load as ever, then changes it."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != SERVING:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        assert spec is not None
        assert spec.loader is not None
        load = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            load(module)
            change(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, Finder())
