"""Which retentions a decode engine gives up when requests need its memory. Sans-IO.

Those that the lease service called idle go first and those that it expects back go last. Among
equals the one goes that is worth least to keep: that returns least often per second of holding it.

How often retentions return depends on their age: rarely at once, most often after about a minute,
hardly ever after ten. So a *cell* is a class of retentions (turn and size) in a range of ages, the
ranges spaced by half octaves, and what is learned is the chance that a retention of the class that
reached the range returns within it. A retention that was consumed returned; one that ended in any
other way at age `a` only shows that it had not returned by then. A class of which little is known
is taken to be as all are, and before anything is known each range has the same chance, which makes
the order oldest first.

The worth of a cell is the best that waiting can give: over all horizons, the chance to return
before the horizon divided by the time that it will have been held until then. A retention too
young to return is so kept for the time when it will, and one past that time is not.

Costs: a retention moves through the ranges as it ages, when `choose` finds it, at most once each;
`choose` looks at the cells in use, not at the retentions. Instants are nanoseconds of one clock.
"""

from __future__ import annotations

from collections import OrderedDict
from enum import IntEnum


class Outlook(IntEnum):
    """What the lease service expects of a conversation; numbered as in lease.proto."""

    NORMAL = 1
    EXPECTED = 2
    IDLE = 3


RANGES = 26
"""Ranges of ages: under a second, then half octaves to 4,096 s, then all above."""
PRIOR_CHANCE = 0.05
"""Chance to return within one range that is assumed before anything is known."""
PRIOR_WEIGHT = 20.0
"""How many retentions the prior counts for, and what all classes tell a class counts for."""
LEARNED_MAX = 20_000
"""Ends that count; past it all are halved, so that what is learned follows the traffic."""
ENDS_PER_REVIEW = 256
"""Ends after which the worth of the cells is worked out anew."""

_SECOND_NS = 1_000_000_000
_TURNS_MAX = 4  # Later turns return as often as these.
_SIZES_TOKENS = (2_048, 16_384)
_CLASSES = (_TURNS_MAX + 1) * (len(_SIZES_TOKENS) + 1)
_ORDER = {Outlook.IDLE: 0, Outlook.NORMAL: 1, Outlook.EXPECTED: 2}


class _Kept:
    """One retention that may be given up."""

    __slots__ = ("blocks", "cell", "kind", "outlook", "retained_ns")

    def __init__(self, blocks: int, kind: int, retained_ns: int) -> None:
        self.blocks = blocks
        self.kind = kind
        self.retained_ns = retained_ns
        self.outlook = Outlook.NORMAL
        self.cell = (0, 0, 0)


class Victims:
    """The retentions of one engine, in the order in which they are given up.

    It holds one record for each retention between `retained` and `consumed` or `ended`; the caller
    limits their number. Unknown numbers are let pass everywhere.
    """

    def __init__(self) -> None:
        self._kept: dict[int, _Kept] = {}
        # (order of the outlook, class, range) -> numbers, about the oldest first.
        self._cells: dict[tuple[int, int, int], OrderedDict[int, None]] = {}
        self._returns = [[0.0] * RANGES for _ in range(_CLASSES)]
        self._ends = [[0.0] * RANGES for _ in range(_CLASSES)]
        self._learned = 0.0
        self._ends_to_review = ENDS_PER_REVIEW
        self._worth = self._review()

    def __len__(self) -> int:
        return len(self._kept)

    def retained(self, number: int, blocks: int, tokens: int, turn: int, now_ns: int) -> None:
        """Adds a retention; `turn` counts from 1, 0 where it is not known."""
        assert number not in self._kept
        assert blocks > 0
        assert turn >= 0
        kept = self._kept[number] = _Kept(blocks, _class_of(turn, tokens), now_ns)
        self._put(number, kept, 0)

    def outlook(self, number: int, outlook: int) -> None:
        """Notes what the lease service expects; NORMAL until then. A value it does not know too."""
        kept = self._kept.get(number)
        if kept is None:
            return
        known = outlook in (Outlook.EXPECTED, Outlook.IDLE)
        kept.outlook = Outlook(outlook) if known else Outlook.NORMAL
        self._take(number, kept)
        self._put(number, kept, kept.cell[2])

    def consumed(self, number: int, now_ns: int) -> None:
        """Removes a retention that was read, and learns from it."""
        kept = self._remove(number)
        if kept is not None:
            self._learn(self._returns, kept, now_ns)

    def ended(self, number: int, now_ns: int) -> None:
        """Removes one that ended otherwise or is given up now, and learns that it did not return.

        Call it for what `choose` named as soon as it is given up, so that it is not named again.
        """
        kept = self._remove(number)
        if kept is not None:
            self._learn(self._ends, kept, now_ns)

    def choose(self, blocks_wanted: int, now_ns: int) -> list[int]:
        """Returns which retentions to give up for so many blocks; all there are if too few.

        The one to give up first comes first. Nothing changes: what is given up has `ended`.
        """
        if blocks_wanted <= 0 or not self._kept:
            return []
        self._move(now_ns)
        chosen: list[int] = []
        surplus = -blocks_wanted
        for cell in sorted(self._cells, key=self._rank):
            for number in self._cells[cell]:
                chosen.append(number)
                surplus += self._kept[number].blocks
                if surplus >= 0:
                    return self._without_surplus(chosen, surplus)
        return chosen

    def _without_surplus(self, chosen: list[int], surplus: int) -> list[int]:
        """Spares, of those chosen, the worthiest that the others make up for."""
        spared = []
        for number in reversed(chosen):
            blocks = self._kept[number].blocks
            if blocks <= surplus:
                surplus -= blocks
                spared.append(number)
        return [number for number in chosen if number not in spared] if spared else chosen

    def _rank(self, cell: tuple[int, int, int]) -> tuple[int, float, int]:
        order, kind, age_range = cell
        return order, self._worth[kind][age_range], -age_range

    def _move(self, now_ns: int) -> None:
        """Brings retentions that grew older into the cells of their age, the oldest first."""
        for cell in sorted(self._cells, key=lambda each: -each[2]):
            numbers = self._cells[cell]
            while numbers:
                number = next(iter(numbers))
                kept = self._kept[number]
                age_range = _range_of(now_ns - kept.retained_ns)
                if age_range <= cell[2]:
                    break
                self._take(number, kept)
                self._put(number, kept, age_range)

    def _put(self, number: int, kept: _Kept, age_range: int) -> None:
        kept.cell = (_ORDER[kept.outlook], kept.kind, age_range)
        self._cells.setdefault(kept.cell, OrderedDict())[number] = None

    def _take(self, number: int, kept: _Kept) -> None:
        numbers = self._cells[kept.cell]
        del numbers[number]
        if not numbers:
            del self._cells[kept.cell]

    def _remove(self, number: int) -> _Kept | None:
        kept = self._kept.pop(number, None)
        if kept is not None:
            self._take(number, kept)
        return kept

    def _learn(self, counts: list[list[float]], kept: _Kept, now_ns: int) -> None:
        counts[kept.kind][_range_of(now_ns - kept.retained_ns)] += 1
        self._learned += 1
        self._ends_to_review -= 1
        if self._learned > LEARNED_MAX:
            self._learned /= 2
            for table in (self._returns, self._ends):
                table[:] = [[count / 2 for count in row] for row in table]
        if self._ends_to_review == 0:
            self._ends_to_review = ENDS_PER_REVIEW
            self._worth = self._review()

    def _review(self) -> list[list[float]]:
        """Works out what each class is worth at each age."""
        returns = [sum(column) for column in zip(*self._returns, strict=True)]
        ends = [sum(column) for column in zip(*self._ends, strict=True)]
        of_all = _chances(returns, ends, [PRIOR_CHANCE] * RANGES)
        return [
            _worths(_chances(*counts, of_all))
            for counts in zip(self._returns, self._ends, strict=True)
        ]


def _class_of(turn: int, tokens: int) -> int:
    size_class = sum(tokens >= size for size in _SIZES_TOKENS)
    return min(turn, _TURNS_MAX) * (len(_SIZES_TOKENS) + 1) + size_class


def _range_of(age_ns: int) -> int:
    """Returns the range of an age: 0 under a second, then two for each doubling."""
    doubled = 2 * age_ns * age_ns // (_SECOND_NS * _SECOND_NS)  # Its octaves are half ones of age.
    return min(max(doubled.bit_length() - 1, 0), RANGES - 1)


def _start_s(age_range: int) -> float:
    return 0.0 if age_range == 0 else float(2 ** ((age_range - 1) / 2))


_WIDTHS_S = [_start_s(age_range + 1) - _start_s(age_range) for age_range in range(RANGES)]


def _chances(returns: list[float], ends: list[float], prior: list[float]) -> list[float]:
    """Returns for each range the chance that what reaches it returns within it.

    What ended otherwise within a range was at risk for half of it.
    """
    chances = [0.0] * RANGES
    reached = 0.0
    for age_range in reversed(range(RANGES)):
        returned, ended = returns[age_range], ends[age_range]
        at_risk = reached + returned + ended / 2
        hits = returned + PRIOR_WEIGHT * prior[age_range]
        chances[age_range] = hits / (at_risk + PRIOR_WEIGHT)
        reached += returned + ended
    return chances


def _worths(chances: list[float]) -> list[float]:
    """Returns for each range the most returns per second of holding that any horizon gives."""
    worths = []
    for first in range(RANGES):
        best = returned = held_s = 0.0
        surviving = 1.0
        for chance, width_s in zip(chances[first:], _WIDTHS_S[first:], strict=True):
            returned += surviving * chance
            held_s += surviving * (1 - chance / 2) * width_s
            surviving *= 1 - chance
            best = max(best, returned / held_s)
        worths.append(best)
    return worths
