"""What each verdict says of a deployment when it comes where reuse was to be expected."""

from typing import NamedTuple

from kvturn_cli.doctor import memory
from kvturn_cli.doctor.facts import Facts

REUSED = frozenset({"reused", "partial_prefix", "local"})
"""Verdicts of turns that used retained KV."""
NO_FAULT = frozenset({"first_turn", "turned_off", "ended", "cheaper_to_compute", "below_threshold"})
"""Verdicts that say nothing against a deployment when clients' turns have them."""


class Cause(NamedTuple):
    """Why a turn got a verdict, and what to do about it."""

    why: str
    fix: str


CAUSES = {
    "reused": Cause("Prefill read all that the prompt shares with the retention.", ""),
    "partial_prefix": Cause(
        "The history was edited, or the reply came back in other tokens than it was made of.",
        "send the assistant's reply back unchanged",
    ),
    "local": Cause("The decode engine that holds the KV served the turn alone.", ""),
    "first_turn": Cause(
        "The conversation was not known, though a turn of it had just ended: its name or its"
        " history changed on the way, or the lease service forgot it (restart, other --store).",
        "send X-Conversation-Id unchanged through every proxy; see that router and engines name"
        " the same lease service",
    ),
    "no_lease": Cause(
        "The conversation is known, but decode retained nothing of its last turn, or may not"
        " offer it yet after a change of lease service.",
        "see the findings on sessions and plain attention; wait K*(TTL + R), 8.2 s by default,"
        " after a restart of the lease service; see decode's log for refused grants (limits"
        " --leases, --blocks-per-engine, --tokens-per-tenant of kvturn lease)",
    ),
    "ended": Cause("The client ended the conversation.", "end it after its last turn"),
    "released": Cause(
        "The retention was given up: the conversation was idle, memory was short, or a newer turn"
        " took its place.",
        "see which reason kvturn_lease_releases_total names most: idle wants a longer --idle or"
        " --policy pressure of kvturn lease, pressure more memory for decode",
    ),
    "expired": Cause(
        "The retention reached its longest hold before the next turn came.",
        "raise decoder_kv_blocks_ttl of the connector and --max-hold of kvturn lease",
    ),
    "consumed": Cause(
        "Another turn had read the retention; each is read once.",
        "let branches of a conversation go under names of their own",
    ),
    "read_in_progress": Cause(
        "Another turn was reading the retention.",
        "send a conversation's turns one after the other",
    ),
    "read_failed": Cause(
        "The NIXL transfer failed and prefill computed all.",
        "see the findings on reach and transfer, and prefill's log for NIXL's error; vLLM version,"
        " dtype and NIXL backends must be equal on both sides",
    ),
    "read_too_long": Cause(
        "The transfer took longer than the longest read, and what it brought was discarded.",
        "see the findings on transfer (EFA that fell back to TCP); else raise --longest-read of"
        " kvturn lease",
    ),
    "prefix_mismatch": Cause(
        "The prompt shares no digest point with what decode holds.",
        "give all engines the same --model, chat template and kvturn_secret_file; see that clients"
        " resend the history unchanged",
    ),
    "below_threshold": Cause(
        "Too few tokens were left to read, mostly because prefill's own cache had the rest.",
        "nothing, for short conversations; else lower kv_recompute_threshold or --pull-min-tokens",
    ),
    "cheaper_to_compute": Cause(
        "The cost model expected computing to be faster than reading, or --plan recompute is set.",
        "start kvturn router with --plan auto; slow reads are what the findings on transfer are"
        " about",
    ),
    "unsupported_model": Cause(
        "The model's KV is not plain full attention, the prompt is more than token ids, or block"
        " sizes differ.",
        "give both sides the same --block-size; other models are served without reuse",
    ),
    "engine_lost": Cause(
        "The decode engine that held the KV is gone or lost its session.",
        "see its log; on busy machines raise --session-ttl of kvturn lease",
    ),
    "lease_service_unreachable": Cause(
        "The lease service did not answer within the question deadline.",
        "see the findings on the lease service; on busy machines raise --question-deadline-ms of"
        " kvturn router and kvturn_question_deadline_ms of the connector",
    ),
    "store_unavailable": Cause(
        "Nobody can lead, because etcd does not answer.", "see the findings on etcd"
    ),
    "turned_off": Cause(
        "Something asks for no reuse.",
        "take X-Kvturn-Reuse: off away from clients or proxies",
    ),
    "not_offered": Cause(
        "Reuse is not set up on this path.",
        "start kvturn router with --lease, and every engine with our connector and"
        " kvturn_lease_endpoint",
    ),
}

_GIVEN_UP = "The retention was given up: memory is short on decode, or a newer turn took its place."
_RELEASED_WHERE_MEMORY_IS_SHORT = Cause(
    _GIVEN_UP,
    "make room first, as the findings on memory say; see that a conversation's turns come one after"
    " the other",
)
_RELEASED_WHERE_NOTHING_IS_IDLE = Cause(
    _GIVEN_UP,
    "give decode engines more KV memory or start another one; see that a conversation's turns come"
    " one after the other",
)
_RELEASED = {
    "idle": Cause(
        "The retention was given up: the conversation was idle, or a newer turn took its place.",
        "raise --idle or take --policy pressure of kvturn lease; have clients send keepalive",
    ),
    "pressure": _RELEASED_WHERE_NOTHING_IS_IDLE,
    "fixed-ttl": _RELEASED_WHERE_NOTHING_IS_IDLE,
}
"""By the policy that ends retentions."""
_EXPIRED_BY_FIXED_TTL = CAUSES["expired"]._replace(
    fix="raise --fixed-ttl of kvturn lease, or take another --policy"
)


def cause_of(verdict: str, facts: Facts) -> Cause | None:
    """Returns why a turn got a verdict in this deployment; None for one that is not known here.

    What is to be done about a retention that ended early depends on what ends retentions there:
    while memory is short a longer idle time would only make it shorter.
    """
    if verdict == "released":
        if memory.is_short(facts):
            return _RELEASED_WHERE_MEMORY_IS_SHORT
        return _RELEASED.get(facts.policy, CAUSES[verdict])
    if verdict == "expired" and facts.policy == "fixed-ttl":
        return _EXPIRED_BY_FIXED_TTL
    return CAUSES.get(verdict)
