"""Requests that only release what prefill holds for turns that are over.

Decode fetches a turn's KV and computes one token that nobody gets. Many clients
may leave at once: some releases are under way at a time, the others wait.
"""

import asyncio
import contextlib
import logging
from collections import deque
from enum import StrEnum
from typing import Final, NamedTuple

from kvturn.metrics import Family, PageWriter
from kvturn.tracing import Span
from kvturn_router.engines.engine_http import ConnectFault, EngineFault
from kvturn_router.engines.fleet import Engine, Fleet
from kvturn_router.request.intake import TurnRequest
from kvturn_router.turn.legs import Legs, whole_body

logger = logging.getLogger("kvturn.router.releases")

AT_ONCE: Final = 256
"""Releases under way at once."""

WAITING_MAX: Final = 4096
"""Releases that wait for these."""

WAITING_BYTES_MAX: Final = 256 << 20
"""Bytes of their prompts."""

RELEASES: Final = Family(
    "kvturn_router_releases_total",
    "counter",
    "Requests that had decode fetch, and so release, what prefill held for a turn that was over: "
    "done, failed, or dropped because too many waited or the router ended.",
    ("outcome",),
)


class _Outcome(StrEnum):
    DONE = "done"
    FAILED = "failed"
    DROPPED = "dropped"


class _Release(NamedTuple):
    engine: Engine
    request: TurnRequest
    parts: list[bytes]
    span: Span
    size: int


class Releases:
    """Sends releases. `silence_s` bounds an engine's silence on one."""

    def __init__(self, legs: Legs, fleet: Fleet, *, silence_s: float) -> None:
        self._legs = legs
        self._fleet = fleet
        self._silence_s = silence_s
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._waiting: deque[_Release] = deque()
        self._waiting_bytes = 0
        self._counts = dict.fromkeys(_Outcome, 0)
        self._full = False

    def add(self, engine: Engine, request: TurnRequest, parts: list[bytes], span: Span) -> None:
        """Has `engine`, or if it does not work another one, release what `parts` name.

        `parts` are the body's, `span` is the turn's.
        """
        release = _Release(engine, request, parts, span, sum(map(len, parts)))
        if len(self._tasks) < AT_ONCE:
            self._start(release)
        elif (
            len(self._waiting) < WAITING_MAX
            and self._waiting_bytes + release.size <= WAITING_BYTES_MAX
        ):
            self._waiting.append(release)
            self._waiting_bytes += release.size
        else:
            self._drop()

    async def finish(self, within_s: float) -> None:
        """Waits for all, at most so long, and gives up those that are left."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while self._tasks:
                    await asyncio.wait(self._tasks)
        left = len(self._tasks) + len(self._waiting)
        if left:
            logger.warning(
                "%d releases of what prefill holds are given up, as the router ends", left
            )
        self._counts[_Outcome.DROPPED] += left
        self._waiting.clear()
        tasks = [*self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def write(self, page: PageWriter) -> None:
        """Writes down what was counted up to now."""
        for outcome, count in self._counts.items():
            page.put(RELEASES, count, outcome.value)

    def _start(self, release: _Release) -> None:
        task = self._loop.create_task(self._send(release))
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if self._waiting:
            release = self._waiting.popleft()
            self._waiting_bytes -= release.size
            self._start(release)
        else:
            self._full = False

    def _drop(self) -> None:
        self._counts[_Outcome.DROPPED] += 1
        if not self._full:  # Once, until all that wait are through.
            self._full = True
            logger.warning(
                "%d releases of what prefill holds wait, which is the most: prefill frees what "
                "more would release when its own time for it is over",
                len(self._waiting),
            )

    async def _send(self, release: _Release) -> None:
        self._counts[await self._outcome_of(release)] += 1

    async def _outcome_of(self, release: _Release) -> _Outcome:
        for engine in dict.fromkeys((release.engine, *self._fleet.decodes)):
            if not engine.usable:
                continue
            try:
                exchange = await self._legs.send(
                    engine,
                    release.request,
                    release.request.path,
                    release.parts,
                    release.span,
                    silence_s=self._silence_s,
                    # It may have been fetched: what prefill held may be another's by now.
                    again_if_stale=False,
                )
                await whole_body(exchange)
            except ConnectFault as fault:
                self._fleet.refused(engine, str(fault))
            except EngineFault:
                return _Outcome.FAILED
            else:
                return _Outcome.DONE if exchange.status == 200 else _Outcome.FAILED
        return _Outcome.FAILED
