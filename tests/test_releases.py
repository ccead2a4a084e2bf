"""Releases of what prefill holds for turns that are over: many at once, and at the router's end."""

import asyncio
import json
import logging
from typing import TYPE_CHECKING, Any, cast

import pytest
from router_harness import router, turn_body
from stub_engine import CHAT, Reply, Seen

from kvturn.metrics import PageWriter
from kvturn.tracing import Span
from kvturn_router.engines.engine_http import ConnectFault, LostFault
from kvturn_router.front.http_wire import Listener
from kvturn_router.turn import releases
from kvturn_router.turn.releases import RELEASES, Releases

if TYPE_CHECKING:
    from kvturn_router.engines.fleet import Engine, Fleet
    from kvturn_router.request.intake import TurnRequest
    from kvturn_router.turn.legs import Legs


class Answered:
    """An exchange whose answer is whole."""

    framed = True

    def __init__(self, status: int) -> None:
        self.status = status

    def header(self, name: bytes) -> bytes:
        return b""

    async def body(self, bytes_max: int) -> bytes:
        return b"{}"


class Decode:
    """A decode engine, and the leg to it."""

    def __init__(self, status: int = 200, fault: Exception | None = None) -> None:
        self.usable = True
        self.answer = Answered(status)
        self.fault = fault
        self.asked = 0


class World:
    """Legs and a fleet; no answer comes while `open` is not set."""

    def __init__(self, *decodes: Decode) -> None:
        self.decodes = decodes
        self.open = asyncio.Event()
        self.under_way = self.most = 0
        self.releases = Releases(cast("Legs", self), cast("Fleet", self), silence_s=300)

    async def send(self, engine: Decode, *_: object, **__: object) -> Answered:
        engine.asked += 1
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        try:
            await self.open.wait()
        finally:
            self.under_way -= 1
        if engine.fault is not None:
            raise engine.fault
        return engine.answer

    def refused(self, engine: Decode, why: str) -> None:
        engine.usable = False

    def add(self, number: int, size: int = 10) -> None:
        parts = [b"x" * (size - 1), b"}"]
        engine = cast("Engine", self.decodes[0])
        for _ in range(number):
            self.releases.add(engine, cast("TurnRequest", _Request()), parts, Span())

    @property
    def counts(self) -> tuple[float, ...]:
        """How many are done, failed, dropped."""
        page = PageWriter()
        self.releases.write(page)
        return tuple(cast("float", count) for _, count in page.page[RELEASES.name])

    async def settled(self) -> None:
        async with asyncio.timeout(60):
            while self.releases._tasks:  # noqa: ASYNC110
                await asyncio.sleep(0)


class _Request:
    path = CHAT


async def test_more_than_may_be_under_way_wait():
    """A thousand at once: 256 at a time, and all are done."""
    world = World(Decode())
    world.add(1000)
    await asyncio.sleep(0)
    world.open.set()
    await world.settled()
    assert world.counts == (1000, 0, 0)
    assert world.most == releases.AT_ONCE == 256


@pytest.mark.parametrize(("number", "size"), [(4096, 10), (16, 16 << 20)])
async def test_what_may_not_wait_is_counted_and_told_of_once(
    number: int, size: int, caplog: pytest.LogCaptureFixture
):
    """A limit of their number, and of their bytes; when those that wait are through, it is new."""
    world = World(Decode())
    for round_ in (1, 2):
        world.open.clear()
        world.add(256)
        world.add(number, size)
        assert world.counts[2] == 3 * (round_ - 1)
        world.add(3, size)
        assert world.counts[2] == 3 * round_
        warnings = [one for one in caplog.records if one.name == "kvturn.router.releases"]
        assert len(warnings) == round_
        world.open.set()
        await world.settled()
    assert world.counts == ((256 + number) * 2, 0, 6)


async def test_a_decode_engine_that_is_gone_has_another_release():
    """It refuses the connection, and has seen nothing; the fleet is told."""
    gone, well = Decode(fault=ConnectFault("no connection")), Decode()
    world = World(gone, well)
    world.open.set()
    world.add(1)
    await world.settled()
    assert (world.counts, gone.usable, well.asked) == ((1, 0, 0), False, 1)
    well.usable = False
    world.add(1)
    await world.settled()
    assert world.counts == (1, 1, 0)


@pytest.mark.parametrize("first", [Decode(503), Decode(fault=LostFault("lost", stale=True))])
async def test_what_may_have_been_fetched_is_not_fetched_again(first: Decode):
    """The blocks may be another request's by now."""
    other = Decode()
    world = World(first, other)
    world.open.set()
    world.add(1)
    await world.settled()
    assert (world.counts, other.asked) == ((0, 1, 0), 0)


async def test_at_the_end_those_that_do_not_end_in_time_are_given_up(
    caplog: pytest.LogCaptureFixture,
):
    """Those under way and those that wait, in one line; nothing is left running."""
    world = World(Decode())
    world.add(300)
    await asyncio.sleep(0)
    await world.releases.finish(0.01)
    assert (world.counts, world.under_way) == ((0, 0, 300), 0)
    assert [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING] == [
        "300 releases of what prefill holds are given up, as the router ends"
    ]


async def test_a_router_that_ends_waits_for_releases(monkeypatch: pytest.MonkeyPatch):
    """Its grace ends turns between the legs: decode still fetches what prefill holds for them."""
    ending = asyncio.Event()
    abort = Listener.abort

    def last_of_clients(listener: Listener) -> None:
        ending.set()
        abort(listener)

    monkeypatch.setattr(Listener, "abort", last_of_clients)

    async def play(seen: Seen, reply: Reply) -> None:
        await ending.wait()
        for _ in range(100):  # all that would end without waiting
            await asyncio.sleep(0)
        await rig.decode.decode(seen, reply)

    async with router("--no-grpc") as rig:
        pool = rig.server._fleet.holder(rig.decode.url).pool  # type: ignore[union-attr]
        send = pool.send
        reached = asyncio.Event()

        async def held_up(request: bytes, **kwargs: Any) -> Any:
            if request.startswith(b"POST") and not reached.is_set():
                reached.set()
                await asyncio.Event().wait()
            return await send(request, **kwargs)

        pool.send = held_up  # type: ignore[method-assign]
        rig.decode.script(CHAT, play)
        client = await rig.client()
        await client.send("POST", CHAT, json.dumps(turn_body(stream=True)).encode())
        await reached.wait()
        stopping = asyncio.create_task(rig.server.stop())
        release = await rig.decode.turn(1)
        assert release.json["max_tokens"] == 1
        await stopping
        assert not release.gone.is_set()
        page = PageWriter()
        rig.server._forwarder.releases.write(page)
        assert page.page[RELEASES.name][0] == (["done"], 1)
