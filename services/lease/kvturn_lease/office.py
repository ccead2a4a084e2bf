"""What a lease service does as the leader: a lessor and a store of its own for each term."""

from __future__ import annotations

import logging
import secrets
from typing import TYPE_CHECKING

from kvturn_lease.errors import NotLeader
from kvturn_lease.lessor import Lessor

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvturn_lease.config import LessorConfig
    from kvturn_lease.errors import LeaseServiceError
    from kvturn_lease.etcd_store import Fence
    from kvturn_lease.server import LeaseServer
    from kvturn_lease.servicer import LeaseServicer
    from kvturn_lease.store import Store

logger = logging.getLogger("kvturn.lease")


def new_term() -> int:
    """Returns a number that no term had before, but for a chance of one in 2**64."""
    return secrets.randbits(64) or 1


class LeaderOffice:
    """Puts a lessor and a store into the servicer for each term, and takes them out after it."""

    def __init__(
        self,
        config: LessorConfig,
        servicer: LeaseServicer,
        server: LeaseServer,
        clock_ns: Callable[[], int],
        open_store: Callable[[Fence], Store],
    ) -> None:
        """`open_store` makes the store of one term."""
        self._config = config
        self._servicer = servicer
        self._server = server
        self._clock_ns = clock_ns
        self._open_store = open_store
        self._store: Store | None = None
        self._lessor: Lessor | None = None
        self._until_ns = 0

    async def assume(self, fence: Fence, until_ns: int) -> None:
        """Begins a term: who is fenced is read before anything is said. Raises EtcdError."""
        self._until_ns = until_ns
        self._store = store = self._open_store(fence)
        snapshot = await store.load()
        lessor = Lessor(
            self._config, new_term(), term_ends_ns=self._until_ns, tally=self._servicer.tally
        )
        lessor.restore(snapshot, self._clock_ns())
        self._lessor = lessor
        self._servicer.lead(lessor, store)
        await self._server.set_leading(True)
        logger.info("leading: term %d, %d engines known", lessor.term, len(snapshot.sessions))

    def extend(self, until_ns: int) -> bool:
        """Extends the term; False if the lessor has already ended it."""
        self._until_ns = until_ns
        if self._lessor is None:
            return True  # it will begin with that
        self._lessor.lead_until(until_ns)
        return not self._lessor.deposed

    async def vacate(self) -> None:
        """Ends the term: refuses everything at once, ends the sessions, closes the store."""
        self._servicer.stand_by(NotLeader())
        self._lessor = None
        await self._server.set_leading(False)
        store, self._store = self._store, None
        if store is not None:
            await store.close()

    def stand_by(self, refusal: LeaseServiceError) -> None:
        """Says how to refuse from now on."""
        self._servicer.stand_by(refusal)
