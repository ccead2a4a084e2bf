"""What no policy without foresight can do, however well it predicts.

Such a policy sees of a retention what `kind` tells, its age and, with client heartbeats, whether
its client is still there; what the others do is no news about it. All that it can choose is for how
long to hold a retention of a kind while its client is there. `Frontier` gives it more than it could
have: for each kind the true share that returns by each age, the right to hold a part of the
retentions of a kind for one time and the rest for another, and a memory that is limited only on
average over the whole trace, not at each moment. The best use of that is a linear program, one
choice of a holding time for each kind under one budget, and is solved exactly: for each kind the
upper hull of tokens reused over token-seconds held, and of all hulls the steepest pieces first.

The finer the kinds, the more of what they tell is chance: with one kind for each retention this is
full foresight. The bound is one for policies that know no more than the kinds tell.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable

    from bench.policy.trace import Request, Trace

_SECOND_NS = 1_000_000_000


def by_turn(request: Request) -> Hashable:
    """What `victims.py` tells apart."""
    return min(request.turn, 6)


def by_turn_and_sizes(request: Request) -> Hashable:
    """Turn, prompt in steps of four times, answer in steps of four times: 70 kinds or so."""
    answer_tokens = request.tokens - request.prompt_tokens
    return (
        min(request.turn, 6),
        min(max(request.prompt_tokens.bit_length() // 2, 5), 8),
        min(max(answer_tokens.bit_length() // 2, 2), 5),
    )


@dataclass(frozen=True, slots=True)
class _Fate:
    """What becomes of one retention if it is held for long enough."""

    tokens: int
    reusable_tokens: int
    """0 if it is not read."""
    span_ns: int
    """Until it is read, its client is known to be gone, or the trace ends."""


class Frontier:
    """The most that can be reused for what it costs in token-seconds."""

    def __init__(
        self, trace: Trace, kind: Callable[[Request], Hashable], gone_after_ns: int | None
    ) -> None:
        """`gone_after_ns` after its last turn a client is known to be gone; None: never known."""
        fates = defaultdict(list)
        children = trace.children()
        for request in trace.requests:
            span_ns = trace.end_ns - request.arrival_ns
            child = children.get(request.number)
            if child is not None:
                span_ns = child.arrival_ns - request.arrival_ns
            elif gone_after_ns is not None:
                span_ns = min(span_ns, gone_after_ns)
            reusable_tokens = 0 if child is None else child.reusable_tokens
            fates[kind(request)].append(_Fate(request.tokens, reusable_tokens, span_ns))
        pieces = itertools.chain.from_iterable(_hull(each) for each in fates.values())
        self._pieces = sorted(pieces, key=lambda piece: piece[1] / piece[0], reverse=True)

    def reused_tokens(self, token_ns_max: float) -> float:
        """Returns how many tokens can be reused at most while holding no more than that."""
        reused_tokens = 0.0
        for token_ns, tokens in self._pieces:
            part = min(token_ns_max / token_ns, 1.0)
            reused_tokens += part * tokens
            token_ns_max -= part * token_ns
        return reused_tokens

    def corners(self) -> list[tuple[float, float]]:
        """Returns (token-ns, tokens) along the frontier, about a hundred points."""
        held = reused = 0.0
        points = [(held, reused)]
        for token_ns, tokens in self._pieces:
            held += token_ns
            reused += tokens
            points.append((held, reused))
        return points[:: max(1, len(points) // 100)] + points[-1:]

    def token_ns(self, reused_tokens_min: float) -> float:
        """Returns what must be held at least to reuse so many tokens."""
        needed_token_ns = 0.0
        for token_ns, tokens in self._pieces:
            part = min(max(reused_tokens_min, 0.0) / tokens, 1.0)
            needed_token_ns += part * token_ns
            reused_tokens_min -= part * tokens
        return needed_token_ns


def _hull(fates: Iterable[_Fate]) -> list[tuple[float, float]]:
    """Returns the pieces (token-ns, tokens) of the upper hull, over all times to hold a kind."""
    ordered = sorted(fates, key=lambda fate: fate.span_ns)
    there_tokens = sum(fate.tokens for fate in ordered)
    held = reused = 0
    before_ns = 0
    corners = [(0, 0)]
    for span_ns, ends in itertools.groupby(ordered, key=lambda fate: fate.span_ns):
        held += there_tokens * (span_ns - before_ns)
        before_ns = span_ns
        for fate in ends:
            there_tokens -= fate.tokens
            reused += fate.reusable_tokens
        while len(corners) > 1 and _is_below(corners[-2], corners[-1], (held, reused)):
            corners.pop()
        if reused > corners[-1][1] and held > corners[-1][0]:
            corners.append((held, reused))
    return [
        (float(right[0] - left[0]), float(right[1] - left[1]))
        for left, right in itertools.pairwise(corners)
    ]


def _is_below(left: tuple[int, int], middle: tuple[int, int], right: tuple[int, int]) -> bool:
    """Tells whether the middle corner lies on or under the line from left to right."""
    rise, run = right[1] - left[1], right[0] - left[0]
    return (middle[1] - left[1]) * run <= rise * (middle[0] - left[0])
