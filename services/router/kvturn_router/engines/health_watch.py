"""Asks engines after their health, each at its own time.

How many there are changes only how many are asked in an interval: at most
`ASKED_AT_ONCE` at a time, and after the first round spread over the interval.
Engines that are out, and may not answer at all, take up at most half of that.

What takes long is not dead: an engine of which something of a turn came since
it was asked is well, however late its health answer. Nor is an engine blamed
where the router itself came late to look.
"""

import asyncio
from collections.abc import Callable
from typing import Final

from kvturn_router.engines.engine import Engine
from kvturn_router.engines.engine_http import LATE, EngineFault, SilentFault
from kvturn_router.engines.engine_key import EngineKey
from kvturn_router.engines.fleet import Fleet

ASKED_AT_ONCE: Final = 32
"""Engines asked at a time."""

ROUTER_MARK: Final = b"x-kvturn-router"
"""Header of a router's own health answer: one that were an engine of its own, or of another that
is its engine, would ask itself for ever."""

_HEALTH_BODY_MAX: Final = 64 << 10
_TICKS: Final = 32
"""Most looks per interval at who is due."""
_LOOKS: Final = 4
"""Least looks per interval: what is over is ended then, and those that have answered are seen."""


class HealthWatch:
    """Asks from `start` to `stop`, and looks who is due only when somebody is.

    `key` is the router's own for engines.
    """

    def __init__(
        self,
        fleet: Fleet,
        *,
        key: EngineKey,
        interval_s: float,
        timeout_s: float,
        clock_ns: Callable[[], int],
    ) -> None:
        self._fleet = fleet
        self._key = key
        self._pauses_s = (interval_s / _TICKS, interval_s / _LOOKS)
        self._timeout_s = timeout_s
        self._clock_ns = clock_ns
        self._asking: dict[Engine, asyncio.Task[None]] = {}
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        fleet.due = self._look_soon

    def start(self) -> None:
        """Begins to ask, every engine at once to begin with."""
        self._look()

    async def stop(self) -> None:
        """Stops asking."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        tasks = [*self._asking.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _look_soon(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = self._loop.call_later(0, self._look)

    def _look(self) -> None:
        least_s, most_s = self._pauses_s
        # First, so that it goes on whatever happens.
        self._timer = self._loop.call_later(most_s, self._look)
        now_ns = self._clock_ns()
        next_ns = now_ns + round(most_s * 1e9)
        for engine in self._fleet:
            if engine in self._asking:
                continue
            if engine.health.due_ns <= now_ns and self._has_room_for(engine):
                self._ask(engine)
            else:
                next_ns = min(next_ns, engine.health.due_ns)
        self._timer.cancel()
        pause_s = max((next_ns - now_ns) / 1e9, least_s)
        self._timer = self._loop.call_later(pause_s, self._look)

    def _has_room_for(self, engine: Engine) -> bool:
        if engine.usable:
            return len(self._asking) < ASKED_AT_ONCE
        out = sum(not one.usable for one in self._asking)
        return out < ASKED_AT_ONCE // 2

    def _ask(self, engine: Engine) -> None:
        engine.pool.sweep(self._loop.time())
        task = self._asking[engine] = self._loop.create_task(self._asked(engine))
        task.add_done_callback(lambda _: self._asking.pop(engine))

    async def _asked(self, engine: Engine) -> None:
        began = self._loop.time()
        try:
            fault = await self._fault_of(engine)
        except (TimeoutError, SilentFault):
            if self._loop.time() - began > (1 + LATE) * self._timeout_s:
                return  # Still due, and asked again at the next look.
            heard = engine.pool.heard_at > began
            fault = None if heard else engine.pool.no_answer("health answer", self._timeout_s)
        if fault is None:
            self._fleet.seen_well(engine)
        else:
            self._fleet.seen_badly(engine, fault)

    async def _fault_of(self, engine: Engine) -> str | None:
        """Returns what is wrong, None if nothing. Raises TimeoutError, SilentFault: no answer."""
        began = False
        try:
            async with asyncio.timeout(self._timeout_s):
                exchange = await engine.get(
                    b"/health", authorization=self._key.authorization, silence_s=self._timeout_s
                )
                began = True
                try:
                    await exchange.body(_HEALTH_BODY_MAX)
                finally:
                    exchange.close()
        except (TimeoutError, SilentFault):
            if began:  # What was heard of it may be no more than that.
                return f"its health answer did not end within {self._timeout_s:g} s"
            raise
        except EngineFault as error:
            return str(error)
        if exchange.header(ROUTER_MARK):
            return "it is a kvturn router, not an engine"
        return None if exchange.status == 200 else f"its health answer is {exchange.status}"
