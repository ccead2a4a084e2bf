"""Times that must be in order: sessions, idle, holds, handles, reads."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from kvturn_cli.doctor.facts import Facts
from kvturn_cli.doctor.finding import Finding, listed, ok, problem, warning

if TYPE_CHECKING:
    from google.protobuf.duration_pb2 import Duration

    from kvturn.v1.lease_pb2 import DescribeServiceResponse

STOCK_TTL_DEFAULT_S = 480.0
"""vLLM's own decoder_kv_blocks_ttl."""
READ_MARGIN_S = 0.1
"""Least time that a question must leave of the longest read, as the lease service wants it."""


def findings(facts: Facts) -> Iterator[Finding]:
    """Compares the router's, the lease service's and decode's times."""
    if facts.stock:
        yield _stock(facts)
        return
    leader = facts.lease.leader
    if leader is None:
        return
    faults = [*_holds(facts), *_questions(facts), *_differing(facts)]
    yield from faults
    if not faults:
        times = leader.times
        yield ok(
            "times.order",
            f"session TTL {_s(times.session_ttl):g} s, idle {_s(times.idle):g} s, longest hold"
            f" {_s(times.max_hold):g} s, longest read {_s(times.longest_read):g} s,"
            f" policy {leader.policy}",
        )


def _s(span: "Duration") -> float:
    return span.ToNanoseconds() / 1e9


def _holds(facts: Facts) -> Iterator[Finding]:
    """What decode holds lives longer than all that counts on it."""
    leader = facts.lease.leader
    assert leader is not None
    for engine in facts.of_role("decode"):
        settings = engine.settings
        if settings is None or not settings.HasField("decoder_kv_blocks_ttl"):
            continue
        hold_s = _s(settings.decoder_kv_blocks_ttl)
        raise_it = f"raise decoder_kv_blocks_ttl of {engine.name} (480)"
        session_s = _s(leader.times.session_ttl)
        if hold_s <= session_s:
            yield problem(
                "times.session",
                f"{engine.name} holds KV for {hold_s:g} s, its session is trusted for"
                f" {session_s:g} s",
                "What is offered for reading may already be gone (expired).",
                f"{raise_it}, or lower --session-ttl of kvturn lease",
            )
        elif leader.policy == "idle" and hold_s < _s(leader.times.idle):
            yield warning(
                "times.idle",
                f"{engine.name} holds KV for {hold_s:g} s, conversations become idle after"
                f" {_s(leader.times.idle):g} s",
                "Turns that come before they are idle find nothing (expired).",
                raise_it,
            )
        elif hold_s < _s(_longest(leader)):
            yield warning(
                "times.hold",
                f"{engine.name} holds KV for {hold_s:g} s, the lease service keeps leases for up"
                f" to {_s(_longest(leader)):g} s",
                "Clients are promised more than decode keeps when they say how long they are away.",
                f"{raise_it}, or lower {_longest_flag(leader)} of kvturn lease",
            )


def _longest(leader: "DescribeServiceResponse") -> "Duration":
    """Returns how long the lease service keeps a lease at most."""
    return leader.times.fixed_ttl if leader.policy == "fixed-ttl" else leader.times.max_hold


def _longest_flag(leader: "DescribeServiceResponse") -> str:
    return "--fixed-ttl" if leader.policy == "fixed-ttl" else "--max-hold"


def _questions(facts: Facts) -> Iterator[Finding]:
    """Whoever asks the lease service waits for so short that time is left to read."""
    leader, settings = facts.lease.leader, facts.router.settings
    assert leader is not None
    read_s = _s(leader.times.longest_read)
    asking = []
    if settings is not None:
        flag = "--question-deadline-ms of kvturn router"
        asking.append(("the router", settings.question_deadline_ms / 1_000, flag))
    for engine in facts.of_role("prefill"):
        if engine.settings is not None and engine.settings.HasField("question_deadline"):
            key = f"kvturn_question_deadline_ms of {engine.name}"
            asking.append((engine.name, _s(engine.settings.question_deadline), key))
    for name, deadline_s, setting in asking:
        if deadline_s + READ_MARGIN_S >= read_s:
            yield warning(
                "times.question",
                f"{name} waits up to {deadline_s:g} s for an answer, a read lasts {read_s:g} s at"
                " most",
                "A question that takes as long as a read leaves no time to read.",
                f"lower {setting}, or raise --longest-read of kvturn lease",
            )


def _differing(facts: Facts) -> Iterator[Finding]:
    """Whoever leads next goes by the same times."""
    told = [
        (
            one.endpoint,
            (one.described.times.SerializeToString(deterministic=True), one.described.policy),
        )
        for one in facts.lease.processes
        if one.described is not None
    ]
    if len({times for _, times in told}) > 1:
        yield warning(
            "times.equal",
            f"{listed(name for name, _ in told)} go by different times or policies",
            "What ends a retention then changes with the leader.",
            "start all of them with the same --session-ttl, --idle, --max-hold, --longest-read"
            " and --policy",
        )


def _stock(facts: Facts) -> Finding:
    settings = facts.router.settings
    assert settings is not None
    told = [
        _s(engine.settings.decoder_kv_blocks_ttl)
        for engine in facts.of_role("decode")
        if engine.settings is not None and engine.settings.HasField("decoder_kv_blocks_ttl")
    ]
    hold_s = min(told, default=STOCK_TTL_DEFAULT_S)
    whose = "decode's" if told else "vLLM's own (decode does not tell its)"
    seen = f"handles are used for {settings.stock_ttl_s:g} s, {whose} hold is {hold_s:g} s"
    if settings.stock_ttl_s < hold_s:
        return ok("times.stock", seen)
    return problem(
        "times.stock",
        seen,
        "A handle that outlives its blocks makes the turn fail with HTTP 500.",
        f"set --stock-ttl-s of kvturn router below {hold_s:g}, or raise decoder_kv_blocks_ttl",
    )
