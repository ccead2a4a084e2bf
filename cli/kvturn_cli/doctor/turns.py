"""The two turns that doctor drives: did the second one reuse, and why not."""

from collections.abc import Iterator

from kvturn_cli.doctor.facts import DrivenTurn, Facts
from kvturn_cli.doctor.finding import Finding, ok, problem, warning
from kvturn_cli.doctor.verdicts import REUSED, cause_of

KEPT_SHARE_MIN = 0.5
"""Share of the second prompt that must not have been computed again."""
_NO_READ = (
    "no read from decode was needed, so none was seen (--plan pull of kvturn router has it read)"
)


def findings(facts: Facts) -> Iterator[Finding]:
    """Judges both turns, and what their usage told."""
    if facts.turns is None:
        if facts.turns_skipped:
            yield warning(
                "turns.reuse",
                f"no turns were driven: {facts.turns_skipped}",
                "Only a turn shows that all of it works together.",
                "run kvturn doctor again when the router is ready and serves a model",
            )
        return
    for number, turn in enumerate(facts.turns, 1):
        if turn.problem:
            yield problem(
                "turns.served",
                f"turn {number} failed: {turn.problem}",
                "Clients' turns fail in the same way.",
                "see the log of the router, then those of the engines that it names",
            )
            return
    first, second = facts.turns
    yield ok(
        "turns.served",
        f"two turns served, {first.prompt_tokens:,} and then"
        f" {second.prompt_tokens:,} prompt tokens",
    )
    yield _reuse(facts, first, second)
    yield from _usage(second)


def _times(first: DrivenTurn, second: DrivenTurn) -> str:
    return f"TTFT {first.ttft_ms:.0f} ms, then {second.ttft_ms:.0f} ms"


def _reuse(facts: Facts, first: DrivenTurn, second: DrivenTurn) -> Finding:
    kept, whole = second.kept_tokens, second.prompt_tokens
    enough = kept >= KEPT_SHARE_MIN * whole > 0
    if second.verdict == "local":
        return _local(first, second, enough=enough)
    if second.verdict in REUSED and second.reused_tokens and enough:
        read = f" in {second.read_ms:.1f} ms" if second.read_ms else ""
        local = f" and {second.local_tokens:,} from prefill's own cache" * bool(second.local_tokens)
        return ok(
            "turns.reuse",
            f"{second.verdict}: {second.reused_tokens:,} of {whole:,} prompt tokens read from"
            f" decode ({second.read_bytes / 1e6:.1f} MB{read}){local}; {_times(first, second)}",
        )
    if second.verdict == "below_threshold" and enough:
        return ok(
            "turns.reuse",
            f"below_threshold: {second.local_tokens:,} of {whole:,} prompt tokens were in"
            f" prefill's own cache, {_NO_READ}; {_times(first, second)}",
        )
    if second.verdict in REUSED | {"below_threshold"}:
        return warning(
            "turns.reuse",
            f"{second.verdict}, but only {kept:,} of {whole:,} prompt tokens were not computed"
            f" again; {_times(first, second)}",
            "The reply or the chat template changes what came before it.",
            "see that the chat template renders earlier turns alike in later ones",
        )
    return _not_reused(facts, first, second)


def _local(first: DrivenTurn, second: DrivenTurn, *, enough: bool) -> Finding:
    """The holder served the turn by itself: how much of it came from its cache."""
    kept, whole = second.kept_tokens, second.prompt_tokens
    seen = "local: the decode engine that holds the conversation served the second turn alone"
    if enough:
        return ok(
            "turns.reuse",
            f"{seen}, {kept:,} of {whole:,} prompt tokens from its cache; {_NO_READ};"
            f" {_times(first, second)}",
        )
    if not kept and not second.details_told:
        return warning(
            "turns.reuse",
            f"{seen}; how many prompt tokens came from its cache cannot be seen;"
            f" {_times(first, second)}",
            "Only usage.prompt_tokens_details tells it, and decode's answer has none.",
            "start every engine with --enable-prompt-tokens-details",
        )
    return problem(
        "turns.reuse",
        f"{seen}, with only {kept:,} of {whole:,} prompt tokens from its cache;"
        f" {_times(first, second)}",
        "Decode computed the rest anew: its prefix caching is off, its memory so short that the"
        " blocks were taken by others, or the chat template changes what came before.",
        "start decode without --no-enable-prefix-caching; see the findings on memory; see that the"
        " chat template renders earlier turns alike in later ones",
    )


def _not_reused(facts: Facts, first: DrivenTurn, second: DrivenTurn) -> Finding:
    cause = cause_of(second.verdict, facts)
    seen = f"the second turn was computed anew: {second.verdict or 'no verdict was told'}"
    reason = f" ({second.plan}: {second.plan_reason})" if second.plan_reason else ""
    seen += f"{reason}; {_times(first, second)}"
    if not second.verdict:
        return problem(
            "turns.reuse",
            seen,
            "No x-kvturn-verdict came back: it is no kvturn router, or a proxy takes headers away.",
            "give --router the router's own address",
        )
    if cause is None:
        return problem(
            "turns.reuse", seen, "This doctor is older than that verdict.", "update kvturn doctor"
        )
    judge = warning if second.verdict == "cheaper_to_compute" else problem
    return judge("turns.reuse", seen, cause.why, cause.fix)


def _usage(turn: DrivenTurn) -> Iterator[Finding]:
    if turn.details_told or not turn.usage_told:
        return
    yield warning(
        "turns.usage",
        "usage has no prompt_tokens_details",
        "Clients are then not told how many tokens were not computed (cached_tokens), and of a turn"
        " that decode serves alone nobody knows.",
        "start every engine with --enable-prompt-tokens-details",
    )
