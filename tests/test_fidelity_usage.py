"""cached_tokens has one meaning: the prompt tokens that no engine computed this turn."""

import json
import logging
from collections.abc import Sequence
from typing import Any

import pytest
from recorded_spans import export_of
from response_engine import RESPONSES, USAGE, offer_responses
from router_harness import router, turn_body
from stub_engine import CHAT, COMPLETIONS

from kvturn.tracing import Tracing

BODIES = {
    CHAT: turn_body(),
    COMPLETIONS: turn_body(messages=..., prompt="What is the capital?"),
    RESPONSES: {"model": "m", "input": "What is the capital?"},
}
REPORT = {"verdict": "reused", "prompt_tokens": 48}


class Recorder:
    """Keeps the spans that it is given."""

    def __init__(self) -> None:
        self._spans: list[bytes] = []

    def export(self, spans: Sequence[bytes]) -> bool:
        self._spans += spans
        return True

    def shutdown(self) -> None:
        return

    def turn(self) -> dict[str, int]:
        """Returns the whole numbers that the only turn's span has for attributes."""
        spans = export_of(self._spans).resource_spans[0].scope_spans[0].spans
        [turn] = [span for span in spans if span.name == "turn"]
        return {one.key: one.value.int_value for one in turn.attributes}


def usage_in(text: bytes, path: str, *, stream: bool) -> dict[str, Any]:
    """Returns the usage that an answer ends with."""
    if not stream:
        return dict(json.loads(text)["usage"])
    lines = [line for line in text.decode().splitlines() if line.startswith("data: {")]
    last = json.loads(lines[-1].removeprefix("data: "))
    return dict(last["response"]["usage"] if path == RESPONSES else last["usage"])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES])
@pytest.mark.parametrize(
    ("report", "counted", "handed", "decodes", "told"),
    [
        (REPORT | {"reused_tokens": 30, "local_tokens": 2}, 9, True, 48, 32),
        (REPORT | {"reused_tokens": 0, "local_tokens": 0}, 0, True, 48, 0),
        (None, 32, True, 48, 32),
        (None, None, True, 48, 0),
        (None, 4000, True, 48, 48),
        # Prefill handed nothing over: both computed the prompt, but for what both had.
        (None, 32, False, 16, 16),
        (None, 0, False, 48, 0),
    ],
)
async def test_every_way_of_asking_is_told_the_same(
    path, stream, report, counted, handed, decodes, told
):
    """In each API, streamed and not: the same number, in the usage and in the trace."""
    recorder = Recorder()
    tracing = Tracing(recorder, logging.getLogger("kvturn.test"))
    async with router(tracing=tracing) as rig:
        rig.prefill.report, rig.prefill.cached_tokens = report, counted
        if not handed:
            rig.prefill.handle = None
        usage = rig.decode.usage() | {"prompt_tokens_details": {"cached_tokens": decodes}}
        rig.decode.usage = lambda: usage
        if path == RESPONSES:
            for engine in (rig.prefill, rig.decode):
                offer_responses(
                    engine, USAGE | {"input_tokens_details": {"cached_tokens": decodes}}
                )
        body = BODIES[path] | {"stream": stream}
        if stream and path != RESPONSES:
            body["stream_options"] = {"include_usage": True}
        answer = await rig.post(body, path)
    details = "input_tokens_details" if path == RESPONSES else "prompt_tokens_details"
    assert usage_in(answer.body, path, stream=stream)[details] == {"cached_tokens": told}
    if report is not None:
        names = ("x-kvturn-reused-tokens", "x-kvturn-local-tokens")
        assert sum(int(answer.headers[name]) for name in names) == told
    tracing.flush()
    traced = recorder.turn()
    assert traced["gen_ai.usage.cache_read.input_tokens"] == told
    assert traced["gen_ai.usage.input_tokens"] == 48


async def test_decodes_own_number_stands_where_it_works_alone():
    """n = 2: nobody else computed anything."""
    async with router() as rig:
        answer = await rig.post(turn_body(n=2))
        assert answer.json["usage"]["prompt_tokens_details"] == {"cached_tokens": 48}
