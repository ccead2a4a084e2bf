"""The replay of real traffic: how it links requests, its bounds, and its figures on the trace."""

from __future__ import annotations

import itertools
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from bench.policy import bound
from bench.policy.foresight import Frontier, by_turn
from bench.policy.replay import Clients, Setting, replay
from bench.policy.trace import Request, Trace, TraceError, read_trace
from kvturn_lease.config import Policy

ROOT = Path(__file__).resolve().parent.parent
FULL_TRACE = Path(
    os.environ.get("KVTURN_TRACE", ROOT / "build" / "mooncake_conversation_trace.jsonl")
)
SECOND_NS = 1_000_000_000


def write_trace(file: Path, requests: list[tuple[int, int, int, list[int]]]) -> Path:
    """Writes (second, prompt tokens, answer tokens, hash ids) as the trace has them."""
    rows = [
        {"timestamp": at_s * 1000, "input_length": prompt, "output_length": answer, "hash_ids": ids}
        for at_s, prompt, answer, ids in requests
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def chat(file: Path, conversations: int, seed: int = 1) -> Path:
    """Writes conversations of one to five turns, one beginning every other second."""
    choices = random.Random(seed)
    ids = itertools.count(1)
    requests = []
    for conversation in range(conversations):
        at_s, prompt, history = conversation * 2, choices.randrange(1_100, 9_000), [0]
        for _ in range(choices.choice([1, 1, 1, 2, 3, 5])):
            full = prompt // 512
            history = [*history, *itertools.islice(ids, full - len(history))]
            answer = choices.randrange(50, 800)
            requests.append((at_s, prompt, answer, [*history, next(ids)]))
            at_s += int(choices.lognormvariate(4.6, 1.0)) + 1
            prompt += answer + choices.randrange(20, 600)
    return write_trace(file, sorted(requests, key=lambda request: request[0]))


@pytest.fixture
def trace(tmp_path: Path) -> Trace:
    return read_trace(chat(tmp_path / "trace.jsonl", 300))


def test_a_request_continues_the_longest_prefix_and_is_continued_once(tmp_path: Path) -> None:
    """Block 0 is in all prompts and links none; the last block counts only if it is full."""
    file = write_trace(
        tmp_path / "trace.jsonl",
        [
            (0, 1_100, 10, [0, 1, 2]),  # two full blocks
            (1, 600, 10, [0, 3]),  # only the block of all prompts is full
            (2, 1_700, 10, [0, 1, 4, 5]),  # continues the first
            (3, 2_100, 10, [0, 1, 6, 7, 8]),  # the first has been continued: a branch of its own
            (4, 2_100, 10, [0, 1, 4, 8, 9]),  # continues the second turn
            (5, 900, 10, [0, 3]),  # nothing to continue in one full block
            (6, 1_500, 10, [0, 1, 6]),  # a block short of the branch
        ],
    )
    requests = read_trace(file).requests
    assert [request.parent for request in requests] == [None, None, 0, None, 2, None, None]
    assert [request.turn for request in requests] == [1, 1, 2, 1, 3, 1, 1]
    assert [request.conversation for request in requests] == [0, 1, 0, 3, 0, 5, 6]
    assert [requests[2].reusable_tokens, requests[4].reusable_tokens] == [1_110, 1_710]


def test_a_file_that_is_no_trace_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="cannot be read"):
        read_trace(tmp_path / "none.jsonl")
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"timestamp": 0}\n')
    with pytest.raises(TraceError, match="line 1"):
        read_trace(broken)
    broken.write_text("")
    with pytest.raises(TraceError, match="no requests"):
        read_trace(broken)


def made_up(seed: int) -> Trace:
    """Seven requests of one token a block, at random sizes, some continuing others."""
    choices = random.Random(seed)
    requests: list[Request] = []
    free = []
    for number in range(7):
        parent = choices.choice(free) if free and choices.random() < 0.7 else None
        tokens = choices.randrange(1, 5)
        reusable = 0
        if parent is not None:
            free.remove(parent)
            reusable = requests[parent].tokens
        requests.append(
            Request(number, number * SECOND_NS, tokens, tokens, number, 1, parent, reusable)
        )
        free.append(number)
    return Trace(requests, "")


def best_of_all(trace: Trace, memory: int) -> int:
    """Tries, for each retention that is read, every number of its tokens to hold."""
    read = list(trace.children().items())
    best = 0
    for parts in itertools.product(*(range(child.reusable_tokens + 1) for _, child in read)):
        held = dict(zip((number for number, _ in read), parts, strict=True))
        fits = all(
            sum(
                held[number]
                for number, child in read
                if number < request.number < child.number
                and trace.requests[number].tokens <= memory
            )
            + request.tokens
            <= memory
            for request in trace.requests
            if request.tokens <= memory
        )
        counted = sum(held[number] for number, _ in read if trace.requests[number].tokens <= memory)
        best = max(best, counted if fits else 0)
    return best


@pytest.mark.parametrize("seed", range(40))
def test_the_clairvoyant_bound_is_what_trying_everything_finds(seed: int) -> None:
    """On small traces every choice can be tried."""
    trace = made_up(seed)
    for memory in (4, 6, 9):
        most = bound.reused_tokens_max(trace, memory)
        assert most == best_of_all(trace, memory)
        assert bound.reused_tokens_whole(trace, memory) <= most


def test_no_policy_beats_the_bound_and_more_memory_never_hurts_it(trace: Trace) -> None:
    """Ours, with and without heartbeats, and the oldest first, in four memories."""
    before = 0
    for memory_tokens in (20_000, 60_000, 200_000, 10_000_000):
        most = bound.reused_tokens_max(trace, memory_tokens)
        assert before <= most <= trace.reusable_tokens
        assert bound.reused_tokens_whole(trace, memory_tokens) <= most
        before = most
        for setting in (
            Setting(Policy.PRESSURE, memory_tokens=memory_tokens),
            Setting(Policy.PRESSURE, memory_tokens=memory_tokens, priors=None),
            Setting(Policy.PRESSURE, memory_tokens=memory_tokens, clients=Clients(1.0, 30)),
        ):
            outcome = replay(trace, setting)
            assert outcome.reused_tokens <= most
            assert outcome.delayed == 0
            assert outcome.token_ns <= memory_tokens * trace.end_ns
    assert most == trace.reusable_tokens


def test_a_fixed_time_delays_what_giving_way_does_not(trace: Trace) -> None:
    """The stock behaviour in a memory that its pinned retentions overfill."""
    fixed = replay(trace, Setting(Policy.FIXED_TTL, memory_tokens=60_000))
    ours = replay(trace, Setting(Policy.PRESSURE, memory_tokens=60_000))
    assert fixed.delayed > len(trace.requests) / 2
    assert ours.delayed == 0
    assert ours.reused_tokens > fixed.reused_tokens


def test_heartbeats_reuse_what_the_fixed_time_does_for_less(trace: Trace) -> None:
    """All clients heartbeat; the longer they linger the more is held."""
    fixed = replay(trace, Setting(Policy.FIXED_TTL))
    held = [
        replay(trace, Setting(Policy.IDLE, clients=Clients(1.0, linger_s)))
        for linger_s in (0, 30, 120)
    ]
    assert {outcome.reused_tokens for outcome in held} == {fixed.reused_tokens}
    costs = [outcome.token_ns for outcome in held]
    assert costs == sorted(costs)
    assert costs[-1] < fixed.token_ns


def test_the_frontier_of_full_foresight_is_the_oracle(trace: Trace) -> None:
    """It holds what is read until it is read; knowing less never costs less."""
    oracle = Frontier(trace, lambda request: request.number, None)
    children = trace.children()
    held = sum(
        request.tokens * (children[request.number].arrival_ns - request.arrival_ns)
        for request in trace.requests
        if request.number in children
    )
    assert oracle.token_ns(trace.reusable_tokens) == pytest.approx(held)
    assert oracle.reused_tokens(held) == pytest.approx(trace.reusable_tokens)
    for reused_tokens in (trace.reusable_tokens / 2, trace.reusable_tokens):
        least = oracle.token_ns(reused_tokens)
        assert least <= Frontier(trace, by_turn, None).token_ns(reused_tokens)


def test_the_command_writes_every_table(tmp_path: Path) -> None:
    """The fast mode, on a made-up trace."""
    file = chat(tmp_path / "trace.jsonl", 200)
    command = [sys.executable, "-m", "bench.policy", "--fast", "--jobs", "1"]
    command += ["--trace", str(file), "--out", str(tmp_path / "out")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    results = (tmp_path / "out" / "RESULTS.md").read_text()
    assert results.endswith(done.stdout.rstrip("\n") + "\n")
    assert str(tmp_path) not in results
    figures = json.loads((tmp_path / "out" / "figures.json").read_text())
    rows = {row["name"]: row for row in figures["limited"]}
    for name, reuse in figures["bounds"].items():
        if name.startswith("clairvoyant, bound"):
            for row in rows.values():
                assert all(map(float.__le__, row["reuse"], reuse)), row["name"]


def test_a_missing_trace_is_told_in_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench.policy", "--trace", "none", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "KVTURN_TRACE" in done.stderr


@pytest.mark.skipif(
    not FULL_TRACE.exists(), reason="the trace is not here (bench/policy/README.md)"
)
def test_the_figures_of_a_fixed_time_on_the_trace_are_the_known_ones() -> None:
    """87.6 % of the reusable tokens; who knows the future does it with 12.2 % of the cost."""
    trace = read_trace(FULL_TRACE)
    assert len(trace.requests) == 12_031
    assert sum(request.parent is not None for request in trace.requests) == 3_932
    fixed = replay(trace, Setting(Policy.FIXED_TTL))
    assert fixed.reused_tokens / trace.reusable_tokens == pytest.approx(0.876, abs=0.0005)
    oracle = Frontier(trace, lambda request: request.number, None)
    cost = oracle.token_ns(fixed.reused_tokens) / fixed.token_ns
    assert cost == pytest.approx(0.122, abs=0.0005)
