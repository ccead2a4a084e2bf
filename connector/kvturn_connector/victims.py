"""Which retentions a decode engine gives up when requests need its memory. Sans-IO.

Those that the lease service calls idle go first and those that it expects back go last. Among those
of one outlook the one goes first that is worth least: that returns least often per second of
holding it. Its size does not matter: a large one saves as much more as it takes.

How often retentions return depends on their age (rarely at once, most after a minute or two, few
after ten), on the outlook, and on the turn of the conversation (second turns more often than first
ones). So there is, for each outlook and range of ages, the ranges spaced by half octaves, a chance
to return within the range of those that reach it, learned from this engine's own retentions. One
that was consumed returned; one that went idle left; one that ended in any other way, or got another
outlook, shows no more than that it had not returned by then. Turns are told apart by one factor
each on the chances of all ranges: how many of them returned, over how many would have if all turns
were alike. What is not known yet is taken from the priors, which fade as ends are counted.

The worth of an age is the best that waiting can give: over all horizons, the chance to return
before the horizon divided by the time that it is held until then. So a retention too young to
return is kept for the time when it will, and one past that time is not.

Costs: `choose` looks at the cells (outlook, turn, range) in use, not at all retentions; it moves
those that grew older from range to range, each at most once per range. Instants are nanoseconds of
one clock.
"""

from __future__ import annotations

import itertools
import math
from collections import OrderedDict
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol


class Outlook(IntEnum):
    """What the lease service expects of a conversation; numbered as in lease.proto."""

    NORMAL = 1
    EXPECTED = 2
    IDLE = 3


RANGES = 26
"""Ranges of ages: under a second, then half octaves to 4,096 s, then all above."""
ENDS_PER_REVIEW = 128
"""Ends after which the worth of the cells is worked out anew."""
MOVES_PER_CHOICE = 1_000
"""Retentions that one `choose` moves to the range of their age, so that no step waits for it."""
LEARNED_MAX = 20_000
"""Ends that count; past it all are halved, so that what is learned follows the traffic."""

ASKED_FOR_NS = 30_000_000_000
"""For how long a turn may have been in flight that ends in a read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Priors:
    """What is assumed of returns before any were seen."""

    return_share_normal: float = 0.33
    """Share that returns in the end of those that nothing is known of."""
    return_share_expected: float = 0.9
    """The same of those that keep being expected."""
    return_share_idle: float = 0.1
    """The same of those that are idle."""
    return_median_s: float = 100.0
    """Half of those that return have done so by then."""
    return_sigma: float = 1.0
    """Spread of the logarithm of the time to return, which is taken to be normal."""
    leave_chance: float = 0.02
    """Chance to go idle within one range of ages."""
    turn_factors: tuple[float, ...] = (1.0, 0.8, 1.3, 1.7, 2.0, 2.2, 2.5)
    """Factor of each turn; the first one of an unknown turn, the last one of all later turns."""
    chance_weight: float = 20.0
    """How many retentions the chances above count for."""
    factor_weight: float = 10.0
    """How many returns the factors above count for."""

    def return_share(self, outlook: Outlook) -> float:
        """Returns the share of an outlook."""
        if outlook == Outlook.IDLE:
            return self.return_share_idle
        expected = outlook == Outlook.EXPECTED
        return self.return_share_expected if expected else self.return_share_normal

    def returned_by(self, outlook: Outlook, age_s: float) -> float:
        """Returns the share that has returned by an age."""
        if age_s == 0:
            return 0.0
        deviations = math.log(age_s / self.return_median_s) / self.return_sigma
        return self.return_share(outlook) * (1 + math.erf(deviations / math.sqrt(2))) / 2


PRIORS = Priors()
_SECOND_NS = 1_000_000_000
_CHANCE_MAX = 0.99
_ORDER = {Outlook.IDLE: 0, Outlook.NORMAL: 1, Outlook.EXPECTED: 2}


class _Kept:
    """One retention that may be given up."""

    __slots__ = (
        "cell",
        "entered_range",
        "expected_ns",
        "outlook",
        "outlook_before",
        "retained_ns",
        "turn",
    )

    def __init__(self, turn: int, retained_ns: int) -> None:
        self.turn = turn
        self.retained_ns = retained_ns
        self.outlook = Outlook.NORMAL
        self.entered_range = 0
        """Range of ages in which it got its outlook."""
        self.outlook_before = Outlook.NORMAL
        self.expected_ns = -1
        self.cell = (0, 0, 0)

    def was_asked_for(self, now_ns: int) -> bool:
        """Tells whether one that is read now is expected only because its turn is in flight.

        If its client had said that it will be back, it would have been expected for longer than
        not.
        """
        if self.expected_ns < 0:
            return False
        expected_for_ns = now_ns - self.expected_ns
        return expected_for_ns < min(ASKED_FOR_NS, self.expected_ns - self.retained_ns)


class _History:
    """What became of retentions while they had one outlook, by range of ages."""

    def __init__(self, priors: Priors, outlook: Outlook) -> None:
        self._priors = priors
        returned = [priors.returned_by(outlook, _start_s(each)) for each in range(RANGES + 1)]
        self._prior_chances = [
            (by_end - by_start) / (1 - by_start)
            for by_start, by_end in itertools.pairwise(returned)
        ]
        self.entered = [0.0] * RANGES
        self.returned = [0.0] * RANGES
        self.left = [0.0] * RANGES
        self.stopped = [0.0] * RANGES
        self.review()

    def halve(self) -> None:
        for counts in (self.entered, self.returned, self.left, self.stopped):
            counts[:] = [count / 2 for count in counts]

    def review(self) -> None:
        """Works out the chances to return and to leave, and how many returns are due by an age.

        Whatever ends within a range was at risk for half of it.
        """
        self.return_chances = [0.0] * RANGES
        self.leave_chances = [0.0] * RANGES
        weight = self._priors.chance_weight
        later = 0.0  # How many came through the range, out of those that were there before it.
        for each in reversed(range(RANGES)):
            returned, left = self.returned[each], self.left[each]
            ends = returned + left + self.stopped[each]
            at_risk = later + ends / 2 + weight
            hits = returned + weight * self._prior_chances[each]
            leaves = left + weight * self._priors.leave_chance
            self.return_chances[each] = min(hits / (at_risk + returned / 2), _CHANCE_MAX)
            self.leave_chances[each] = min(leaves / (at_risk + left / 2), _CHANCE_MAX)
            later += ends - self.entered[each]
        self.due = [0.0]
        for chance in self.return_chances:
            self.due.append(self.due[-1] - math.log(1 - chance))

    def worths(self, factor: float) -> list[float]:
        """Returns for each range the most returns per second of holding that any horizon gives."""
        chances = [1 - (1 - chance) ** factor for chance in self.return_chances]
        worths = []
        for first in range(RANGES):
            best = returned = held_s = 0.0
            there = 1.0
            for each in range(first, RANGES):
                gone = min(chances[each] + self.leave_chances[each], 1.0)
                returned += there * chances[each]
                held_s += there * (1 - gone / 2) * _WIDTHS_S[each]
                there *= 1 - gone
                best = max(best, returned / held_s)
            worths.append(best)
        return worths


class Freed(Protocol):
    """What becomes free if some retentions are given up."""

    @property
    def count(self) -> int:
        """Blocks that nobody refers to then."""

    def add(self, number: int) -> None:
        """This one is given up, too."""

    def spare(self, number: int, least: int) -> bool:
        """Keeps this one after all, if `least` blocks become free without it; returns whether."""


class Victims:
    """The retentions of one engine, in the order in which they are given up.

    It holds one record for each retention between `retained` and `consumed` or `ended`; the caller
    limits their number. Unknown numbers are let pass everywhere.
    """

    def __init__(self, priors: Priors = PRIORS) -> None:
        self._priors = priors
        self._kept: dict[int, _Kept] = {}
        # (order of the outlook, turn, range) -> numbers, about the oldest first.
        self._cells: dict[tuple[int, int, int], OrderedDict[int, None]] = {}
        self._histories = {each: _History(priors, each) for each in Outlook}
        self._returned = [0.0] * len(priors.turn_factors)
        self._due = [0.0] * len(priors.turn_factors)
        self._learned = 0.0
        self._ends_to_review = ENDS_PER_REVIEW
        self._worths: dict[tuple[int, int], list[float]] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def retained(self, number: int, turn: int, now_ns: int) -> None:
        """Adds a retention; `turn` counts from 1, 0 where it is not known."""
        assert number not in self._kept
        assert turn >= 0
        kept = _Kept(min(turn, len(self._priors.turn_factors) - 1), now_ns)
        self._kept[number] = kept
        self._put(number, kept, 0)

    def outlook(self, number: int, outlook: int, now_ns: int) -> None:
        """Notes what the lease service expects; NORMAL until then. A value it does not know too."""
        kept = self._kept.get(number)
        known = outlook in (Outlook.EXPECTED, Outlook.IDLE)
        new = Outlook(outlook) if known else Outlook.NORMAL
        if kept is None or kept.outlook == new:
            return
        history = self._histories[kept.outlook]
        self._learn(kept, history.left if new == Outlook.IDLE else history.stopped, now_ns)
        kept.expected_ns = now_ns if new == Outlook.EXPECTED else -1
        kept.outlook_before, kept.outlook = kept.outlook, new
        kept.entered_range = _range_of(now_ns - kept.retained_ns)
        self._take(number, kept)
        self._put(number, kept, kept.entered_range)

    def consumed(self, number: int, now_ns: int) -> None:
        """Removes a retention whose conversation came back for it, and learns from that."""
        kept = self._remove(number)
        if kept is None:
            return
        if kept.was_asked_for(now_ns):  # It returned while it had the outlook before.
            history = self._histories[kept.outlook_before]
            history.stopped[kept.entered_range] -= 1
            history.returned[kept.entered_range] += 1
        else:
            self._learn(kept, self._histories[kept.outlook].returned, now_ns)
        self._returned[kept.turn] += 1

    def ended(self, number: int, now_ns: int) -> None:
        """Removes one that ended otherwise or is given up now, and learns that it did not return.

        Call it for what `choose` named as soon as it is given up, so that it is not named again.
        """
        kept = self._remove(number)
        if kept is not None:
            self._learn(kept, self._histories[kept.outlook].stopped, now_ns)

    def choose(self, blocks_wanted: int, now_ns: int, freed: Freed) -> list[int]:
        """Returns which retentions to give up for so many blocks; all there are if too few.

        `freed` is what becomes free without them, and then with them. The one to give up first
        comes first. Nothing else changes: what is given up has `ended`.
        """
        if blocks_wanted <= freed.count or not self._kept:
            return []
        self._move(now_ns)
        chosen: list[int] = []
        for cell in sorted(self._cells, key=self._rank):
            for number in self._cells[cell]:
                chosen.append(number)
                freed.add(number)
                if freed.count >= blocks_wanted:
                    # The worthiest of them that the others make up for are spared.
                    spared = {each for each in reversed(chosen) if freed.spare(each, blocks_wanted)}
                    return [each for each in chosen if each not in spared]
        return chosen

    def _rank(self, cell: tuple[int, int, int]) -> tuple[int, float, int]:
        order, turn, age_range = cell
        worths = self._worths.get((order, turn))
        if worths is None:
            history = next(self._histories[each] for each in Outlook if _ORDER[each] == order)
            worths = self._worths[order, turn] = history.worths(self._factor(turn))
        return order, worths[age_range], -age_range

    def _factor(self, turn: int) -> float:
        weight = self._priors.factor_weight
        returned = self._returned[turn] + weight * self._priors.turn_factors[turn]
        return returned / (self._due[turn] + weight)

    def _move(self, now_ns: int) -> None:
        """Brings retentions that grew older into the cells of their age, the oldest first.

        After a long time without need there are many; the next calls go on with what is left.
        """
        moves_left = MOVES_PER_CHOICE
        for cell in sorted(self._cells, key=lambda each: -each[2]):
            numbers = self._cells[cell]
            while numbers:
                number = next(iter(numbers))
                kept = self._kept[number]
                age_range = _range_of(now_ns - kept.retained_ns)
                if age_range <= cell[2]:
                    break
                if moves_left == 0:
                    return
                moves_left -= 1
                self._take(number, kept)
                self._put(number, kept, age_range)

    def _put(self, number: int, kept: _Kept, age_range: int) -> None:
        kept.cell = (_ORDER[kept.outlook], kept.turn, age_range)
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

    def _learn(self, kept: _Kept, ends: list[float], now_ns: int) -> None:
        """Counts what became of a retention while it had its outlook."""
        history = self._histories[kept.outlook]
        first, last = kept.entered_range, _range_of(now_ns - kept.retained_ns)
        history.entered[first] += 1
        ends[last] += 1
        due = (history.due[last] + history.due[last + 1]) / 2 - history.due[first]
        self._due[kept.turn] += max(due, 0.0)
        self._learned += 1
        self._ends_to_review -= 1
        if self._ends_to_review == 0:
            self._ends_to_review = ENDS_PER_REVIEW
            self._review()

    def _review(self) -> None:
        if self._learned > LEARNED_MAX:
            self._learned /= 2
            for counts in (self._returned, self._due):
                counts[:] = [count / 2 for count in counts]
            for history in self._histories.values():
                history.halve()
        for history in self._histories.values():
            history.review()
        self._worths.clear()


def _range_of(age_ns: int) -> int:
    """Returns the range of an age: 0 under a second, then two for each doubling."""
    doubled = 2 * age_ns * age_ns // (_SECOND_NS * _SECOND_NS)  # Its octaves are half ones of age.
    return min(max(doubled.bit_length() - 1, 0), RANGES - 1)


def _start_s(age_range: int) -> float:
    return 0.0 if age_range == 0 else float(2 ** ((age_range - 1) / 2))


_WIDTHS_S = [_start_s(each + 1) - _start_s(each) for each in range(RANGES)]
