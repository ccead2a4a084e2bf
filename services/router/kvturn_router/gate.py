"""How many turns are served at once, over all fronts."""

import asyncio

from kvturn_router.errors import TurnError


class Gate:
    """Lets at most `turns_max` turns in at once, and none while draining."""

    def __init__(self, turns_max: int) -> None:
        assert turns_max >= 1
        self._turns_max = turns_max
        self.turns = 0
        self.draining = False
        self._emptied = asyncio.Event()

    def enter(self) -> None:
        """Counts a turn in; `leave` must follow. Raises TurnError 429 or 503."""
        if self.draining:
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
        if self.draining and not self.turns:
            self._emptied.set()

    async def empty(self) -> None:
        """Waits until no turn is being served; `draining` must be set."""
        assert self.draining
        if self.turns:
            await self._emptied.wait()
