"""Digests of token sequences, and the longest common prefix they prove.

A retention is described to its reader by digests, never by tokens. Digest i covers *everything* up
to digest point i (one running hash, read out at each point), so two sequences with an equal digest
at a point are equal token for token up to it. What KV depends on besides the tokens (model,
adapter, tenant, cache salt, images) goes into the same hash, so that equal text under another
adapter never looks equal.

Digest points lie every `STRIDE_TOKENS` tokens, whatever the engines' block sizes, and at the end
of the retention. Both sides must be configured with the same secret.
"""

from __future__ import annotations

import hashlib
import struct
import sys
from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

STRIDE_TOKENS = 16
DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class MediaItem:
    """An image or other input whose placeholder tokens do not tell its content."""

    offset: int
    """First placeholder token, from 0."""
    length: int
    """Placeholder tokens. At least 1."""
    identifier: str
    """Hash of the content, as the engine computed it."""


@dataclass(frozen=True, slots=True)
class Scope:
    """What a prompt's KV depends on besides its tokens."""

    tenant: str
    model: str
    adapter: str = ""
    cache_salt: str = ""
    media: tuple[MediaItem, ...] = ()


def digest_values(token_ids: Sequence[int], scope: Scope, secret: bytes) -> bytes:
    """Digests of all points of `token_ids`, concatenated, `DIGEST_BYTES` each.

    One per started stride: the last lies at `len(token_ids)`. Empty for no tokens.

    Raises:
        ValueError: a token id is not in 0 to 2**32 - 1.
    """
    return b"".join(digest for _, digest in _points(token_ids, len(token_ids), scope, secret))


def common_prefix_tokens(
    prompt_ids: Sequence[int], scope: Scope, secret: bytes, values: bytes, token_count: int
) -> int:
    """Length of the longest prefix of `prompt_ids` that `values` proves equal.

    Args:
        prompt_ids: the new prompt.
        values: digests of a retention of `token_count` tokens, as `digest_values` made them.

    Returns:
        0, or a digest point of the retention that is at most `len(prompt_ids)`.

    Raises:
        ValueError: `values` does not have one digest per started stride, or a token id of the
            prompt is not in 0 to 2**32 - 1.
    """
    points = -(-token_count // STRIDE_TOKENS)
    if len(values) != points * DIGEST_BYTES:
        raise ValueError(f"{len(values)} digest bytes for {token_count} tokens")
    common = 0
    for index, (point, digest) in enumerate(_points(prompt_ids, token_count, scope, secret)):
        if digest != values[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES]:
            break
        common = point
    return common


def _points(
    token_ids: Sequence[int], end: int, scope: Scope, secret: bytes
) -> Iterator[tuple[int, bytes]]:
    """Yields (point, digest) of a sequence whose last point is `end`, as far as tokens go."""
    hasher = hashlib.blake2b(_head(scope), key=secret, digest_size=DIGEST_BYTES)
    for start in range(0, min(end, len(token_ids)), STRIDE_TOKENS):
        stop = min(start + STRIDE_TOKENS, end)
        if stop > len(token_ids):
            return
        # Media first, with its count, so that no token bytes can pass for media bytes.
        hasher.update(_media(scope.media, start, stop))
        hasher.update(_token_bytes(token_ids[start:stop]))
        yield stop, hasher.copy().digest()


def _head(scope: Scope) -> bytes:
    parts = ("kvturn/1", scope.tenant, scope.model, scope.adapter, scope.cache_salt)
    encoded = [part.encode() for part in parts]
    return b"".join(struct.pack("<I", len(part)) + part for part in encoded)


def _media(media: tuple[MediaItem, ...], start: int, stop: int) -> bytes:
    inside = [item for item in media if item.offset < stop and item.offset + item.length > start]
    encoded = [struct.pack("<I", len(inside))]
    for item in inside:
        identifier = item.identifier.encode()
        encoded.append(struct.pack("<qqI", item.offset, item.length, len(identifier)) + identifier)
    return b"".join(encoded)


def _token_bytes(token_ids: Sequence[int]) -> bytes:
    try:
        tokens = array("I", token_ids)
    except OverflowError as error:
        raise ValueError("a token id is not in 0 to 2**32 - 1") from error
    if sys.byteorder == "big":
        tokens.byteswap()
    return tokens.tobytes()
