"""Digests prove exactly the common prefix of two token sequences, and nothing more."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvturn_connector.digest import (
    DIGEST_BYTES,
    STRIDE_TOKENS,
    MediaItem,
    Scope,
    common_prefix_tokens,
    digest_values,
)

SECRET = b"a secret of the cluster"
SCOPE = Scope(tenant="tenant", model="model", adapter="adapter", cache_salt="salt")
CAT = MediaItem(offset=20, length=8, identifier="image\0cat")
DOG = replace(CAT, identifier="image\0dog")


def common(
    prompt: list[int],
    retained: list[int],
    *,
    prompt_scope: Scope = SCOPE,
    retained_scope: Scope = SCOPE,
) -> int:
    values = digest_values(retained, retained_scope, SECRET)
    return common_prefix_tokens(prompt, prompt_scope, SECRET, values, len(retained))


def test_growing_history_matches_to_the_end_of_the_retention() -> None:
    """The next turn's prompt is the retained tokens and more; the end is not on a stride."""
    assert common(list(range(200)), list(range(100))) == 100


def test_regenerate_matches_the_whole_prompt() -> None:
    """The same prompt again: the retention holds it and the reply that is thrown away."""
    assert common(list(range(64)), list(range(90))) == 64


def test_regenerate_off_a_stride_matches_to_the_last_digest_point() -> None:
    """No digest lies at the end of the prompt, so the last one before it counts."""
    assert common(list(range(70)), list(range(90))) == 64


def test_identical_sequences_match_whole() -> None:
    """Also when their common end is not on a stride."""
    assert common(list(range(37)), list(range(37))) == 37


@pytest.mark.parametrize(
    ("edited", "expected"), [(0, 0), (15, 0), (16, 16), (47, 32), (48, 48), (95, 80), (99, 96)]
)
def test_edit_matches_to_the_last_digest_point_before_it(edited: int, expected: int) -> None:
    """One token of the history was changed; everything after it is worthless."""
    prompt = list(range(200))
    prompt[edited] += 1000
    assert common(prompt, list(range(100))) == expected


def test_insertion_shifts_everything_after_it() -> None:
    """The tokens after an insertion are the same, but stand elsewhere."""
    assert common([*range(40), 7, *range(40, 200)], list(range(100))) == 32


@pytest.mark.parametrize(
    ("length", "expected"), [(0, 0), (1, 0), (15, 0), (16, 16), (31, 16), (99, 96), (100, 100)]
)
def test_truncated_prompt_matches_no_further_than_it_reaches(length: int, expected: int) -> None:
    """A prompt shorter than the retention, equal as far as it goes."""
    assert common(list(range(length)), list(range(100))) == expected


def test_retention_shorter_than_a_stride_has_its_end_as_only_point() -> None:
    """A retention of five tokens can be read whole or not at all."""
    assert common(list(range(30)), list(range(5))) == 5
    assert common([0, 1, 2, 3, 9], list(range(5))) == 0
    assert common(list(range(4)), list(range(5))) == 0


def test_partial_last_stride_does_not_pass_for_a_whole_one() -> None:
    """The digest at token 20 says nothing about tokens 20 to 31."""
    assert common([*range(20), *[9] * 80], list(range(20))) == 20
    assert common([*range(19), *[9] * 80], list(range(20))) == 16


@pytest.mark.parametrize("field", ["tenant", "model", "adapter", "cache_salt"])
def test_equal_text_under_another_scope_never_matches(field: str) -> None:
    """KV depends on more than tokens."""
    tokens = list(range(100))
    other = replace(SCOPE, **{field: "other"})
    assert common(tokens, tokens, prompt_scope=other) == 0
    assert common(tokens, tokens, prompt_scope=replace(SCOPE, **{field: ""})) == 0


def test_scope_parts_cannot_be_shifted_into_each_other() -> None:
    """Tenant "ab" with model "c" is not tenant "a" with model "bc"."""
    tokens = list(range(32))
    left, right = Scope(tenant="ab", model="c"), Scope(tenant="a", model="bc")
    assert common(tokens, tokens, prompt_scope=left, retained_scope=right) == 0


def test_same_image_matches() -> None:
    """Same placeholder tokens, same image."""
    tokens = list(range(100))
    scope = replace(SCOPE, media=(CAT,))
    assert common(tokens, tokens, prompt_scope=scope, retained_scope=scope) == 100


def test_another_image_under_the_same_tokens_matches_up_to_its_stride() -> None:
    """Placeholder tokens do not tell the image; the image starts at token 20."""
    tokens = list(range(100))
    cat, dog = replace(SCOPE, media=(CAT,)), replace(SCOPE, media=(DOG,))
    assert common(tokens, tokens, prompt_scope=dog, retained_scope=cat) == 16


def test_image_at_another_offset_does_not_match() -> None:
    """The placeholder tokens are all alike, so only the offset tells."""
    tokens = [7] * 100
    here, there = replace(SCOPE, media=(CAT,)), replace(SCOPE, media=(replace(CAT, offset=21),))
    assert common(tokens, tokens, prompt_scope=there, retained_scope=here) == 16


def test_image_against_text_of_the_same_tokens_does_not_match() -> None:
    """A prompt without the image, whose text happens to be placeholder tokens."""
    tokens = list(range(100))
    assert common(tokens, tokens, retained_scope=replace(SCOPE, media=(CAT,))) == 16
    assert common(tokens, tokens, prompt_scope=replace(SCOPE, media=(CAT,))) == 16


def test_image_after_the_retention_changes_nothing_before_it() -> None:
    """The new turn adds an image behind all that was retained."""
    later = MediaItem(offset=150, length=8, identifier="image\0late")
    scope = replace(SCOPE, media=(later,))
    assert common(list(range(200)), list(range(100)), prompt_scope=scope) == 100


@pytest.mark.parametrize(("offset", "retained", "expected"), [(100, 100, 100), (32, 100, 32)])
def test_image_that_begins_on_a_digest_point_does_not_count_before_it(
    offset: int, retained: int, expected: int
) -> None:
    """S2 promises the longest prefix: the tokens before the image are the same."""
    scope = replace(SCOPE, media=(MediaItem(offset, 8, "image\0new"),))
    assert common(list(range(200)), list(range(retained)), prompt_scope=scope) == expected


def test_image_that_spans_strides_counts_in_each_of_them() -> None:
    """An image of 40 placeholders: a prefix that ends inside it is still that image's."""
    tokens = list(range(100))
    wide = replace(CAT, offset=10, length=40)
    other = replace(wide, identifier="image\0other")
    scopes = replace(SCOPE, media=(wide,)), replace(SCOPE, media=(other,))
    assert common(tokens, tokens, prompt_scope=scopes[0], retained_scope=scopes[0]) == 100
    assert common(tokens, tokens, prompt_scope=scopes[1], retained_scope=scopes[0]) == 0


def test_another_secret_never_matches() -> None:
    """Digests are keyed: an engine of another cluster proves nothing here."""
    tokens = list(range(100))
    values = digest_values(tokens, SCOPE, SECRET)
    for secret in (b"", b"another secret..", SECRET + b"!"):
        assert common_prefix_tokens(tokens, SCOPE, secret, values, 100) == 0


def test_no_tokens_have_no_digests() -> None:
    """Nothing retained, nothing proven."""
    assert digest_values([], SCOPE, SECRET) == b""
    assert common_prefix_tokens([1, 2, 3], SCOPE, SECRET, b"", 0) == 0


@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 100])
def test_one_digest_per_started_stride(tokens: int) -> None:
    """As the contract says: ceil(token_count / stride) of them."""
    points = -(-tokens // STRIDE_TOKENS)
    assert len(digest_values(list(range(tokens)), SCOPE, SECRET)) == points * DIGEST_BYTES


def test_prefix_of_the_digests_is_the_digests_of_the_prefix() -> None:
    """A digest covers all before it and nothing after it."""
    long, short = (digest_values(list(range(n)), SCOPE, SECRET) for n in (100, 48))
    assert long.startswith(short)


@pytest.mark.parametrize("length", [0, 1, 15, 17, 6 * 16, 8 * 16, 1000])
def test_malformed_length_is_refused(length: int) -> None:
    """100 tokens have 7 digests of 16 bytes."""
    with pytest.raises(ValueError, match="100 tokens"):
        common_prefix_tokens(list(range(100)), SCOPE, SECRET, bytes(length), 100)


def test_large_token_ids_are_told_apart() -> None:
    """Token ids up to 2**32 - 1, also those that differ in the highest bit only."""
    large = [2**32 - 1, 2**31, 2**31 - 1, 2**24] * 8
    assert common(large, large) == 32
    assert common([token & 0x7FFFFFFF for token in large], large) == 0


@pytest.mark.parametrize("token", [-1, 2**32])
def test_token_id_out_of_range_is_refused(token: int) -> None:
    """It would otherwise surface as an error that no caller expects."""
    with pytest.raises(ValueError, match="token id"):
        digest_values([1, token], SCOPE, SECRET)
    with pytest.raises(ValueError, match="token id"):
        common_prefix_tokens([1, token], SCOPE, SECRET, bytes(DIGEST_BYTES), 2)


def _true_common(prompt: list[int], retained: list[int]) -> int:
    length = 0
    for left, right in zip(prompt, retained, strict=False):
        if left != right:
            break
        length += 1
    return length


@st.composite
def related_sequences(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Two sequences that share a prefix of any length, from a small and a large alphabet."""
    token = st.one_of(st.integers(0, 2), st.integers(2**32 - 3, 2**32 - 1))
    shared = draw(st.lists(token, max_size=80))
    tails = st.lists(token, max_size=40)
    return shared + draw(tails), shared + draw(tails)


@settings(max_examples=200, deadline=None)
@given(related_sequences())
def test_result_is_the_largest_digest_point_within_the_true_prefix(
    sequences: tuple[list[int], list[int]],
) -> None:
    """Against a naive comparison of lists: never more than it, never less than S2 promises."""
    prompt, retained = sequences
    points = [*range(0, len(retained), STRIDE_TOKENS), len(retained)]
    true = _true_common(prompt, retained)
    assert common(prompt, retained) == max(point for point in points if point <= true)


_media = st.lists(
    st.tuples(st.integers(0, 60), st.integers(1, 20), st.sampled_from(["cat", "dog"])), max_size=3
).map(lambda items: tuple(sorted((MediaItem(*item) for item in items), key=lambda i: i.offset)))


@settings(max_examples=100, deadline=None)
@given(_media, _media, st.integers(1, 80))
def test_no_prefix_reaches_into_a_stride_whose_media_differ(
    left: tuple[MediaItem, ...], right: tuple[MediaItem, ...], length: int
) -> None:
    """Whatever matches is covered by the same media on both sides."""
    tokens = [7] * length
    scopes = replace(SCOPE, media=left), replace(SCOPE, media=right)
    end = common(tokens, tokens, prompt_scope=scopes[0], retained_scope=scopes[1])
    before = [[item for item in media if item.offset < end] for media in (left, right)]
    assert before[0] == before[1]
    if left == right:
        assert end == length
