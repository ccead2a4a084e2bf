"""The history that a turn was asked with, as digests that later turns can be told by.

The digests chain over the raw bytes of the request's messages, so two turns
share a digest exactly where a client sent the same bytes again. They are made
under tenant, model, scope and path; they tell nothing of the text, and they are
not proof against someone who makes them equal on purpose: KV is reused only
where tokens are equal, so that costs reuse, of the same tenant, and nothing
else. Nothing here does I/O.

A chat is cut right before each answer in it, because an earlier turn was asked
with just what comes before its answer. Most clients write the role first; then
the answers are found from the end without reading the rest. Otherwise the
array is split. Both cut at the same bytes.

A prompt is text without seams. It is cut at places that depend on nothing but
their distance from its start: the numbers of at most five significant bits, so
that neighbours are 3 to 6 % apart. A turn's own digest is made at the last of
them that its prompt reaches, and a later turn looks at the 18 before its own,
which finds any earlier turn of at least half its length. A turn that adds less
than 3 to 6 % has the same own digest: it is taken for the same prompt again.
"""

from collections.abc import Sequence
from typing import Final

import msgspec
import xxhash

from kvturn_router.request.body import Members
from kvturn_router.request.intake import CHAT

ANSWERS_MAX = 18
"""Answers in a history, from the latest, at which an earlier turn is looked for."""

_SIGNIFICANT_BITS: Final = 5

_SPACE: Final = b" \t\r\n"
_SEPARATORS: Final = b", \t\r\n"
_ROLE_FIRST: Final = b'{"role":'
_COMPACT: Final = b'},{"role":'
_SPACED: Final = b'}, {"role": '
_ASSISTANT: Final = b'"assistant"'
# What only an item has that a model made: a message, its reasoning, a call.
_MODEL_MADE: Final = (_ASSISTANT, b'"reasoning"', b'_call"')

_BETWEEN_BYTES_MAX: Final = 64
"""White space between items beyond this is taken for the item before."""

_array_decoder = msgspec.json.Decoder(list[msgspec.Raw])

_PROMPTS: Final = {CHAT: "messages", "/v1/responses": "input"}
"""The member that holds a request's history, by path; "prompt" elsewhere."""


class History(msgspec.Struct, frozen=True):
    """What is known of a request's history.

    `points` are digests of 16 bytes: of the whole history, then of it up to
    right before each answer in it, the latest first, last up to its first
    message; at most 20, none where it cannot be read. `prompt_bytes` is the
    size of its JSON, `new_bytes` of what comes after the last answer in it.
    `goes_on` is false where there is no answer in it: then it goes on from no
    turn, and an equal one may as well be another client's.
    """

    points: tuple[bytes, ...]
    prompt_bytes: int
    new_bytes: int
    goes_on: bool = True


class _Cuts(msgspec.Struct, frozen=True):
    """Where a history is cut, as offsets into its JSON.

    `begin` and `end` enclose it; `answers` are where answers begin, latest
    first; `first` is the end of the first message, `new` the end of the last
    answer.
    """

    begin: int
    end: int
    answers: Sequence[int]
    first: int
    new: int


def history_of(members: Members, path: str, tenant: str, model: str, scope: str) -> History:
    """Returns the history of a request to `path`; never raises for what a client sent.

    `scope` is what the client named: a conversation, a scope, or "".
    """
    name = _PROMPTS.get(path, "prompt")
    value = members.get(name)
    if value is None:
        return History((), 0, 0)
    text = bytes(value)
    if name == "prompt":
        cuts = _prompt_cuts(text)
    elif text[:1] == b"[":
        if name == "messages":
            cuts = _role_first_cuts(text) or _item_cuts(text, (_ASSISTANT,))
        else:
            cuts = _item_cuts(text, _MODEL_MADE)
    else:
        cuts = _Cuts(0, len(text), (), 0, 0)
    if cuts is None:
        return History((), len(text), len(text))
    seed = "\0".join((tenant, model, scope, path)).encode("utf-8", "surrogatepass")
    goes_on = bool(cuts.answers) or name == "prompt"
    return History(_digests(seed, text, cuts), len(text), len(text) - cuts.new, goes_on)


def _digests(seed: bytes, text: bytes, cuts: _Cuts) -> tuple[bytes, ...]:
    # Once through the text, from the start.
    chain = xxhash.xxh3_128(seed)
    update, digest = chain.update, chain.digest
    view = memoryview(text)
    position = cuts.begin
    digests: list[bytes] = []
    for place in sorted({cuts.first, *cuts.answers, cuts.end}):
        if place > position:
            update(view[position:place])
            position = place
            digests.append(digest())
    digests.reverse()
    return tuple(digests)


def _prompt_cuts(text: bytes) -> _Cuts | None:
    # Places count from the first byte after the quote or bracket. How far a
    # prompt reaches need not be exact, so what may close it is left out.
    size = len(text.rstrip(b'"]')) - 1
    if size < 1:
        return None
    places: list[int] = []
    place = size
    while place and len(places) <= ANSWERS_MAX:
        step = 1 << max(0, place.bit_length() - _SIGNIFICANT_BITS)
        place -= place % step
        places.append(place + 1)
        place -= 1
    return _Cuts(1, places[0], places[1:], places[-1], places[0])


def _role_first_cuts(text: bytes) -> _Cuts | None:
    """Cuts an array of messages; returns None if an answer in it does not have its role first."""
    end = _seam(text, len(text) - 1)
    answers: list[int] = []
    place = len(text)
    new = 1
    while len(answers) < ANSWERS_MAX:
        place = text.rfind(_ASSISTANT, 0, place)
        if place < 0:
            break
        # Nearly all clients write one of two ways; what is read here is what _seam would find.
        if text[place - len(_COMPACT) : place] == _COMPACT:
            seam = place - len(_COMPACT) + 1
        elif text[place - len(_SPACED) : place] == _SPACED:
            seam = place - len(_SPACED) + 1
        else:
            start = place - len(_ROLE_FIRST)
            if text[start - 1 : start] == b"{" and text[place - 1 : place] == b" ":
                start -= 1
            if text[start:place].rstrip(_SPACE) != _ROLE_FIRST:
                return None
            seam = _seam(text, start)
        if not answers:
            following = _next_role(text, place)
            new = end if following < 0 else _seam(text, following)
        answers.append(seam)
    return _Cuts(1, end, answers, _first_seam(text), new)


def _next_role(text: bytes, place: int) -> int:
    """Returns where the first item after `place` begins, less than 0 if none does."""
    last = text.rfind(_ROLE_FIRST, place)
    if last < 0 or text.rfind(_ROLE_FIRST, place, last) < 0:
        return last  # nearly always, and a search backwards is several times faster
    return text.find(_ROLE_FIRST, place)


def _first_seam(text: bytes) -> int:
    # Searching backwards is several times faster, so that finds about where.
    begin, reach = 2, 1024
    while text.rfind(_ROLE_FIRST, begin, reach) < 0:
        if reach >= len(text):
            return _seam(text, len(text) - 1)
        begin, reach = reach - len(_ROLE_FIRST), reach * 2
    return _seam(text, text.find(_ROLE_FIRST, begin))


def _seam(text: bytes, place: int) -> int:
    """Returns the end of the item before `place`, which is where an item or the array ends."""
    between = text[max(1, place - _BETWEEN_BYTES_MAX) : place]
    return place - len(between) + len(between.rstrip(_SEPARATORS))


def _item_cuts(text: bytes, marks: Sequence[bytes]) -> _Cuts | None:
    """Cuts an array of messages or items; returns None if they are not objects.

    An answer is an item that has one of the marks.
    """
    spans: list[tuple[int, int]] = []
    end = 1
    for item in _array_decoder.decode(text):
        # Nothing but separators lies between items, so this is the item's own.
        start = text.find(b"{", end)
        if start < 0:
            return None
        end = start + len(item)
        spans.append((start, end))
    if not spans or end > len(text):
        return None
    answers: list[int] = []
    new = 1
    for index in range(len(spans) - 1, -1, -1):
        start, end = spans[index]
        if any(text.rfind(mark, start, end) >= 0 for mark in marks):
            if not answers:
                new = end
            answers.append(spans[index - 1][1] if index else 1)
            if len(answers) == ANSWERS_MAX:
                break
    return _Cuts(1, spans[-1][1], answers, spans[0][1], new)
