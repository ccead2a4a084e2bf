"""What a policy that knows the future could reuse with the same memory.

`reused_tokens_max` is a bound: no policy that delays no request reuses more. It may hold any part
of a retention, and holds only what is read later, until then. Each token held for a later turn is
an interval in time, all are worth the same, and at each arrival what the memory leaves beside the
arriving request limits how many may overlap. The most are kept by going through the arrivals and,
where too many overlap, dropping those that end last: all of them reach up to this arrival, and
what ends earlier is in the way of no later one that what ends last is not in the way of too.

`reused_tokens_whole` drops whole retentions in the same order. A policy could reach that if it knew
the future; it is no bound, for which whole ones to drop is a knapsack. The best lies between both.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bench.policy.trace import Trace


def reused_tokens_max(trace: Trace, memory_tokens: int) -> int:
    """Returns how many tokens can be reused at most. See above for what is assumed."""
    return _reused_tokens(trace, memory_tokens, whole=False)


def reused_tokens_whole(trace: Trace, memory_tokens: int) -> int:
    """Returns how many tokens dropping whole retentions, the latest read first, reuses."""
    return _reused_tokens(trace, memory_tokens, whole=True)


def _reused_tokens(trace: Trace, memory_tokens: int, *, whole: bool) -> int:
    children = trace.children()
    held: dict[int, int] = {}  # Tokens by the number of the request that reads them.
    latest: list[int] = []  # The same numbers, negated: a heap with the latest first.
    held_tokens = reused_tokens = 0
    for request in trace.requests:
        read_tokens = held.pop(request.number, 0)
        held_tokens -= read_tokens
        reused_tokens += read_tokens
        if request.tokens > memory_tokens:
            continue
        while held_tokens > memory_tokens - request.tokens:
            reader = -latest[0]
            if reader not in held:
                heapq.heappop(latest)
                continue
            surplus = held_tokens - (memory_tokens - request.tokens)
            dropped = held[reader] if whole else min(held[reader], surplus)
            held_tokens -= dropped
            held[reader] -= dropped
            if held[reader] == 0:
                del held[reader]
        child = children.get(request.number)
        if child is not None:
            tokens = child.reusable_tokens
            held[child.number] = tokens
            held_tokens += tokens
            heapq.heappush(latest, -child.number)
    return reused_tokens
