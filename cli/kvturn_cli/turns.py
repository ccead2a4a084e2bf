"""`kvturn turns`: a conversation's latest turns, and why each reused what it did."""

import argparse
from collections.abc import Sequence
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from kvturn.v1 import common_pb2, lease_pb2
from kvturn_cli.arguments import name
from kvturn_cli.fields import Fields, lease_fields, turn_fields
from kvturn_cli.lease_connection import LeaseConnection
from kvturn_cli.listing import Answer, add_list_flags, listed, operator_parser
from kvturn_cli.lookup import add_name_flags, conversation_named
from kvturn_cli.quantities import UNKNOWN, count, megabytes, milliseconds, span
from kvturn_cli.table import Column, printable, table

_REUSING = frozenset({"reused", "partial_prefix", "local"})
_EXPECTED = frozenset({"first_turn", "turned_off", "ended", UNKNOWN, ""})


def main(argv: list[str]) -> int:
    """Runs `kvturn turns`."""
    parser = operator_parser(
        "kvturn turns",
        "Shows a conversation's latest turns, oldest first: the verdict, the way it was served and"
        " why, and what was reused. A scope shows the turns of all its conversations.",
    )
    parser.add_argument(
        "conversation", type=name, metavar="CONVERSATION", help="its id, or a scope's"
    )
    add_name_flags(parser)
    add_list_flags(parser)
    args = parser.parse_args(argv)
    return listed(parser, args, lambda connection: _look(connection, args))


async def _look(connection: LeaseConnection, args: argparse.Namespace) -> Answer:
    key = await conversation_named(connection, args)
    request = lease_pb2.ListTurnsRequest(conversation=key)
    answer = await connection.ask(lambda stub: stub.ListTurns, request)
    turns = [turn_fields(message) for message in answer.turns]
    leases = [lease_fields(message) for message in answer.leases]
    document = {
        "conversation_id": key.conversation_id,
        "tenant": key.tenant,
        "model": key.model,
        "turns": turns,
        "leases": leases,
    }
    return Answer(document, lambda width: _shown(key, turns, leases, width))


def _shown(
    key: common_pb2.ConversationKey,
    turns: Sequence[Fields],
    leases: Sequence[Fields],
    width: int | None,
) -> list[RenderableType]:
    title = f"{printable(key.conversation_id)} of model {printable(key.model)}"
    if key.tenant:
        title += f", tenant {printable(key.tenant)}"
    parts: list[RenderableType] = [Text(title, style="bold")]
    parts += [Text(_held(lease), style="dim") for lease in leases] or [
        Text("nothing is retained for it now", style="dim")
    ]
    if turns:
        several = any(turn["conversation_id"] != key.conversation_id for turn in turns)
        columns = [column for column in COLUMNS if several or column.title != "conversation"]
        parts.append(table(columns, turns, width))
    else:
        parts.append(Text("no router has reported a turn of it since the lease service began"))
    return parts


def _held(lease: Fields) -> str:
    idle = "" if lease["idle_in_s"] is None else f", idle in {span(lease['idle_in_s'])}"
    return (
        f"{printable(lease['engine_id'])} retains {count(lease['tokens'])} tokens"
        f" under lease {printable(lease['lease_id'])}, {lease['state']}{idle}"
    )


def verdict_style(verdict: str) -> str:
    """Returns the colour of a verdict: reuse is green, what could have been reuse is yellow."""
    if verdict in _REUSING:
        return "green"
    return "dim" if verdict in _EXPECTED else "yellow"


def _why(turn: Fields) -> str:
    """Returns the reason of the plan without its numbers, which --json has."""
    return " ".join(each for each in turn["plan_reason"].split() if "=" not in each) or UNKNOWN


def _if_read(turn: Fields, field: str) -> Any:
    return turn[field] if turn["read_bytes"] else None


def _engine(url: str) -> str:
    return url.removeprefix("http://") or UNKNOWN


COLUMNS: list[Column[Fields]] = [
    Column("turn", lambda turn: count(turn["turn"] or None), right=True),
    Column("conversation", lambda turn: turn["conversation_id"], cut_to=12),
    Column(
        "verdict", lambda turn: turn["verdict"], style=lambda turn: verdict_style(turn["verdict"])
    ),
    Column("plan", lambda turn: turn["plan"] or UNKNOWN, leaves=1),
    Column("why", _why, cut_to=10, leaves=2),
    Column("prompt", lambda turn: count(turn["prompt_tokens"]), right=True),
    Column("reused", lambda turn: count(turn["reused_tokens"]), right=True),
    Column("local", lambda turn: count(turn["local_tokens"]), right=True),
    Column("computed", lambda turn: count(turn["computed_tokens"]), right=True, leaves=4),
    Column("TTFT ms", lambda turn: milliseconds(turn["first_byte_ms"]), right=True),
    Column(
        "read ms", lambda turn: milliseconds(_if_read(turn, "read_ms"), 1), right=True, leaves=6
    ),
    Column("read MB", lambda turn: megabytes(_if_read(turn, "read_bytes")), right=True, leaves=7),
    Column("saved ms", lambda turn: milliseconds(turn["saved_ms"]), right=True, leaves=3),
    Column("prefill", lambda turn: _engine(turn["prefill_engine"]), cut_to=12, leaves=9),
    Column("decode", lambda turn: _engine(turn["decode_engine"]), cut_to=12, leaves=8),
    Column("age", lambda turn: span(turn["age_s"]), right=True),
    Column("trace", lambda turn: turn["trace_id"] or UNKNOWN, leaves=10),
]
