"""Where an engine's name leads.

An event loop looks names up on a few threads (uvloop's on four): a few names whose DNS is slow keep
every other one waiting, those of engines that are well among them, and the process from ending.
Here each name is looked up on a thread of its own that nothing waits for at the end. Nothing is
remembered: connections are kept, and a name may lead elsewhere next time.
"""

import asyncio
import contextlib
import socket
import threading
from collections.abc import Sequence
from typing import Final

from kvturn.address import ip_address

LOOKUPS_MAX: Final = 128
"""Names that are looked up at once by a process."""

_places = threading.BoundedSemaphore(LOOKUPS_MAX)


class HostLookup:
    """Looks one host up. Whoever asks while it is looked up gets that answer."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._is_address = ip_address(host) is not None
        self._asked: asyncio.Future[Sequence[str]] | None = None

    @property
    def is_asked(self) -> bool:
        """Whether it is being looked up."""
        return self._asked is not None

    async def addresses(self) -> Sequence[str]:
        """Returns its IP addresses, one at least; takes as long as DNS does. Raises OSError."""
        if self._is_address:
            return (self._host,)
        if self._asked is None:
            self._asked = self._ask()
        # Whoever waits no longer leaves it to the others.
        return await asyncio.shield(self._asked)

    def _ask(self) -> asyncio.Future[Sequence[str]]:
        if not _places.acquire(blocking=False):
            raise OSError(f"{LOOKUPS_MAX} names are being looked up already")
        loop = asyncio.get_running_loop()
        asked: asyncio.Future[Sequence[str]] = loop.create_future()
        asked.add_done_callback(self._over)
        thread = threading.Thread(
            target=self._look_up, args=(loop, asked), name=f"look up {self._host}", daemon=True
        )
        try:
            thread.start()
        except RuntimeError as error:
            _places.release()
            raise OSError(f"its name cannot be looked up: {error}") from None
        return asked

    def _look_up(
        self, loop: asyncio.AbstractEventLoop, asked: asyncio.Future[Sequence[str]]
    ) -> None:
        found: Sequence[str] = ()
        fault: OSError | None = None
        try:
            entries = socket.getaddrinfo(self._host, None, type=socket.SOCK_STREAM)
            found = [*dict.fromkeys(str(entry[4][0]) for entry in entries)]
        except OSError as error:
            fault = error
        except UnicodeError as error:
            fault = OSError(f"{self._host} is no name: {error}")
        finally:
            _places.release()
        with contextlib.suppress(RuntimeError):  # The loop has ended.
            loop.call_soon_threadsafe(_tell, asked, found, fault)

    def _over(self, asked: asyncio.Future[Sequence[str]]) -> None:
        self._asked = None
        if not asked.cancelled():
            asked.exception()  # It may be that nobody waits for it any more.


def _tell(
    asked: asyncio.Future[Sequence[str]], found: Sequence[str], fault: OSError | None
) -> None:
    if asked.done():
        return
    if fault is not None:
        asked.set_exception(fault)
    else:
        asked.set_result(found)
