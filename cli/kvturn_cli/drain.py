"""`kvturn drain`: has routers send an engine no new turns, or take it up again."""

import argparse
import asyncio
import json
import sys

from kvturn.v1 import lease_pb2
from kvturn_cli.arguments import name
from kvturn_cli.lease_connection import LeaseConnection, NoAnswer, Refused
from kvturn_cli.listing import add_json_flag, operator_parser
from kvturn_cli.table import printable


def main(argv: list[str]) -> int:
    """Runs `kvturn drain`."""
    parser = operator_parser(
        "kvturn drain",
        "Has all routers send an engine no new turns; those that it serves go on, and what it"
        " retains can still be read. It stays so over restarts of the engine, until --undo.",
    )
    parser.add_argument(
        "engine", type=name, metavar="ENGINE", help="engine id, as kvturn engines shows it"
    )
    parser.add_argument("--undo", action="store_true", variable=False, help="take it up again")
    add_json_flag(parser, "a line")
    args = parser.parse_args(argv)
    connection = LeaseConnection.of(parser, args)
    try:
        asyncio.run(_drain(args, connection))
    except NoAnswer as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    return 0


async def _drain(args: argparse.Namespace, connection: LeaseConnection) -> None:
    request = lease_pb2.DrainEngineRequest(engine_id=args.engine, draining=not args.undo)
    shown = printable(args.engine)
    async with connection:
        try:
            await connection.ask(lambda stub: stub.DrainEngine, request)
        except Refused as refusal:
            if refusal.reason != "ENGINE_NOT_FOUND":
                raise
            raise NoAnswer(
                f"the lease service knows no engine {shown}; kvturn engines lists them"
            ) from None
    if args.json:
        print(json.dumps({"engine_id": args.engine, "draining": not args.undo}))
    elif args.undo:
        print(f"{shown} takes turns again")
    else:
        print(f"{shown} drains: no new turns; kvturn drain --undo {shown} takes it up again")
