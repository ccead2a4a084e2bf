"""`kvturn revoke`: ends leases; turns that wanted them recompute."""

import argparse
import asyncio
import itertools
import sys
from collections.abc import Iterator, Sequence

from kvturn.v1 import lease_pb2
from kvturn_cli.arguments import Parser, name
from kvturn_cli.lease_connection import LeaseConnection, NoAnswer, Refused
from kvturn_cli.leases import leases_of
from kvturn_cli.listing import operator_parser
from kvturn_cli.lookup import add_name_flags
from kvturn_cli.table import CUT, printable

_AT_ONCE = 16
"""Leases that are revoked at a time."""


def main(argv: list[str]) -> int:
    """Runs `kvturn revoke`."""
    parser = operator_parser(
        "kvturn revoke",
        "Ends leases: nobody begins to read them any more, and their engine frees the blocks as"
        " soon as nobody reads them. The next turn of the conversation recomputes. Needs the"
        " operator's role.",
    )
    add = parser.add_argument
    add("leases", type=name, nargs="*", metavar="LEASE", help="lease id, as kvturn leases shows it")
    add(
        "--conversation", type=name, variable=False, help="all leases of this conversation or scope"
    )
    add_name_flags(parser)
    add(
        "--engine",
        type=name,
        variable=False,
        help="all leases of this engine; asks before it does so",
    )
    add("--yes", action="store_true", variable=False, help="do not ask")
    args = parser.parse_args(argv)
    _check(parser, args)
    connection = LeaseConnection.of(parser, args)
    try:
        return asyncio.run(_revoke(parser.prog, args, connection))
    except NoAnswer as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1


def _check(parser: Parser, args: argparse.Namespace) -> None:
    chosen = [args.conversation is not None, args.engine is not None]
    if bool(args.leases) == any(chosen):
        parser.error("give lease ids, or --conversation, or --engine")
    if any(lease_id.startswith(CUT) for lease_id in args.leases):
        parser.error("lease ids must be whole; kvturn leases --json shows them so")
    if args.conversation is None and (args.model is not None or args.tenant is not None):
        parser.error("--model and --tenant need --conversation")
    if args.engine is not None and not args.yes and not sys.stdin.isatty():
        parser.error("--engine needs --yes where nobody can be asked")


async def _revoke(prog: str, args: argparse.Namespace, connection: LeaseConnection) -> int:
    async with connection:
        ids: list[str] = args.leases
        if not ids:
            found = [lease async for lease in leases_of(connection, args)]
            ending = lease_pb2.Lease.STATE_ENDING
            ids = [lease.lease_id for lease in found if lease.state != ending]
            if not ids:
                if args.engine is not None:
                    await _refuse_unknown(args.engine, connection)
                print("nothing is retained there; nothing to revoke")
                return 0
        if args.engine is not None and not args.yes and not await _agreed(args.engine, len(ids)):
            print("nothing revoked")
            return 1
        return await _revoke_all(prog, ids, connection)


async def _refuse_unknown(engine_id: str, connection: LeaseConnection) -> None:
    """Raises NoAnswer unless the lease service knows the engine."""
    listed = await connection.ask(lambda stub: stub.ListEngines, lease_pb2.ListEnginesRequest())
    if all(each.description.engine_id != engine_id for each in listed.engines):
        raise NoAnswer(
            f"the lease service knows no engine {printable(engine_id)}; kvturn engines lists them"
        )


async def _agreed(engine_id: str, number: int) -> bool:
    question = f"revoke {number} leases of {printable(engine_id)}? [y/N] "
    try:
        answer = await asyncio.to_thread(input, question)
    except EOFError:
        return False
    return answer.strip().lower() in ("y", "yes")


async def _revoke_all(prog: str, ids: Sequence[str], connection: LeaseConnection) -> int:
    failed = 0
    for some in _batches(ids):
        problems = await asyncio.gather(*(_revoke_one(each, connection) for each in some))
        for lease_id, problem in zip(some, problems, strict=True):
            if problem:
                failed += 1
                print(f"{prog}: {printable(lease_id)}: {problem}", file=sys.stderr)
            else:
                print(f"revoked {printable(lease_id)}")
    return 1 if failed else 0


def _batches(ids: Sequence[str]) -> Iterator[Sequence[str]]:
    for start in itertools.count(0, _AT_ONCE):
        if start >= len(ids):
            return
        yield ids[start : start + _AT_ONCE]


async def _revoke_one(lease_id: str, connection: LeaseConnection) -> str:
    """Returns why it could not be revoked, "" if it was."""
    request = lease_pb2.RevokeLeaseRequest(lease_id=lease_id)
    try:
        await connection.ask(lambda stub: stub.RevokeLease, request)
    except Refused as refusal:
        if refusal.reason == "LEASE_NOT_FOUND":
            return "no engine retains it; kvturn leases lists what is retained"
        return str(refusal)
    return ""
