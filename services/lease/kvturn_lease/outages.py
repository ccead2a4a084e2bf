"""One log line when something begins to fail, and one when it works again."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import logging


class Outages:
    """What fails at the moment."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._open: dict[str, str] = {}

    def begin(self, name: str, text: str) -> None:
        """Says that `name` fails, unless that was said."""
        if name not in self._open:
            self._open[name] = text
            self._logger.warning("%s", text)

    def end(self, name: str, text: str) -> None:
        """Says that `name` works again, if it was said to fail."""
        if self._open.pop(name, None) is not None:
            self._logger.warning("%s", text)

    def is_open(self, name: str) -> bool:
        """Tells whether `name` fails."""
        return name in self._open
