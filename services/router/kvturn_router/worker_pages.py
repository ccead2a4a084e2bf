"""How the workers of one router tell their metrics as one.

Whichever worker a scrape reaches asks the others, each over a socket in a folder that only the
router's user can open. One that does not answer in time is left out: its counters go on where they
were with the next scrape.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from kvturn.metrics import Page

logger = logging.getLogger("kvturn.router.workers")

_ANSWER_S: Final = 1.0
"""How long another worker's page may take."""
_PAGE_BYTES_MAX: Final = 16 << 20
_PIECE_BYTES: Final = 64 << 10

_decode: Final = msgspec.msgpack.Decoder(
    dict[str, list[tuple[list[str], float | tuple[list[int], float]]]]
).decode


class WorkerPlace(NamedTuple):
    """Which of a router's workers a process is: its number, from 1, and where the others are."""

    number: int
    folder: Path | None
    """None if there is none: then each tells of itself alone."""


class WorkerPages:
    """A router's own page and its way to the other workers'. `place` is None where it is alone."""

    def __init__(self, place: WorkerPlace | None, own: Callable[[], Page]) -> None:
        self._name = "" if place is None else str(place.number)
        self._folder = None if place is None else place.folder
        self._own = own
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Lets the others ask, if there are any."""
        if self._folder is None:
            return
        try:
            self._server = await asyncio.start_unix_server(self._tell, self._folder / self._name)
        except OSError as error:
            logger.warning("metrics of this worker are on its own pages alone: %s", error)

    def stop(self) -> None:
        """Lets nobody ask any more."""
        if self._server is not None and self._folder is not None:
            self._server.close()
            with contextlib.suppress(OSError):
                (self._folder / self._name).unlink()

    async def all(self) -> dict[str, Page]:
        """Returns the pages of all workers by their names."""
        others: list[Path] = []
        if self._folder is not None:
            with contextlib.suppress(OSError):  # somebody tidied it away
                others = [
                    path for path in sorted(self._folder.iterdir()) if path.name != self._name
                ]
        pages = await asyncio.gather(*(self._ask(path) for path in others))
        told = {path.name: page for path, page in zip(others, pages, strict=True) if page}
        return {self._name: self._own(), **told}

    async def _tell(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        del reader
        writer.write(msgspec.msgpack.encode(self._own()))
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(_ANSWER_S):
                await writer.drain()
        writer.close()

    @staticmethod
    async def _ask(path: Path) -> Page:
        try:
            async with asyncio.timeout(_ANSWER_S):
                reader, writer = await asyncio.open_unix_connection(path)
                try:
                    text = bytearray()
                    while piece := await reader.read(_PIECE_BYTES):
                        text += piece
                        if len(text) > _PAGE_BYTES_MAX:
                            return {}
                    return dict(_decode(text))
                finally:
                    writer.close()
        except (OSError, TimeoutError, msgspec.DecodeError):
            return {}
