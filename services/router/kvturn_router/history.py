"""The history that a turn was asked with, as digests that later turns can be told by.

The digests chain over the raw bytes of the request's messages, so two turns
share a digest exactly where a client sent the same bytes again. They are made
under tenant, model, scope and path; they tell nothing of the text, and they are
not proof against someone who makes them equal on purpose: KV is reused only
where tokens are equal, so that costs reuse, of the same tenant, and nothing
else. Nothing here does I/O.
"""

from typing import NamedTuple

from kvturn_router.body import Members

ANSWERS_MAX = 18
"""Answers in a history, from the latest, at which an earlier turn is looked for."""


class History(NamedTuple):
    """What is known of a request's history.

    `points` are digests of 16 bytes: of the whole history, then of it up to
    right before each answer in it, the latest first, last up to its first
    message; at most 20, none where it cannot be read. `prompt_bytes` is the
    size of its JSON, `new_bytes` of what comes after the last answer in it.
    """

    points: tuple[bytes, ...]
    prompt_bytes: int
    new_bytes: int


def history_of(members: Members, path: str, tenant: str, model: str, scope: str) -> History:
    """Returns the history of a request to `path`; never raises for what a client sent.

    `scope` is what the client named: a conversation, a scope, or "".
    """
    raise NotImplementedError
