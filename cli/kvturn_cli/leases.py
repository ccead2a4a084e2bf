"""`kvturn leases`: who may read what, until when."""

import argparse
from collections.abc import AsyncIterator, Sequence

from rich.console import RenderableType
from rich.text import Text

from kvturn.v1 import lease_pb2
from kvturn_cli.arguments import name
from kvturn_cli.fields import Fields, lease_fields
from kvturn_cli.lease_connection import LeaseConnection
from kvturn_cli.listing import Answer, add_limit_flag, add_list_flags, listed, operator_parser
from kvturn_cli.lookup import add_name_flags, conversations_named
from kvturn_cli.quantities import UNKNOWN, count, span
from kvturn_cli.table import Column, table

LISTED_MAX = 200_000
"""As many as there may be."""
STATES = ("active", "reading", "ending")

_PAGE = 1_000


def main(argv: list[str]) -> int:
    """Runs `kvturn leases`."""
    parser = operator_parser(
        "kvturn leases",
        "Lists leases of engines that have a session, in order of lease id: active ones can be"
        " read, of reading ones a read has begun, ending ones wait for a reader to be over.",
    )
    add = parser.add_argument
    add("--engine", type=name, variable=False, help="only those of this engine")
    add(
        "--conversation", type=name, variable=False, help="only those of this conversation or scope"
    )
    add_name_flags(parser)
    add("--state", choices=STATES, variable=False, help="only those in this state")
    add_limit_flag(parser, LISTED_MAX)
    add_list_flags(parser)
    args = parser.parse_args(argv)
    if args.conversation is None and (args.model is not None or args.tenant is not None):
        parser.error("--model and --tenant need --conversation")
    return listed(parser, args, lambda connection: _look(connection, args))


async def _look(connection: LeaseConnection, args: argparse.Namespace) -> Answer:
    rows: list[Fields] = []
    more = False
    async for message in leases_of(connection, args):
        row = lease_fields(message)
        if args.state in (None, row["state"]):
            more = len(rows) == args.limit
            if more:
                break
            rows.append(row)
    filtered = any((args.engine, args.conversation, args.state))
    document = {"leases": rows, "more": more}
    return Answer(document, lambda width: _shown(rows, more, filtered, width))


async def leases_of(
    connection: LeaseConnection, args: argparse.Namespace
) -> AsyncIterator[lease_pb2.Lease]:
    """Yields the leases of --engine and --conversation, all where neither is given."""
    if args.conversation is None:
        async for lease in _pages(connection, args.engine or ""):
            yield lease
        return
    named = await conversations_named(connection, args)
    ids = {each.key.conversation_id for each in named}
    owner = (named[0].key.tenant, named[0].key.model)
    for engine_id in sorted({each.engine_id for each in named if each.engine_id}):
        if args.engine not in (None, engine_id):
            continue
        async for lease in _pages(connection, engine_id):
            key = lease.conversation
            if (key.tenant, key.model) == owner and key.conversation_id in ids:
                yield lease


async def _pages(connection: LeaseConnection, engine_id: str) -> AsyncIterator[lease_pb2.Lease]:
    request = lease_pb2.ListLeasesRequest(engine_id=engine_id, page_size=_PAGE)
    while True:
        answer = await connection.ask(lambda stub: stub.ListLeases, request)
        for lease in answer.leases:
            yield lease
        if not answer.next_page_token:
            return
        request.page_token = answer.next_page_token


def _shown(
    rows: Sequence[Fields], more: bool, filtered: bool, width: int | None
) -> list[RenderableType]:
    if not rows:
        return [Text("no lease matches" if filtered else "no engine retains anything now")]
    parts: list[RenderableType] = [table(COLUMNS, rows, width)]
    if more:
        parts.append(Text(f"the first {len(rows)}; --limit shows more", style="dim"))
    return parts


def _state(lease: Fields) -> str:
    reason = lease["release_reason"]
    return f"{lease['state']}: {reason}" if reason else str(lease["state"])


COLUMNS: list[Column[Fields]] = [
    Column("lease", lambda lease: lease["lease_id"], cut_to=16, keeps_end=True),
    Column("conversation", lambda lease: lease["conversation_id"], cut_to=12),
    Column("tenant", lambda lease: lease["tenant"] or UNKNOWN, cut_to=6, leaves=7),
    Column("model", lambda lease: lease["model"], cut_to=8, leaves=8),
    Column("engine", lambda lease: lease["engine_id"], cut_to=8, leaves=5),
    Column("state", _state),
    Column("tokens", lambda lease: count(lease["tokens"]), right=True, leaves=1),
    Column("blocks", lambda lease: count(lease["blocks"]), right=True, leaves=4),
    Column("age", lambda lease: span(lease["age_s"]), right=True, leaves=3),
    Column("idle in", lambda lease: span(lease["idle_in_s"]), right=True, leaves=2),
    Column("reading", lambda lease: span(lease["reading_for_s"]), right=True, leaves=6),
]
