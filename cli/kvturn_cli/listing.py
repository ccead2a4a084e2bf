"""What commands that list have in common: a table or JSON, once or again and again."""

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from kvturn_cli.arguments import Parser, at_most, seconds
from kvturn_cli.console import can_redraw, with_a_size
from kvturn_cli.interrupts import ended_by_signals
from kvturn_cli.lease_connection import VARIABLES, LeaseConnection, NoAnswer, add_flags

LISTED = 50
WATCH_S = 2.0

_ENDLESS = 100_000
"""Width of what goes to a file or a pipe: nothing is cut there."""


@dataclass(frozen=True)
class Answer:
    """What was found, for programs and for people."""

    document: Mapping[str, Any]
    """What --json prints."""
    shown: Callable[[int | None], Sequence[RenderableType]]
    """Returns what a terminal shows; given its width in cells, None for any."""


Look = Callable[[LeaseConnection], Awaitable[Answer]]


def operator_parser(prog: str, description: str) -> Parser:
    """Returns the parser of a command that asks the lease service."""
    parser = Parser(prog, description, VARIABLES)
    parser.epilog = f"The flags from --lease to --timeout have variables: {VARIABLES}LEASE, ..."
    add_flags(parser)
    return parser


def add_json_flag(parser: Parser, instead: str) -> None:
    """Adds --json; `instead` says of what."""
    parser.add_argument(
        "--json", action="store_true", variable=False, help=f"JSON instead of {instead}"
    )


def add_list_flags(parser: Parser) -> None:
    """Adds --json and --watch."""
    add_json_flag(parser, "a table")
    add = parser.add_argument
    add(
        "--watch",
        nargs="?",
        type=seconds,
        const=WATCH_S,
        variable=False,
        metavar="SECONDS",
        help=f"look again and again, every {WATCH_S:.0f} s or as told; Ctrl-C ends it",
    )


def add_limit_flag(parser: Parser, most: int) -> None:
    """Adds --limit, up to `most`."""
    parser.add_argument(
        "--limit",
        type=at_most(most),
        default=LISTED,
        variable=False,
        metavar="N",
        help=f"list so many at most, 1 to {most}",
    )


def listed(parser: Parser, args: argparse.Namespace, look: Look) -> int:
    """Runs a command that lists, as its flags say; returns its exit code."""
    connection = LeaseConnection.of(parser, args)
    try:
        asyncio.run(_listed(parser.prog, args, connection, look))
    except NoAnswer as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    return 0


async def _listed(
    prog: str, args: argparse.Namespace, connection: LeaseConnection, look: Look
) -> None:
    async with connection:
        if args.watch is None:
            answer = await look(connection)
            if args.json:
                print(json.dumps(answer.document, indent=1))
            else:
                _print(answer)
            return
        with ended_by_signals():
            if args.json:
                await _repeat(args.watch, lambda: _json_line(prog, connection, look))
            else:
                await _watch(args.watch, connection, look)


async def _repeat(interval_s: float, act: Callable[[], Awaitable[None]]) -> None:
    while True:
        began_s = time.monotonic()
        await act()
        await asyncio.sleep(max(0.0, began_s + interval_s - time.monotonic()))


async def _json_line(prog: str, connection: LeaseConnection, look: Look) -> None:
    try:
        print(json.dumps((await look(connection)).document), flush=True)
    except NoAnswer as error:
        print(f"{prog}: {error}", file=sys.stderr)


async def _watch(interval_s: float, connection: LeaseConnection, look: Look) -> None:
    """Shows it in one place of a terminal; elsewhere one after the other."""
    console = output()
    if not can_redraw(console):
        await _repeat(interval_s, lambda: _watched(connection, look, _print_all))
        return
    with Live(console=console, auto_refresh=False, vertical_overflow="ellipsis") as live:

        def show(parts: Callable[[int | None], Sequence[RenderableType]]) -> None:
            live.update(Group(*parts(console.width)), refresh=True)

        await _repeat(interval_s, lambda: _watched(connection, look, show))


async def _watched(
    connection: LeaseConnection,
    look: Look,
    show: Callable[[Callable[[int | None], Sequence[RenderableType]]], None],
) -> None:
    now = time.strftime("%H:%M:%S")
    try:
        answer = await look(connection)
    except NoAnswer as error:
        problem = Text(f"{now}  {error}", style="red")
        show(lambda _: [problem])
    else:
        show(lambda width: [Text(f"{now}  {connection.where}", style="dim"), *answer.shown(width)])


def _print_all(parts: Callable[[int | None], Sequence[RenderableType]]) -> None:
    console = output()
    for part in parts(None):
        console.print(part, soft_wrap=isinstance(part, Text))
    console.print()


def _print(answer: Answer) -> None:
    console = output()
    for part in answer.shown(console.width if console.is_terminal else None):
        console.print(part, soft_wrap=isinstance(part, Text))


def output() -> Console:
    """Returns the console for stdout: colours and its width on a terminal, neither elsewhere."""
    console = Console(highlight=False, markup=False, emoji=False)
    if console.is_terminal:
        return with_a_size(console)
    return Console(width=_ENDLESS, color_system=None, highlight=False, markup=False, emoji=False)
