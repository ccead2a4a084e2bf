"""Names of engines that are looked up, among them some whose DNS does not answer."""

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from router_harness import router
from stub_engine import GUARD_S, StubEngine

from kvturn_router.engines import host_lookup
from kvturn_router.engines.host_lookup import HostLookup

SLOW = 40


class Dns:
    """Looks names up in the system's place: `well` leads here, slow ones nowhere until it ends."""

    def __init__(self) -> None:
        self.ended = threading.Event()
        self.asked: list[str] = []
        self._system = socket.getaddrinfo

    def getaddrinfo(self, host: Any, port: Any, *more: Any, **named: Any) -> Any:
        if host == "well":
            self.asked.append(host)
            return self._system("127.0.0.1", port, *more, **named)
        if isinstance(host, str) and host.startswith("slow"):
            self.asked.append(host)
            self.ended.wait(GUARD_S)
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return self._system(host, port, *more, **named)


@pytest.fixture
def dns(monkeypatch: pytest.MonkeyPatch) -> Iterator[Dns]:
    names = Dns()
    monkeypatch.setattr(socket, "getaddrinfo", names.getaddrinfo)
    yield names
    names.ended.set()


async def test_slow_names_hold_up_no_other(dns: Dns) -> None:
    """However many there are: an engine's name that is well is found meanwhile."""
    slow = [asyncio.ensure_future(HostLookup(f"slow-{n}").addresses()) for n in range(SLOW)]
    async with asyncio.timeout(GUARD_S):
        assert await HostLookup("well").addresses() == ["127.0.0.1"]
    assert not any(one.done() for one in slow)
    dns.ended.set()
    answers = await asyncio.gather(*slow, return_exceptions=True)
    assert {str(answer) for answer in answers} == {"[Errno -2] Name or service not known"}


async def test_an_address_is_not_looked_up(dns: Dns) -> None:
    for host in ("127.0.0.1", "::1"):
        assert list(await HostLookup(host).addresses()) == [host]
    assert not dns.asked


async def test_all_who_wait_get_one_answer(dns: Dns) -> None:
    """A name is looked up once at a time; afterwards anew, because it may lead elsewhere."""
    lookup = HostLookup("slow")
    both = [asyncio.ensure_future(lookup.addresses()) for _ in range(2)]
    await asyncio.sleep(0)
    assert lookup.is_asked
    dns.ended.set()
    await asyncio.gather(*both, return_exceptions=True)
    assert not lookup.is_asked
    assert dns.asked == ["slow"]
    with contextlib.suppress(OSError):
        await lookup.addresses()
    assert dns.asked == ["slow", "slow"]


async def test_who_waits_no_longer_leaves_no_fault_behind(dns: Dns) -> None:
    """The others still get the answer; of one that nobody waits for nothing is said."""
    complaints: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, told: complaints.append(told))
    lookup = HostLookup("slow")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await lookup.addresses()
    waiting = asyncio.ensure_future(lookup.addresses())
    await asyncio.sleep(0)
    dns.ended.set()
    with pytest.raises(OSError, match="not known"):
        await waiting
    alone = HostLookup("slow-2")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await alone.addresses()
    if alone._asked is not None:
        await asyncio.wait([alone._asked])
    assert not complaints


async def test_more_names_at_once_than_there_are_places_are_refused(
    dns: Dns, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a place is free again when its look-up ends."""
    monkeypatch.setattr(host_lookup, "_places", threading.BoundedSemaphore(1))
    first = asyncio.ensure_future(HostLookup("slow").addresses())
    await asyncio.sleep(0)
    with pytest.raises(OSError, match="being looked up already"):
        await HostLookup("well").addresses()
    dns.ended.set()
    await asyncio.gather(first, return_exceptions=True)
    assert list(await HostLookup("well").addresses()) == ["127.0.0.1"]


async def test_a_router_works_beside_names_that_nobody_answers_for(
    dns: Dns, caplog: pytest.LogCaptureFixture
) -> None:
    """An engine whose name is well is usable, the log says which are not found, and it ends."""
    engine = await StubEngine("decode").start()
    well = f"http://well:{engine.url.rpartition(':')[2]}"
    slow = [f"--prefill=http://slow-{n}:8200" for n in range(SLOW)]
    try:
        async with asyncio.timeout(2 * GUARD_S):
            async with router(f"--decode={well}", *slow, "--health-timeout-s=0.2") as rig:
                engines = {one.url: one for one in rig.server._fleet}
                await rig.until(lambda: engines[well].usable)
                await rig.until(lambda: "slow-0 could not be looked up within 0.2 s" in caplog.text)
                assert not any(engines[f"http://slow-{n}:8200"].usable for n in range(SLOW))
        assert not dns.ended.is_set()
    finally:
        await engine.stop()
