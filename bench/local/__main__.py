"""Measures when decode alone beats a read, and how well the cost model picks, on real engines.

    python -m bench.local [--vllm VERSION ...] [--rounds N] [--turns N] [--out FILE]

Takes about a quarter of an hour for each version on a machine that does nothing else; busy with
anything else, it measures that. Needs what `make setup` prepares.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
from pathlib import Path
from typing import TYPE_CHECKING

from bench.lease.figures import Table
from bench.lease.machine import facts, load_average
from bench.local.crossing import WAYS, Cell, Measured, measure
from bench.local.learning import Lesson, Score, learn, repeated, scaled
from bench.local.legs import Setup
from kvturn_router.choice.costs import Priors
from kvturn_router.choice.plan import PlanKind

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvturn_cli.stack import Stack

RESULTS = Path(__file__).with_name("RESULTS.md")
SETUPS = (
    Setup("blocks of 32, decode computes in steps of 128 tokens", 32, 128),
    Setup("blocks of 128", 128),
)
CELLS = tuple(Cell(*pair) for pair in itertools.product((900, 2600), (10, 40, 160, 600, 1500)))
WRONG = ((4.0, 4.0, 4.0), (0.25, 0.25, 0.25), (4.0, 4.0, 0.25), (0.25, 0.25, 4.0))
"""Factors by which the priors are wrong: prefill's, the transfers', decode's own computing."""
BOUND = 0.1


def main() -> None:
    """Runs it."""
    parser = argparse.ArgumentParser(prog="python -m bench.local", description=__doc__)
    parser.add_argument(
        "--vllm", nargs="+", default=["0.32.0"], help="vLLM versions (default 0.32.0)"
    )
    parser.add_argument("--rounds", type=int, default=7, help="turns of each cell and way")
    parser.add_argument("--turns", type=int, default=30, help="turns of each start")
    parser.add_argument("--out", type=Path, default=RESULTS, help="file for the tables")
    args = parser.parse_args()
    loads = [load_average()]
    tables: list[Table] = []
    for version, setup in itertools.product(args.vllm, SETUPS):
        with setup.stack(version) as stack:
            name = f"vLLM {version}, {setup.name}"
            measure(stack, (Cell(200, 20),), 1)
            cells = measure(stack, CELLS, args.rounds)
            tables.append(_crossing(name, args.rounds, cells))
            print(tables[-1].markdown(), flush=True)
            tables.append(_learning(stack, name, args.turns, cells))
            print(tables[-1].markdown(), flush=True)
            loads.append(load_average())
    how = (
        f"`python -m bench.local --vllm {' '.join(args.vllm)} --rounds {args.rounds} "
        f"--turns {args.turns}`, "
        f"{datetime.date.today()}, on {facts()}; load averages at the beginning and after each "
        f"set-up {'; '.join(loads)}, of which the engines themselves are at most 2."
    )
    text = "\n".join(
        [
            "# Computing a suffix on decode beside reading KV back",
            "",
            how,
            "",
            *(table.markdown() for table in tables),
        ]
    )
    args.out.write_text(text)


def _crossing(name: str, rounds: int, cells: Mapping[Cell, Measured]) -> Table:
    rows = []
    for cell in CELLS:
        found = cells[cell]
        medians = [found.median(way) for way in WAYS]
        local, pull = medians[0], medians[1]
        rows.append(
            (
                str(found.held_tokens),
                str(found.new_tokens),
                *(f"{ms:.0f}" for ms in medians),
                f"{local / pull:.2f}",
                f"{max(found.scatter(way) for way in WAYS[:2]):.0%}",
            )
        )
    return Table(
        f"Time to the first token, {name}",
        f"Milliseconds, medians of {rounds} turns (recompute: of every third) that were served in "
        "mixed order, through both legs as the router makes them. Scatter: half of the turns lie "
        "further from the median, local's or pull's, whichever is more. Prefill has no prefix "
        "cache of its own.",
        ("held tokens", "new tokens", *WAYS, "local / pull", "scatter"),
        rows,
    )


def _learning(stack: Stack, name: str, turns: int, cells: Mapping[Cell, Measured]) -> Table:
    found = learn(stack, "stated priors", Priors(), turns, cells)
    lessons = [found]
    for factors in WRONG:
        compute, transfer, local = factors
        start = f"prefill x{compute:g}, transfers x{transfer:g}, local x{local:g}"
        lessons.append(learn(stack, start, scaled(found.rates, *factors), turns, cells))
        print(start, lessons[-1].picks, flush=True)
    floor = repeated(cells)
    return Table(
        f"Picks of the cost model, {name}",
        f"Each start served {turns} real turns of growing conversations as the model picked and "
        "learned from those alone. After each turn its picks for the cells above, whose turns it "
        "never saw, were compared with the best way of each, by the measured medians: by how much "
        "all cells together take longer / by how much a cell does on average. Right rates are "
        "those that the stated priors had learned in their turns. Explored: turns that went a way "
        "only because little was known of it. What half of the measurements says is best, judged "
        f"by the other half, takes {_shown(floor)} longer, and {floor.beyond(BOUND)} cells more "
        f"than {BOUND:.0%}: that much is noise.",
        (
            "priors",
            "before turn 5",
            "10",
            "last",
            f"from turn on within {BOUND:.0%}",
            f"cells beyond {BOUND:.0%} in the end",
            "local, pull, recompute",
            "explored",
        ),
        [_row(lesson) for lesson in lessons],
    )


def _row(lesson: Lesson) -> tuple[str, ...]:
    ways = [pick.rstrip("*") for pick in lesson.picks]
    last = lesson.scores[-1]
    return (
        lesson.name,
        *(_shown(lesson.scores[min(turn, len(ways) - 1)]) for turn in (3, 8, len(ways) - 1)),
        str(lesson.good_after(BOUND)),
        f"{last.beyond(BOUND)} of {len(last.cells)}",
        ", ".join(
            str(ways.count(way)) for way in (PlanKind.LOCAL, PlanKind.PULL, PlanKind.RECOMPUTE)
        ),
        str(sum(pick.endswith("*") for pick in lesson.picks)),
    )


def _shown(score: Score) -> str:
    return f"{score.in_all:.1%} / {score.mean:.1%}"


if __name__ == "__main__":
    main()
