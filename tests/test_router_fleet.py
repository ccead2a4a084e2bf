"""A router whose engines come and go while it runs."""

from router_harness import FakeLease, announcement, router, turn_body
from stub_engine import StubEngine


async def test_engines_that_announce_themselves_need_no_flags():
    """Two of each role have a session with the lease service; turns go to all of them."""
    async with router(prefills=2, decodes=2, lease=FakeLease(), announced=True) as rig:
        await rig.until(lambda: sum(engine.usable for engine in rig.server._fleet) == 4)
        for _ in range(8):
            assert (await rig.post(turn_body())).status == 200
        assert [len(engine.turns) for engine in (*rig.prefills, *rig.decodes)] == [4] * 4


async def test_an_engine_that_joins_is_given_turns_once_it_is_healthy():
    """It announces itself while it still loads; until then there is none for the role."""
    joining = await StubEngine("decode").start()
    joining.healthy = False
    try:
        async with router(decodes=1, lease=FakeLease(), announced=True) as rig:
            await rig.decode.stop()
            await rig.lease.push(engines=[announcement(joining)])
            await rig.until(lambda: len(list(rig.server._fleet)) == 3)
            assert (await rig.post(turn_body())).status == 503
            assert joining.turns == []
            joining.healthy = True
            await rig.until_ready()
            assert (await rig.post(turn_body())).status == 200
            assert len(joining.turns) == 1
    finally:
        await joining.stop()


async def test_an_engine_that_comes_is_asked_after_its_health_at_once():
    """The usual time between two questions is an hour, and so is that between two looks."""
    coming = await StubEngine("decode").start()
    try:
        async with router("--health-interval-s=3600", lease=FakeLease()) as rig:
            await rig.lease.push(engines=[announcement(coming)])
            await rig.until(lambda: len([one for one in rig.server._fleet if one.usable]) == 3)
    finally:
        await coming.stop()


async def test_an_engine_survives_the_end_of_the_lease_service():
    """The service is gone: the engines that it named still serve, recomputing."""
    async with router(lease=FakeLease(), announced=True) as rig:
        await rig.lease.stop()
        for _ in range(3):
            answer = await rig.post(turn_body())
            assert (answer.status, answer.verdict) == (200, "lease_service_unreachable")
        assert (await rig.ask("GET", "/ready")).status == 200


async def test_a_hundred_engines_share_the_turns():
    """Fifty of each role, two hundred turns: four each."""
    async with router("--health-interval-s=0.5", prefills=50, decodes=50) as rig:
        await rig.until(lambda: all(engine.usable for engine in rig.server._fleet))
        for _ in range(200):
            assert (await rig.post(turn_body())).status == 200
        assert {len(engine.turns) for engine in (*rig.prefills, *rig.decodes)} == {4}
