"""`kvturn engines`: the engines that have a session, and what their KV memory holds."""

from collections.abc import Sequence

from rich.console import RenderableType
from rich.text import Text

from kvturn.v1 import lease_pb2
from kvturn_cli.fields import Fields, engine_fields
from kvturn_cli.lease_connection import LeaseConnection
from kvturn_cli.listing import Answer, add_list_flags, listed, operator_parser
from kvturn_cli.quantities import UNKNOWN, count, span
from kvturn_cli.table import Column, table


def main(argv: list[str]) -> int:
    """Runs `kvturn engines`."""
    parser = operator_parser(
        "kvturn engines",
        "Lists the engines that have a session with the lease service. Blocks of KV memory are"
        " active (requests hold them), retained (for turns to come) or free. Expired counts the"
        " sessions that an engine lost for being silent; what it holds cannot be read until"
        " it has a new one.",
    )
    add_list_flags(parser)
    args = parser.parse_args(argv)
    return listed(parser, args, _look)


async def _look(connection: LeaseConnection) -> Answer:
    answer = await connection.ask(lambda stub: stub.ListEngines, lease_pb2.ListEnginesRequest())
    rows = [engine_fields(message) for message in answer.engines]
    return Answer({"engines": rows}, lambda width: _shown(rows, width))


def _shown(rows: Sequence[Fields], width: int | None) -> list[RenderableType]:
    if not rows:
        return [Text("no engine has a session; the connector's kvturn_lease_endpoint names this")]
    return [table(COLUMNS, rows, width)]


def _versions(engine: Fields) -> str:
    return f"{engine['vllm_version'] or UNKNOWN} / {engine['connector_version'] or UNKNOWN}"


def _expired(engine: Fields) -> str:
    times = count(engine["expired_sessions"])
    ago = engine["last_expiry_age_s"]
    return times if ago is None else f"{times} ({span(ago)} ago)"


def _is_late(engine: Fields) -> bool:
    return (engine["heartbeat_age_s"] or 0.0) > 3.0


COLUMNS: list[Column[Fields]] = [
    Column("engine", lambda engine: engine["engine_id"], cut_to=10),
    Column("role", lambda engine: engine["role"]),
    Column(
        "state",
        lambda engine: "draining" if engine["draining"] else "taking turns",
        style=lambda engine: "yellow" if engine["draining"] else "",
        leaves=3,
    ),
    Column("address", lambda engine: engine["http_address"] or UNKNOWN, cut_to=12, leaves=5),
    Column("model", lambda engine: engine["model"] or UNKNOWN, cut_to=10, keeps_end=True, leaves=6),
    Column("blocks", lambda engine: count(engine["blocks"]), right=True),
    Column("active", lambda engine: count(engine["active_blocks"]), right=True),
    Column("retained", lambda engine: count(engine["retained_blocks"]), right=True),
    Column("free", lambda engine: count(engine["free_blocks"]), right=True),
    Column("leases", lambda engine: count(engine["leases"]), right=True, leaves=2),
    Column("vLLM / connector", _versions, leaves=7),
    Column(
        "heartbeat",
        lambda engine: span(engine["heartbeat_age_s"]),
        right=True,
        style=lambda engine: "yellow" if _is_late(engine) else "",
        leaves=1,
    ),
    Column(
        "expired",
        _expired,
        right=True,
        style=lambda engine: "yellow" if engine["expired_sessions"] else "",
        leaves=4,
    ),
]
