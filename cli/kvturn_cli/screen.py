"""What `kvturn top` shows, made for a terminal of some size. No I/O."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.console import Group, RenderableType
from rich.text import Text

from kvturn_cli.conversations import conversation_table
from kvturn_cli.fields import Fields
from kvturn_cli.quantities import UNKNOWN, count, milliseconds, share, span
from kvturn_cli.recent_turns import Reuse
from kvturn_cli.table import Column, table
from kvturn_cli.turns import verdict_style

_NOTHING = Reuse(0, 0, 0, 0, None, 0.0, [])
_ACTIVE, _RETAINED, _FREE = ("█", "cyan"), ("▓", "green"), ("░", "dim")
_BAR_MAX = 40


@dataclass(frozen=True)
class Seen:
    """What was seen last."""

    where: str
    """The lease service's endpoints."""
    clock: str = ""
    """Time of day."""
    problem: str = ""
    """Why nothing newer was seen, "" if all is well."""
    stale_s: float | None = None
    """How long ago what is shown was seen; None: never."""
    engines: Sequence[Fields] = ()
    conversations: Sequence[Fields] = ()
    total: int = 0
    """Conversations in all."""
    reuse: Reuse = field(default=_NOTHING)


def screen(seen: Seen, width: int, height: int) -> Group:
    """Returns the whole screen; what does not fit is left out from below."""
    head = [_title(seen, width)]
    if seen.problem:
        head.append(_problem(seen, width))
    parts: list[RenderableType] = list(head)
    used = len(head)
    for section, lines in (
        _engines(seen, width, max(1, (height - used) // 2)),
        _reuse(seen, width),
    ):
        if used + lines + 1 > height:
            break
        parts += ["", section]
        used += lines + 1
    left = height - used - 3
    if left > 0:
        parts += ["", _conversations(seen, width, left)]
    return Group(*parts)


def _line(text: Text, width: int) -> Text:
    text.truncate(width, overflow="ellipsis")
    text.no_wrap = True
    return text


def _title(seen: Seen, width: int) -> Text:
    title = Text("kvturn top", style="bold")
    title.append(
        f" (q quits)  {seen.clock}  engines {len(seen.engines)}"
        f"  conversations {seen.total:,}  lease service {seen.where}",
        style="not bold",
    )
    return _line(title, width)


def _problem(seen: Seen, width: int) -> Text:
    since = ""
    if seen.stale_s is not None:
        since = f"what is shown is {span(seen.stale_s)} old: "
    return _line(Text(since + seen.problem, style="bold red"), width)


def _engines(seen: Seen, width: int, lines_max: int) -> tuple[RenderableType, int]:
    if not seen.engines:
        return Text("no engine has a session", style="dim"), 1
    rows = seen.engines[: max(1, lines_max - 2)]
    shown = table(_engine_columns(width), rows, width)
    left_out = len(seen.engines) - len(rows)
    if not left_out:
        return shown, len(rows) + 1
    more = Text(f"and {left_out} more: kvturn engines lists all", style="dim")
    return Group(shown, more), len(rows) + 2


def _engine_columns(width: int) -> list[Column[Fields]]:
    cells = max(10, min(_BAR_MAX, width - 64))
    legend = f"KV memory: {_ACTIVE[0]} active {_RETAINED[0]} retained {_FREE[0]} free"
    return [
        Column("engine", lambda engine: engine["engine_id"], cut_to=8),
        Column("role", lambda engine: engine["role"]),
        Column(legend, lambda engine: memory_bar(engine, max(cells, len(legend))), leaves=4),
        Column("active", lambda engine: count(engine["active_blocks"]), right=True, leaves=3),
        Column("retained", lambda engine: count(engine["retained_blocks"]), right=True),
        Column("free", lambda engine: count(engine["free_blocks"]), right=True),
        Column("leases", lambda engine: count(engine["leases"]), right=True, leaves=1),
        Column(
            "",
            lambda engine: "drains" if engine["draining"] else "",
            style=lambda _: "yellow",
            leaves=2,
        ),
    ]


def memory_bar(engine: Fields, cells: int) -> Text:
    """Returns a bar of so many cells; whatever there is any of has at least one, if it can."""
    total = engine["blocks"]
    if not total or engine["free_blocks"] is None:
        return Text(UNKNOWN)
    active = _cells(engine["active_blocks"], total, cells)
    retained = min(_cells(engine["retained_blocks"], total, cells), cells - active)
    free = cells - active - retained
    parts = ((_ACTIVE, active), (_RETAINED, retained), (_FREE, free))
    return Text.assemble(*((mark * number, style) for (mark, style), number in parts))


def _cells(part: int, total: int, cells: int) -> int:
    return min(cells, max(1, round(part * cells / total))) if part else 0


def _reuse(seen: Seen, width: int) -> tuple[RenderableType, int]:
    reuse = seen.reuse
    if not reuse.turns:
        return Text("no turn was seen yet", style="dim"), 1
    prompt = reuse.prompt_tokens
    computed = prompt - reuse.reused_tokens - reuse.local_tokens
    summary = Text(f"{reuse.turns} recent turns", style="bold")
    summary.append(
        f"  of their prompts {share(reuse.reused_tokens, prompt)} read,"
        f" {share(reuse.local_tokens, prompt)} local, {share(computed, prompt)} computed"
        f"  median TTFT {milliseconds(reuse.ttft_ms)} ms",
        style="not bold",
    )
    if reuse.saved_ms:
        summary.append(f"  saved {span(reuse.saved_ms / 1000)}", style="not bold")
    verdicts = Text("verdicts", style="bold")
    for verdict, number in reuse.verdicts:
        verdicts.append(f"  {verdict} {number}", style=f"not bold {verdict_style(verdict)}")
    return Group(_line(summary, width), _line(verdicts, width)), 2


def _conversations(seen: Seen, width: int, rows_max: int) -> RenderableType:
    if not seen.conversations:
        return Text("no conversation is known yet", style="dim")
    return conversation_table(seen.conversations[:rows_max], width)
