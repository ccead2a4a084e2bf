"""Ends a prefill leg whose KV read is stuck.

Prefill may use a read only within the longest read, but it cannot stop one, and
its blocks stay reserved until the transfer has ended. The router can: it gives
the leg up and sends the turn again without the lease.
"""

import asyncio

from kvturn_router.engines.engine_http import EngineFault, Exchange
from kvturn_router.leases.lease_client import LeaseClient


class StuckReadFault(EngineFault):
    """The read under the leg's lease is past the longest read."""


class ReadWatch:
    """Watches the read under one lease while its prefill leg is out.

    Asks the lease service first after `longest_read_ms` + `margin_ms`, so that a
    turn in time costs no question. An answer that does not come proves nothing:
    then it asks again. A leader that came after the read began knows nothing of
    it, whether or not it knows the lease: then the leg is given up, for the
    read may be stuck for good.
    """

    def __init__(
        self, lease: LeaseClient, lease_id: str, *, longest_read_ms: int, margin_ms: int
    ) -> None:
        self._lease = lease
        self._lease_id = lease_id
        self._longest_read_ms = longest_read_ms
        self._margin_s = margin_ms / 1000
        self._leader_changes = lease.leader_changes
        self._exchange: Exchange | None = None
        self._task: asyncio.Task[None] | None = None
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(longest_read_ms / 1000 + self._margin_s, self._begin)

    def over(self, exchange: Exchange) -> None:
        """Names the exchange to give up."""
        self._exchange = exchange

    def stop(self) -> None:
        """Ends the watch."""
        self._timer.cancel()
        if self._task is not None:
            self._task.cancel()

    def _begin(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._ask())

    async def _ask(self) -> None:
        while True:
            state = await self._lease.read_state(self._lease_id)
            reading_ms = state.reading_ms if state is not None else None
            if reading_ms is not None and reading_ms > self._longest_read_ms:
                break
            if state is not None and reading_ms is None:
                if self._lease.leader_changes != self._leader_changes:
                    break
                if state.over:
                    return
            left_s = (self._longest_read_ms - (reading_ms or 0)) / 1000
            await asyncio.sleep(max(left_s, 0) + self._margin_s if reading_ms else self._margin_s)
        if self._exchange is not None:
            self._exchange.fail(
                StuckReadFault(f"its KV read is out for more than {self._longest_read_ms} ms")
            )
