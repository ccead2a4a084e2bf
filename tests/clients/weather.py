"""What every client here does: two questions that each need a tool, in one conversation.

Run by the Python of the clients' own environment, with nothing of this project in it. A script
runs the conversation in each of its modes and prints, as its last line, one JSON array: for each
mode its name, the conversation it was tagged with (null if none), the calls of the tool and the
final texts.
"""

import argparse
import itertools
import json
import uuid
from collections.abc import Callable
from typing import Any

SYSTEM = "You tell the weather. Caf\u00e9 \U0001f326."
QUESTIONS = ("What is the weather in Paris?", "What is the weather in Rome?")
STEPS_MAX = 6
"""Requests for one question, so that no model can go on for ever."""

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Tells the weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}


FLAT_TOOL = {"type": "function", "strict": False, **TOOL["function"]}
"""As the Responses API writes it."""


class Calls(list[str]):
    """The cities that the tool was called with."""

    def get_weather(self, city: str) -> str:
        """Tells the weather of a city."""
        self.append(city)
        return f"{city}: 21 \u00b0C"


Run = Callable[[str, str, bool, str | None, Calls], list[str]]
"""Runs the conversation: base URL, model, streamed or not, its tag, the tool; returns the texts."""


def main(**ways: Run) -> None:
    """Runs each way streamed and not, tagged and not, and prints what came of it.

    With `--brief` only streamed and tagged, and neither.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--base-url", required=True, help="of the API, with /v1")
    parser.add_argument("--model", required=True)
    parser.add_argument("--ways", nargs="*", default=list(ways), choices=list(ways))
    parser.add_argument("--brief", action="store_true", help="half of what can be combined")
    given = parser.parse_args()
    results: list[dict[str, Any]] = []
    for way, stream, tagged in itertools.product(given.ways, (True, False), (True, False)):
        if given.brief and stream != tagged:
            continue
        tag = f"weather-{uuid.uuid4().hex}" if tagged else None
        calls = Calls()
        texts = ways[way](given.base_url, given.model, stream, tag, calls)
        results.append({"way": way, "stream": stream, "tag": tag, "calls": calls, "texts": texts})
    print("\n" + json.dumps(results))
