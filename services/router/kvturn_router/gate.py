"""How many turns are served at once, over all fronts."""

import asyncio

from kvturn_router.errors import TurnError


class Gate:
    """Lets at most `turns_max` turns in at once, and none once it is closed.

    `draining` tells those who ask that it will be closed soon.
    """

    def __init__(self, turns_max: int) -> None:
        assert turns_max >= 1
        self._turns_max = turns_max
        self.turns = 0
        self.draining = False
        self._closed = False
        self._emptied = asyncio.Event()

    def enter(self) -> None:
        """Counts a turn in; `leave` must follow. Raises TurnError 429 or 503."""
        if self._closed:
            raise TurnError(503, "The router is shutting down.", reason="DRAINING", retry_after_s=1)
        if self.turns >= self._turns_max:
            raise TurnError(
                429,
                f"{self._turns_max} turns are being served, which is the most at once.",
                reason="TOO_MANY_TURNS",
                retry_after_s=1,
            )
        self.turns += 1

    def leave(self) -> None:
        """Counts a turn out."""
        self.turns -= 1
        if not self.turns:
            self._emptied.set()

    def close(self) -> None:
        """Lets no more turns in."""
        self.draining = self._closed = True
        self._emptied.clear()

    async def empty(self) -> None:
        """Waits until no turn is being served; it must be closed."""
        assert self._closed
        if self.turns:
            await self._emptied.wait()
