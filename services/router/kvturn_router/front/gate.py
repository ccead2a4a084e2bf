"""How many turns are served, and other questions answered, at once, over all fronts."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Final

from kvturn_router.errors import TurnError

QUESTIONS_MAX: Final = 1024
"""Questions that are no turns (models, conversations) at once."""

QUESTION_S: Final = 15.0
"""How long the answer to one may take."""


def shutting_down() -> TurnError:
    """Returns what is told to turns that this router begins or goes on with no more."""
    return TurnError(503, "The router is shutting down.", reason="DRAINING", retry_after_s=1)


class Gate:
    """Lets at most `turns_max` turns in at once, and none once it is closed.

    Of other questions it lets `questions_max` in, each for `question_s` seconds.
    `draining` tells those who ask that it will be closed soon.
    """

    def __init__(
        self,
        turns_max: int,
        *,
        questions_max: int = QUESTIONS_MAX,
        question_s: float = QUESTION_S,
    ) -> None:
        assert turns_max >= 1
        self.turns_max = turns_max
        self._questions_max = questions_max
        self._question_s = question_s
        self.turns = 0
        self._questions = 0
        self.draining = False
        self._closed = False
        self._emptied = asyncio.Event()

    def enter(self) -> None:
        """Counts a turn in; `leave` must follow. Raises TurnError 429 or 503."""
        if self._closed:
            raise shutting_down()
        if self.turns >= self.turns_max:
            raise TurnError(
                429,
                f"{self.turns_max} turns are being served, which is the most at once.",
                reason="TOO_MANY_TURNS",
                retry_after_s=1,
            )
        self.turns += 1

    def leave(self) -> None:
        """Counts a turn out."""
        self.turns -= 1
        if not self.turns:
            self._emptied.set()

    @contextlib.asynccontextmanager
    async def question(self) -> AsyncIterator[None]:
        """Counts a question in for as long as the block lasts, and bounds how long that is.

        Raises TurnError 429 for one too many, 504 when the time is over.
        """
        if self._questions >= self._questions_max:
            raise TurnError(
                429,
                f"{self._questions_max} questions are being answered, which is the most at once.",
                reason="TOO_MANY_QUESTIONS",
                retry_after_s=1,
            )
        self._questions += 1
        try:
            async with asyncio.timeout(self._question_s):
                yield
        except TimeoutError:
            raise TurnError(
                504, f"There was no answer within {self._question_s:g} s.", reason="TOO_SLOW"
            ) from None
        finally:
            self._questions -= 1

    def close(self) -> None:
        """Lets no more turns in."""
        self.draining = self._closed = True
        self._emptied.clear()

    async def empty(self) -> None:
        """Waits until no turn is being served; it must be closed."""
        assert self._closed
        if self.turns:
            await self._emptied.wait()
