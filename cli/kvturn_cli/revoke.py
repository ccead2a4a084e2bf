"""`kvturn revoke`: ends leases; turns that wanted them recompute."""

import argparse
import asyncio
import itertools
import json
import sys
from collections.abc import Iterator, Sequence

from kvturn.v1 import lease_pb2
from kvturn_cli.arguments import Parser, name
from kvturn_cli.lease_connection import LeaseConnection, NoAnswer, Refused
from kvturn_cli.leases import leases_of
from kvturn_cli.listing import add_json_flag, operator_parser
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
    add_json_flag(parser, "a line for each lease")
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
    if args.engine is not None and not args.yes and (args.json or not sys.stdin.isatty()):
        parser.error("--engine needs --yes with --json, and where nobody can be asked")


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
                if not args.json:
                    print("nothing is retained there; nothing to revoke")
                    return 0
        if args.engine is not None and not args.yes and not await _agreed(args.engine, len(ids)):
            print("nothing revoked")
            return 1
        return await _revoke_all(prog, ids, connection, as_json=args.json)


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


async def _revoke_all(
    prog: str, ids: Sequence[str], connection: LeaseConnection, *, as_json: bool
) -> int:
    """Tells of each lease as soon as it is revoked, or as JSON of all; returns the exit code."""
    problems: dict[str, str] = {}
    for some in _batches(ids):
        done = await asyncio.gather(*(_revoke_one(each, connection) for each in some))
        problems.update(zip(some, done, strict=True))
        if not as_json:
            for lease_id in some:
                _tell(prog, lease_id, problems[lease_id])
    if as_json:
        leases = [
            {"lease_id": each, "revoked": not problem, "problem": problem or None}
            for each, problem in problems.items()
        ]
        print(json.dumps({"leases": leases}))
    return 1 if any(problems.values()) else 0


def _tell(prog: str, lease_id: str, problem: str) -> None:
    if problem:
        print(f"{prog}: {printable(lease_id)}: {problem}", file=sys.stderr)
    else:
        print(f"revoked {printable(lease_id)}")


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
