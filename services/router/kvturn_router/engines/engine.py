"""One engine: where it listens, its connections, its load, whether it may be given turns."""

from typing import TYPE_CHECKING, Final

from kvturn.address import EngineAddress
from kvturn.tls import ClientTls
from kvturn_router.engines.engine_http import EnginePool, Exchange, request_bytes
from kvturn_router.engines.health import Health

if TYPE_CHECKING:
    from kvturn_router.engines.loads import Loads

PREFILL: Final = "prefill"
DECODE: Final = "decode"
BOTH: Final = "both"


class Engine:
    """One engine. `tls` is for an `https://` address alone.

    `in_flight_max` is how many requests it is given at once, None for any
    number.
    """

    def __init__(
        self,
        address: EngineAddress,
        *,
        health: Health,
        connect_timeout_s: float,
        in_flight_max: int | None = None,
        tls: ClientTls | None = None,
    ) -> None:
        assert tls is not None or not address.secure
        self.url = address.url
        self.role = ""
        """"prefill", "decode" or "both"; empty while it serves neither."""
        self.health = health
        self.in_flight = 0
        """Requests that it has been given and has not answered."""
        self.served = 0
        """Requests that it has been given."""
        self.draining = False
        """Whether it is to be given no new turns, though it works."""
        self.loads: tuple[Loads[Engine], ...] = ()
        """Where its load counts."""
        self.pool = EnginePool(
            address.host,
            address.port,
            connect_timeout_s=connect_timeout_s,
            tls=tls.context if tls is not None and address.secure else None,
        )
        host = f"[{address.host}]" if ":" in address.host else address.host
        self.host_header = (b"host", f"{host}:{address.port}".encode())
        self._in_flight_max = in_flight_max

    @property
    def usable(self) -> bool:
        """Whether it works, as far as is known."""
        return self.health.usable

    @property
    def available(self) -> bool:
        """Whether it may be given new turns, as soon as it has room for them."""
        return self.health.usable and not self.draining

    @property
    def open(self) -> bool:
        """Whether it may be given a new turn now."""
        full = self._in_flight_max is not None and self.in_flight >= self._in_flight_max
        return self.health.usable and not self.draining and not full

    def begin(self) -> None:
        """Counts a request that it is given; `end` must follow."""
        self.in_flight += 1
        self.served += 1
        self._count()

    def end(self) -> None:
        """Counts a request that it has answered, or that was given up."""
        self.in_flight -= 1
        self._count()

    def _count(self) -> None:
        if self._in_flight_max is None:
            for loads in self.loads:
                loads.counted(self)
        else:
            self.changed()

    def changed(self) -> None:
        """Must be called after any change of `draining` or of its health."""
        for loads in self.loads:
            loads.changed(self)

    async def get(self, path: bytes, *, authorization: bytes | None, silence_s: float) -> Exchange:
        """Sends a GET and returns its exchange, answered. Raises EngineFault."""
        return await self.ask(b"GET", path, authorization=authorization, silence_s=silence_s)

    async def ask(
        self, method: bytes, path: bytes, *, authorization: bytes | None, silence_s: float
    ) -> Exchange:
        """Sends a request without a body; returns its exchange, answered. Raises EngineFault.

        It must be one that may be sent twice: it is sent again, on a new connection, if it is lost
        on one used before without a byte of an answer.
        """
        headers = [self.host_header]
        if authorization is not None:
            headers.append((b"authorization", authorization))
        request = request_bytes(method, path, headers)
        return await self.pool.answered(lambda: request, silence_s=silence_s)
