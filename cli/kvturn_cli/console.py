"""What a person sees while things start: lines that stay, and what is being waited for."""

import time
from typing import TYPE_CHECKING, Protocol

from rich.console import Console

if TYPE_CHECKING:
    from rich.status import Status

WAIT_LINE_INTERVAL_S = 10.0
PLAIN_WIDTH = 120
USUAL_WIDTH, USUAL_HEIGHT = 80, 25


class Progress(Protocol):
    """Where a stack tells how far it is."""

    def done(self, text: str) -> None:
        """Tells something that has happened."""

    def waiting(self, text: str) -> None:
        """Tells what is being waited for; called several times a second."""


class Silent:
    """Tells nothing."""

    def done(self, text: str) -> None:
        """Drops the text."""

    def waiting(self, text: str) -> None:
        """Drops the text."""


class ConsoleProgress:
    """Progress on a console: one moving line on a terminal, a line each ten seconds elsewhere."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._status: Status | None = None
        self._told_s = time.monotonic()

    def done(self, text: str) -> None:
        """Prints a line that stays."""
        self.clear()
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)
        self._told_s = time.monotonic()

    def waiting(self, text: str) -> None:
        """Shows the text until the next call."""
        if can_redraw(self._console):
            if self._status is None:
                self._status = self._console.status(text)
                self._status.start()
            self._status.update(text)
        elif time.monotonic() - self._told_s >= WAIT_LINE_INTERVAL_S:
            self.done(text)

    def clear(self) -> None:
        """Takes the moving line away."""
        if self._status is not None:
            self._status.stop()
            self._status = None


def make_console() -> Console:
    """Returns the console for stdout: colours on a terminal, plain text elsewhere."""
    console = Console()
    if console.is_terminal:
        return with_a_size(console)
    return Console(width=PLAIN_WIDTH, color_system=None)


def can_redraw(console: Console) -> bool:
    """Tells whether what was shown can be replaced: on a terminal that is not TERM=dumb."""
    return console.is_terminal and not console.is_dumb_terminal


def with_a_size(console: Console) -> Console:
    """Gives a terminal a size where COLUMNS or LINES says that it has none, and nothing would show.

    Returns the console.
    """
    width, height = console.size
    if width < 1:
        console.width = USUAL_WIDTH
    if height < 1:
        console.height = USUAL_HEIGHT
    return console
