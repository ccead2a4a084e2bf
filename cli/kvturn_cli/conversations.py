"""`kvturn conversations`: the conversations that the lease service knows."""

import argparse
from collections.abc import Sequence

from rich.console import RenderableType
from rich.text import Text

from kvturn.v1 import lease_pb2
from kvturn_cli.arguments import name, tenant
from kvturn_cli.fields import Fields, conversation_fields
from kvturn_cli.lease_connection import LeaseConnection
from kvturn_cli.listing import Answer, add_limit_flag, add_list_flags, listed, operator_parser
from kvturn_cli.lookup import LISTED_MAX
from kvturn_cli.quantities import UNKNOWN, count, share, span
from kvturn_cli.table import Column, table
from kvturn_cli.turns import verdict_style


def main(argv: list[str]) -> int:
    """Runs `kvturn conversations`."""
    parser = operator_parser(
        "kvturn conversations",
        "Lists the conversations that the lease service knows, the one with the latest sign of"
        " life first, and what decode engines retain of them.",
    )
    add = parser.add_argument
    add("--tenant", type=tenant, variable=False, help="only those of this tenant")
    add("--model", type=name, variable=False, help="only those of this model")
    add(
        "--engine",
        type=name,
        variable=False,
        help="only those whose KV this engine holds or last held",
    )
    add("--retained", action="store_true", variable=False, help="only those that retain something")
    add_limit_flag(parser, LISTED_MAX)
    add_list_flags(parser)
    args = parser.parse_args(argv)
    return listed(parser, args, lambda connection: _look(connection, args))


async def _look(connection: LeaseConnection, args: argparse.Namespace) -> Answer:
    request = lease_pb2.ListConversationsRequest(
        tenant=args.tenant or "",
        model=args.model or "",
        engine_id=args.engine or "",
        retained_only=args.retained,
        page_size=args.limit,
    )
    answer = await connection.ask(lambda stub: stub.ListConversations, request)
    rows = [conversation_fields(message) for message in answer.conversations]
    total = answer.total_size
    document = {"conversations": rows, "total": total}
    filtered = any((args.tenant, args.model, args.engine, args.retained))
    return Answer(document, lambda width: _shown(rows, total, filtered, width))


def _shown(
    rows: Sequence[Fields], total: int, filtered: bool, width: int | None
) -> list[RenderableType]:
    if not rows:
        return [Text("no conversation matches" if filtered else "no conversation is known yet")]
    parts: list[RenderableType] = [conversation_table(rows, width)]
    if total > len(rows):
        more = "--limit shows more"
        if len(rows) >= LISTED_MAX:
            more = "--tenant, --model, --engine and --retained show fewer at a time"
        parts.append(Text(f"{len(rows):,} of {total:,}; {more}", style="dim"))
    return parts


def conversation_table(rows: Sequence[Fields], width: int | None) -> RenderableType:
    """Returns the table of conversations."""
    return table([column for column in COLUMNS if _is_told(column, rows)], rows, width)


def _is_told(column: Column[Fields], rows: Sequence[Fields]) -> bool:
    return column.title != "tenant" or any(row["tenant"] for row in rows)


def _latest(row: Fields, field: str) -> str:
    return row["latest_turn"][field] if row["latest_turn"] else UNKNOWN


def _reused(row: Fields) -> str:
    turn = row["latest_turn"]
    if not turn or turn["prompt_tokens"] is None:
        return UNKNOWN
    return share(turn["reused_tokens"] + turn["local_tokens"], turn["prompt_tokens"])


COLUMNS: list[Column[Fields]] = [
    Column("conversation", lambda row: row["conversation_id"], cut_to=12),
    Column("tenant", lambda row: row["tenant"] or UNKNOWN, cut_to=6, leaves=3),
    Column("model", lambda row: row["model"], cut_to=8, leaves=8),
    Column("turns", lambda row: count(row["turns"] or None), right=True),
    Column("now", lambda row: count(row["turns_in_flight"]), right=True, leaves=6),
    Column("quiet", lambda row: span(row["quiet_s"]), right=True),
    Column(
        "last verdict",
        lambda row: _latest(row, "verdict"),
        leaves=2,
        style=lambda row: verdict_style(_latest(row, "verdict")),
    ),
    Column("reused", _reused, right=True, leaves=1),
    Column("engine", lambda row: row["engine_id"] or UNKNOWN, cut_to=8, leaves=5),
    Column("retained", lambda row: count(row["retained_tokens"]), right=True),
    Column("blocks", lambda row: count(row["retained_blocks"]), right=True, leaves=9),
    Column("leases", lambda row: count(row["leases"]), right=True, leaves=10),
    Column("idle in", lambda row: span(row["idle_in_s"]), right=True, leaves=4),
]
