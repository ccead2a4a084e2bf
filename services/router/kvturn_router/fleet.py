"""The engines as last seen.

Each engine is asked for its health at an interval. It is taken out after a few
failures in a row, or at once when it refuses a connection, and comes back with
its next good answer. Engines are out until their first good answer.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence
from typing import Final, NamedTuple
from urllib.parse import urlsplit

from kvturn.tls import ClientTls
from kvturn_router.engine_http import EngineFault, EnginePool, Exchange, request_bytes
from kvturn_router.plan import least_loaded

logger = logging.getLogger("kvturn.router.fleet")

PREFILL: Final = "prefill"
DECODE: Final = "decode"

_HEALTH_BODY_MAX = 64 << 10


class EngineAddress(NamedTuple):
    """Where an engine listens."""

    url: str
    """As given, without a trailing slash."""
    host: str
    port: int

    @property
    def secure(self) -> bool:
        """Whether it is spoken to over TLS."""
        return self.url.startswith("https://")


def engine_address(url: str) -> EngineAddress:
    """Returns the parts of an engine's base URL.

    Raises ValueError, in words that follow the URL, if it is not
    `http://HOST:PORT` or `https://HOST:PORT` with nothing after it.
    """
    parts = urlsplit(url.rstrip("/"))
    if parts.scheme not in ("http", "https"):
        raise ValueError("must begin with http:// or https://")
    port = parts.port or (443 if parts.scheme == "https" else 80)
    if not parts.hostname or parts.path or parts.query or parts.fragment or parts.username:
        raise ValueError("must be http://HOST:PORT and nothing more")
    return EngineAddress(url.rstrip("/"), parts.hostname, port)


class Engine:
    """One engine: its connections, its load and its health.

    `usable` says whether it may be given requests, `in_flight` how many it has
    been given and has not answered, `served` how many it has been given. `tls`
    is for an `https://` address alone.
    """

    def __init__(
        self,
        address: EngineAddress,
        role: str,
        *,
        connect_timeout_s: float,
        tls: ClientTls | None = None,
    ) -> None:
        self.url = address.url
        self.role = role
        self.usable = False
        self.in_flight = 0
        self.served = 0
        assert tls is not None or not address.secure
        self.pool = EnginePool(
            address.host,
            address.port,
            connect_timeout_s=connect_timeout_s,
            tls=tls.context if tls is not None and address.secure else None,
        )
        host = f"[{address.host}]" if ":" in address.host else address.host
        self.host_header = (b"host", f"{host}:{address.port}".encode())
        self._failures = 0
        self._asked = False

    def saw_good(self) -> None:
        """Takes note of a good health answer."""
        self._failures = 0
        self._asked = True
        if not self.usable:
            self.usable = True
            logger.info("%s engine %s is usable", self.role, self.url)

    def saw_fault(self, why: str, *, failures_max: int) -> None:
        """Takes note of a failure; out after `failures_max` in a row."""
        self._failures += 1
        if self._failures >= failures_max or not self._asked:
            if self.usable or not self._asked:
                logger.warning("%s engine %s is not usable: %s", self.role, self.url, why)
            self.usable = False
        self._asked = True

    async def get(self, path: bytes, *, authorization: bytes | None, silence_s: float) -> Exchange:
        """Sends a GET and returns its exchange, answered. Raises EngineFault."""
        headers = [self.host_header]
        if authorization is not None:
            headers.append((b"authorization", authorization))
        request = request_bytes(b"GET", path, headers)
        exchange = await self.pool.send(request, silence_s=silence_s)
        try:
            await exchange.answered()
        except BaseException:
            exchange.close()
            raise
        return exchange


class Fleet:
    """All engines, and the loop that asks after them.

    `authorization` is what the router itself sends to engines, None if nothing.
    `changed` is called after each change of any engine's `usable`.
    """

    def __init__(
        self,
        prefills: Sequence[Engine],
        decodes: Sequence[Engine],
        *,
        authorization: bytes | None,
        health_interval_s: float,
        health_timeout_s: float,
        failures_max: int,
    ) -> None:
        self.prefills = list(prefills)
        self.decodes = list(decodes)
        self.changed: Callable[[], None] = lambda: None
        self._authorization = authorization
        self._health_interval_s = health_interval_s
        self._health_timeout_s = health_timeout_s
        self._failures_max = failures_max
        self._decode_at = {
            _comparable(engine.url): index for index, engine in enumerate(self.decodes)
        }
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begins to ask after every engine, now and at the interval."""
        loop = asyncio.get_running_loop()
        for engine in (*self.prefills, *self.decodes):
            self._tasks.append(loop.create_task(self._watch(engine)))

    async def stop(self) -> None:
        """Stops asking and ends every connection."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for engine in (*self.prefills, *self.decodes):
            engine.pool.close()

    def missing(self) -> list[str]:
        """Returns the roles of which no engine is usable, in the order of a turn."""
        roles = ((PREFILL, self.prefills), (DECODE, self.decodes))
        return [role for role, engines in roles if not any(engine.usable for engine in engines)]

    def holder(self, http_address: str) -> int | None:
        """Returns the index of the decode engine at that address, None if there is none."""
        return self._decode_at.get(_comparable(http_address)) if http_address else None

    def refused(self, engine: Engine, why: str) -> None:
        """Takes out an engine that refused a connection, until it answers again."""
        was = engine.usable
        engine.saw_fault(why, failures_max=1)
        if was:
            self.changed()

    def another(self, engines: Sequence[Engine], tried: Collection[int]) -> int | None:
        """Returns the index of the least loaded usable engine not yet tried, None if none is."""
        return least_loaded(engines, tried)

    async def _watch(self, engine: Engine) -> None:
        loop = asyncio.get_running_loop()
        while True:
            was = engine.usable
            fault = await self._fault_of(engine)
            if fault is None:
                engine.saw_good()
            else:
                engine.saw_fault(fault, failures_max=self._failures_max)
            if engine.usable is not was:
                self.changed()
            engine.pool.sweep(loop.time())
            await asyncio.sleep(self._health_interval_s)

    async def _fault_of(self, engine: Engine) -> str | None:
        try:
            async with asyncio.timeout(self._health_timeout_s):
                exchange = await engine.get(
                    b"/health",
                    authorization=self._authorization,
                    silence_s=self._health_timeout_s,
                )
                try:
                    await exchange.body(_HEALTH_BODY_MAX)
                finally:
                    exchange.close()
        except TimeoutError:
            return f"no health answer within {self._health_timeout_s:g} s"
        except EngineFault as error:
            return str(error)
        return None if exchange.status == 200 else f"its health answer is {exchange.status}"


def _comparable(url: str) -> str:
    """Returns a URL in the form in which two that mean the same engine are equal."""
    try:
        _, host, port = engine_address(url)
    except ValueError:
        return url
    return f"{'127.0.0.1' if host == 'localhost' else host}:{port}"
