"""`kvturn top`: engines, conversations and reuse, live in the terminal."""

import asyncio
import contextlib
import os
import signal
import sys
import termios
import time
import tty
from collections.abc import Iterator
from dataclasses import replace

from rich.console import Console
from rich.live import Live
from rich.text import Text

from kvturn.v1 import lease_pb2
from kvturn_cli.arguments import seconds
from kvturn_cli.console import can_redraw
from kvturn_cli.fields import conversation_fields, engine_fields
from kvturn_cli.interrupts import ended_by_signals
from kvturn_cli.lease_connection import LeaseConnection, NoAnswer
from kvturn_cli.listing import operator_parser, output
from kvturn_cli.recent_turns import RecentTurns
from kvturn_cli.screen import Seen, screen

INTERVAL_S = 1.0
_LISTED = 200
"""Conversations that are asked for: more than fit on a screen."""
_QUIT = (b"q", b"Q")


def main(argv: list[str]) -> int:
    """Runs `kvturn top`."""
    parser = operator_parser(
        "kvturn top",
        "Shows engines with their KV memory, what recent turns reused and why not more, and the"
        " latest conversations; q or Ctrl-C quits. It goes on when the lease service is gone and"
        " comes back.",
    )
    parser.add_argument(
        "--interval",
        type=seconds,
        default=INTERVAL_S,
        variable=False,
        metavar="S",
        help="look again every so many seconds",
    )
    args = parser.parse_args(argv)
    console = output()
    if not (can_redraw(console) and sys.stdin.isatty()):
        use = "kvturn conversations --watch --json is for programs"
        message = f"needs a terminal, not TERM=dumb; {use}"
        print(f"{parser.prog}: {message}", file=sys.stderr)
        return 2
    asyncio.run(_run(LeaseConnection.of(parser, args), args.interval, console))
    return 0


async def _run(connection: LeaseConnection, interval_s: float, console: Console) -> None:
    async with connection:
        with (
            ended_by_signals(),
            _keys(),
            Live(console=console, screen=True, auto_refresh=False) as live,
        ):
            await _Top(connection, console, live).run(interval_s)


@contextlib.contextmanager
def _keys() -> Iterator[None]:
    """Lets each key through as it is pressed and unseen, and ends the block at q."""
    loop, task, stdin = asyncio.get_running_loop(), asyncio.current_task(), sys.stdin.fileno()
    assert task is not None
    before = termios.tcgetattr(stdin)

    def read() -> None:
        pressed = os.read(stdin, 1_024)
        if not pressed or any(key in pressed for key in _QUIT):
            loop.remove_reader(stdin)
            task.cancel()

    tty.setcbreak(stdin)
    # Suspended, it would leave the terminal as it is.
    suspend = signal.signal(signal.SIGTSTP, signal.SIG_IGN)
    loop.add_reader(stdin, read)
    try:
        yield
    finally:
        loop.remove_reader(stdin)
        signal.signal(signal.SIGTSTP, suspend)
        termios.tcsetattr(stdin, termios.TCSADRAIN, before)


class _Top:
    """What was seen, and its picture."""

    def __init__(self, connection: LeaseConnection, console: Console, live: Live) -> None:
        self._connection = connection
        self._console = console
        self._live = live
        self._turns = RecentTurns()
        self._seen = Seen(connection.where)
        self._seen_s: float | None = None

    async def run(self, interval_s: float) -> None:
        """Looks and draws until it is cancelled; a terminal that changes its size is redrawn."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGWINCH, self._draw)
        try:
            # What was not asked for yet is not shown as nothing.
            asking = Text(f"kvturn top (q quits)  asking {self._connection.where}", no_wrap=True)
            self._live.update(asking, refresh=True)
            while True:
                began_s = time.monotonic()
                await self._look()
                self._draw()
                await asyncio.sleep(max(0.0, began_s + interval_s - time.monotonic()))
        finally:
            loop.remove_signal_handler(signal.SIGWINCH)

    async def _look(self) -> None:
        request = lease_pb2.ListConversationsRequest(page_size=_LISTED)
        try:
            engines = await self._connection.ask(
                lambda stub: stub.ListEngines, lease_pb2.ListEnginesRequest()
            )
            listed = await self._connection.ask(lambda stub: stub.ListConversations, request)
        except NoAnswer as error:
            self._seen = replace(self._seen, problem=str(error))
            return
        self._turns.see(listed.conversations)
        self._seen_s = time.monotonic()
        self._seen = Seen(
            self._connection.where,
            engines=[engine_fields(each) for each in engines.engines],
            conversations=[conversation_fields(each) for each in listed.conversations],
            total=listed.total_size,
            reuse=self._turns.reuse(),
        )

    def _draw(self) -> None:
        stale_s = None if self._seen_s is None else time.monotonic() - self._seen_s
        seen = replace(self._seen, clock=time.strftime("%H:%M:%S"), stale_s=stale_s)
        width, height = self._console.size
        self._live.update(screen(seen, width, height), refresh=True)
