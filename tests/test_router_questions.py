"""What the router asks engines beside turns, while engines and their connections come and go."""

import asyncio

import pytest
from response_engine import RESPONSES, offer_responses
from router_harness import router, turn_body
from stub_engine import Reply, Seen

MODELS = "/v1/models"


async def close(seen: Seen, reply: Reply) -> None:
    """Closes a kept connection just as a request comes."""
    reply.close()


async def cut(seen: Seen, reply: Reply) -> None:
    """Dies in the midst of its answer."""
    await reply.raw(
        b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 500\r\n\r\n{"
    )
    reply.abort()


async def test_models_that_are_lost_on_a_kept_connection_are_asked_for_again():
    """The engine is well and closed it for being idle: it is asked once more, on a new one."""
    async with router("--health-interval-s=60") as rig:
        await rig.post(turn_body())
        rig.decode.script_once(MODELS, close)
        assert (await rig.ask("GET", MODELS)).status == 200
        assert [seen.path for seen in rig.decode.seen].count(MODELS) == 2
        assert not [seen for seen in rig.prefill.seen if seen.path == MODELS]


async def test_a_response_that_is_lost_on_a_kept_connection_is_asked_for_again():
    """Only the engine that keeps it can tell it."""
    async with router("--health-interval-s=60") as rig:
        for engine in (rig.prefill, rig.decode):
            offer_responses(engine)
        made = await rig.post({"model": "m", "input": "Hello.", "store": True}, RESPONSES)
        path = f"{RESPONSES}/{made.json['id']}"
        rig.decode.script_once(path, close)
        assert (await rig.ask("GET", path)).status == 200


async def test_a_health_question_that_is_lost_on_a_kept_connection_says_nothing():
    """Not even one failure is allowed here, and it is none."""
    async with router("--health-failures=1") as rig:
        fleet = rig.server._fleet
        engine = fleet.holder(rig.decode.url)
        assert engine is not None
        outs: list[str] = []
        refused = engine.health.answered_badly
        engine.health.answered_badly = lambda why, now_ns: (outs.append(why), refused(why, now_ns))
        lost = asyncio.Event()

        async def lose(seen: Seen, reply: Reply) -> None:
            lost.set()
            reply.close()

        rig.decode.script_once("/health", lose)
        await lost.wait()
        asked = len(rig.decode.seen)
        await rig.until(lambda: len(rig.decode.seen) >= asked + 3)
        assert outs == []


@pytest.mark.parametrize("how", ["killed", "cut", "lost"])
async def test_models_are_asked_of_another_engine(how: str):
    """The first decode engine is gone, or does not answer to the end: the second one does."""
    async with router("--health-interval-s=60", decodes=2) as rig:
        first, second = rig.decodes
        if how == "killed":
            await first.stop()
        else:
            first.script(MODELS, cut if how == "cut" else close)
        for _ in range(3):
            assert (await rig.ask("GET", MODELS)).status == 200
        asked = [seen.path for seen in second.seen].count(MODELS)
        assert asked == 3
        # One that refuses connections is out, for turns too, before anybody asks after its health.
        out = [view.url for view in rig.server._fleet.views() if not view.usable]
        assert out == ([first.url] if how == "killed" else [])


async def test_models_that_no_engine_tells_are_an_error():
    """502 with what the last one did; once it is known that there is none, 503."""
    async with router("--health-interval-s=60") as rig:
        await rig.prefill.stop()
        await rig.decode.stop()
        assert [(await rig.ask("GET", MODELS)).status for _ in range(2)] == [502, 503]


async def test_an_engine_that_is_gone_is_found_by_a_question_for_its_response():
    """502, for only that engine keeps it; the next turn is not given to it."""
    async with router("--health-interval-s=60", decodes=2) as rig:
        for engine in (rig.prefill, *rig.decodes):
            offer_responses(engine)
        made = await rig.post({"model": "m", "input": "Hello.", "store": True}, RESPONSES)
        path = f"{RESPONSES}/{made.json['id']}"
        keeper = next(one for one in rig.decodes if RESPONSES in [seen.path for seen in one.seen])
        await keeper.stop()
        assert (await rig.ask("GET", path)).status == 502
        out = [view.url for view in rig.server._fleet.views() if not view.usable]
        assert out == [keeper.url]
