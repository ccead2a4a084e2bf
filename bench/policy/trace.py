"""The trace of requests, and which of them continue which.

The trace names no conversations. A request *continues* an earlier one when its prompt begins with
all full blocks of that one's prompt, at least two of them: the first block is the same in all
prompts, so one says nothing. Of several that it could continue it takes the one with the most
blocks. Two with equal blocks do not both wait to be continued: the later one continues the earlier
one. Each request is continued once, by the first that can: a retention is read once. Another one
that branches off the same request begins a conversation of its own. A conversation is such a chain
of turns, and as turns in it come in order of time, its newest retention supersedes the one before,
which the same turn has just read.

The last block of a prompt is left out unless it is full, because the answer and the next question
fill it up and so change its id.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

HASHED_BLOCK_TOKENS = 512
"""Tokens per hash id in the trace."""
_SHARED_BLOCKS_MIN = 2
_MILLISECOND_NS = 1_000_000


class TraceError(Exception):
    """A trace that cannot be read; the message says why."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request of the trace, a turn of a conversation."""

    number: int
    """Its place in the trace, from 0."""
    arrival_ns: int
    """Since the beginning of the trace."""
    prompt_tokens: int
    tokens: int
    """Prompt and answer: what is held when it is retained."""
    conversation: int
    """Number of the conversation's first request."""
    turn: int
    """Counts from 1 in its conversation."""
    parent: int | None
    """Number of the request that it continues."""
    reusable_tokens: int
    """Of those that the parent left, how many its prompt can be made of; 0 without a parent."""


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of arrival."""

    requests: Sequence[Request]
    digest: str
    """SHA-256 of the file, 64 hexadecimal digits."""

    @property
    def end_ns(self) -> int:
        """When the last request arrives; what is held is measured until then."""
        return self.requests[-1].arrival_ns

    @property
    def reusable_tokens(self) -> int:
        """What could be reused if everything were held for ever."""
        return sum(request.reusable_tokens for request in self.requests)

    def children(self) -> dict[int, Request]:
        """Returns, by the number of a request, the one that continues it."""
        return {one.parent: one for one in self.requests if one.parent is not None}


def read_trace(path: Path, requests_max: int | None = None) -> Trace:
    """Reads a trace, or its first `requests_max` requests. Raises TraceError."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise TraceError(f"{path} cannot be read ({error.strerror})") from None
    rows = []
    for line_number, line in enumerate(data.splitlines()[:requests_max], 1):
        try:
            row = json.loads(line)
            rows.append(
                (row["timestamp"], row["input_length"], row["output_length"], row["hash_ids"])
            )
        except (ValueError, KeyError, TypeError):
            raise TraceError(f"{path} line {line_number} is no request of the trace") from None
    if not rows:
        raise TraceError(f"{path} holds no requests")
    return Trace(_linked(sorted(rows, key=lambda row: row[0])), hashlib.sha256(data).hexdigest())


def _linked(rows: list[tuple[int, int, int, list[int]]]) -> list[Request]:
    requests: list[Request] = []
    waiting: dict[tuple[int, ...], int] = {}
    for number, (arrival_ms, prompt_tokens, answer_tokens, hash_ids) in enumerate(rows):
        parent = _longest_continued(hash_ids, waiting)
        tokens = prompt_tokens + answer_tokens
        conversation, turn, reusable_tokens = number, 1, 0
        if parent is not None:
            before = requests[parent]
            conversation, turn = before.conversation, before.turn + 1
            reusable_tokens = min(before.tokens, prompt_tokens)
        requests.append(
            Request(
                number,
                arrival_ms * _MILLISECOND_NS,
                prompt_tokens,
                tokens,
                conversation,
                turn,
                parent,
                reusable_tokens,
            )
        )
        full = tuple(hash_ids[: prompt_tokens // HASHED_BLOCK_TOKENS])
        if len(full) >= _SHARED_BLOCKS_MIN:
            waiting[full] = number
    return requests


def _longest_continued(hash_ids: list[int], waiting: dict[tuple[int, ...], int]) -> int | None:
    """Takes the request to continue out of those that wait to be."""
    for count in range(len(hash_ids), _SHARED_BLOCKS_MIN - 1, -1):
        number = waiting.pop(tuple(hash_ids[:count]), None)
        if number is not None:
            return number
    return None
