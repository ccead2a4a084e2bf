"""How many bytes of request bodies may be in memory at once, over all fronts."""

import contextlib
from collections.abc import Iterator

from kvturn_router.errors import TurnError


class BodyBudget:
    """Bytes for bodies, from their first until their turn's answer begins.

    `left` is what may still come; whoever takes of it gives it back.
    """

    __slots__ = ("bytes_max", "left")

    def __init__(self, bytes_max: int) -> None:
        assert bytes_max >= 1
        self.bytes_max = bytes_max
        self.left = bytes_max

    def exhausted(self) -> TurnError:
        """Returns the refusal of a body for which nothing is left."""
        return TurnError(
            503,
            f"The bodies of all requests have {self.bytes_max} bytes, which is the most at once.",
            reason="BODIES_EXHAUSTED",
            retry_after_s=1,
        )

    @contextlib.contextmanager
    def holding(self, size: int) -> Iterator[None]:
        """Takes so many bytes for as long as the block lasts. Raises TurnError 503."""
        if size > self.left:
            raise self.exhausted()
        self.left -= size
        try:
            yield
        finally:
            self.left += size
