"""How soon the cost model picks well, from priors that are wrong by four either way.

Every turn is a real one: the model picks, the engines serve, the model learns from that turn alone.
After each, its picks for cells that it never saw are compared with what those cells were measured
to take.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from bench.local.crossing import Cell, Measured, new_bytes
from bench.local.legs import Chat, Held, Message, text
from kvturn_router.choice.costs import Costs, Forecast, Priors
from kvturn_router.choice.plan import Plan, PlanKind, Resolution, Thresholds, TurnSize, decide

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from kvturn_cli.stack import Stack

HISTORIES = (300, 2600)
SUFFIXES = (8, 24, 90, 300, 900)
GROW_MAX = 3000
"""Tokens a conversation may hold; then another is begun."""


@dataclass
class Engine:
    """An engine as the choice sees it."""

    url: str
    usable: bool = True
    draining: bool = False
    in_flight: int = 0
    open: bool = True


@dataclass
class Only:
    """A role with one engine."""

    engine: Engine

    def least(self, tried: Collection[Engine] = ()) -> Engine | None:
        """Returns it."""
        return None if self.engine in tried else self.engine


@dataclass(frozen=True, slots=True)
class Score:
    """How much longer picks take than the best ways: the sums of all cells, and cell by cell."""

    in_all: float
    cells: tuple[float, ...]

    @classmethod
    def of(cls, took: Sequence[tuple[float, float]]) -> Score:
        """From what each cell took the way that was picked, and the best way."""
        picked, best = (sum(ms) for ms in zip(*took, strict=True))
        return cls(picked / best - 1.0, tuple(ms / least - 1.0 for ms, least in took))

    @property
    def mean(self) -> float:
        """The mean of all cells, the short ones counting as much as the long."""
        return sum(self.cells) / len(self.cells)

    def beyond(self, bound: float) -> int:
        """Cells for which the pick is worse than that."""
        return sum(excess > bound for excess in self.cells)


def repeated(cells: Mapping[Cell, Measured]) -> Score:
    """The score, by half of the measurements, of what the other half says is best.

    What no choice could do better than, for the noise of the measurements themselves.
    """
    took = []
    for measured in cells.values():
        known, true = zip(*(measured.halves(way) for way in measured.ms), strict=True)
        took.append((true[known.index(min(known))], min(true)))
    return Score.of(took)


@dataclass
class Lesson:
    """What came of one start."""

    name: str
    rates: Priors = field(default_factory=Priors)
    """What was learned in the end."""
    picks: list[str] = field(default_factory=list)
    scores: list[Score] = field(default_factory=list)
    """After each turn."""

    def good_after(self, bound: float) -> int:
        """The turn from which on both scores stay within the bound; past the last if none."""
        bad = [
            index
            for index, score in enumerate(self.scores)
            if max(score.in_all, score.mean) > bound
        ]
        return bad[-1] + 2 if bad else 1


def scaled(rates: Priors, compute: float, transfer: float, local: float) -> Priors:
    """Priors that are off by these factors."""
    own = rates.local or rates.prefill
    return Priors(
        prefill=_times(rates.prefill, compute),
        read=_times(rates.read, transfer),
        handover=_times(rates.handover, transfer),
        local=_times(own, local),
    )


def _times(rate: tuple[float, float], factor: float) -> tuple[float, float]:
    return rate[0] * factor, rate[1] * factor


class Pupil:
    """The choice with its costs, on one pair of engines."""

    def __init__(self, stack: Stack, priors: Priors) -> None:
        self.costs = Costs(priors)
        self._model = stack.served_model_name
        self._prefill = Engine(stack.prefill_url)
        self._decode = Engine(stack.decode_url)

    def decide(self, held: Held, size: TurnSize) -> Plan[Engine]:
        """The plan for a turn that extends what is held."""
        return decide(
            Resolution(
                None,
                held.lease_id,
                held.http_address,
                token_count=held.token_count,
                extends=True,
            ),
            size,
            Only(self._prefill),
            Only(self._decode),
            self._decode,
            self.costs,
            Thresholds(),
            model=self._model,
            alone=False,
            now_ns=time.monotonic_ns(),
        )

    def would_choose(self, measured: Measured) -> PlanKind:
        """The way of least estimated cost for a cell, without trying anything out."""
        url = self._decode.url
        forecast = Forecast(
            model=self._model,
            new_bytes=measured.new_bytes,
            new_tokens=self.costs.new_tokens(self._model, measured.new_bytes),
            held_tokens=measured.held_tokens,
            extends=True,
            holder=url,
            prefill=self._prefill.url,
            prefill_in_flight=0,
            decode=url,
            decode_in_flight=0,
        )
        told = self.costs.estimates(forecast, time.monotonic_ns())._asdict()
        return PlanKind(min(told, key=lambda way: told[way].ms))


def learn(
    stack: Stack, name: str, priors: Priors, turns: int, cells: Mapping[Cell, Measured]
) -> Lesson:
    """Serves `turns` turns as the model picks, and says how its picks fare on the cells."""
    rng = random.Random(name)
    pupil, lesson = Pupil(stack, priors), Lesson(name)
    number = 0
    while len(lesson.picks) < turns:
        number += 1
        chat = Chat(stack, f"{name}-{number}")
        asked = text(f"{name}-{number}", rng.randint(*HISTORIES))
        messages = [{"role": "user", "content": asked}]
        served = chat.serve(PlanKind.RECOMPUTE, messages)
        messages.append({"role": "assistant", "content": served.reply})
        for _ in range(4):
            held = chat.held()
            if held.token_count > GROW_MAX or len(lesson.picks) == turns:
                break
            _turn(chat, held, messages, pupil, lesson, rng)
            _judge(pupil, lesson, cells)
    lesson.rates = pupil.costs.learned()
    return lesson


def _turn(
    chat: Chat,
    held: Held,
    messages: list[Message],
    pupil: Pupil,
    lesson: Lesson,
    rng: random.Random,
) -> None:
    suffix = round(rng.choice(SUFFIXES) * rng.uniform(0.7, 1.3))
    messages.append({"role": "user", "content": text(f"more {len(messages)}", suffix)})
    size = new_bytes(messages)
    plan = pupil.decide(held, TurnSize(size, size))
    served = chat.serve(plan.kind, messages, held.lease_id)
    messages.append({"role": "assistant", "content": served.reply})
    assert plan.forecast is not None
    pupil.costs.learn(plan.kind, plan.forecast, served.took, time.monotonic_ns())
    lesson.picks.append(f"{plan.kind}{'*' if plan.reason.startswith('explored') else ''}")


def _judge(pupil: Pupil, lesson: Lesson, cells: Mapping[Cell, Measured]) -> None:
    lesson.scores.append(
        Score.of(
            [
                (
                    measured.median(pupil.would_choose(measured)),
                    min(measured.median(way) for way in measured.ms),
                )
                for measured in cells.values()
            ]
        )
    )
