"""What prefill expects of a read before it posts it."""

from __future__ import annotations

from kvturn_connector.pace import READS_MAX, ReadPace

MS = 1_000_000


def test_nothing_is_expected_before_the_first_read() -> None:
    """Nothing known: every read whose time is not up may be posted."""
    assert ReadPace().expected_ns(1_000) == 0


def test_more_blocks_take_longer_and_fewer_as_long() -> None:
    """Latency does not shrink with the read."""
    pace = ReadPace()
    pace.learn(10, 20 * MS)
    assert pace.expected_ns(30) == 60 * MS
    assert pace.expected_ns(10) == 20 * MS
    assert pace.expected_ns(1) == 20 * MS


def test_best_pace_counts() -> None:
    """A tiny read, all latency, says little about a large one, and a slow one was an exception."""
    pace = ReadPace()
    pace.learn(1, 5 * MS)
    pace.learn(100, 50 * MS)
    pace.learn(100, 900 * MS)
    assert pace.expected_ns(200) == 100 * MS
    assert pace.expected_ns(1) == 5 * MS


def test_old_reads_are_forgotten() -> None:
    """The link got slower: what was possible once is expected no more."""
    pace = ReadPace()
    pace.learn(10, 1 * MS)
    for _ in range(READS_MAX):
        pace.learn(10, 40 * MS)
    assert pace.expected_ns(10) == 40 * MS
