"""What clients' recent turns say: how many fell back and why, and who names conversations."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from kvturn.v1 import common_pb2
from kvturn_cli.doctor.facts import Facts
from kvturn_cli.doctor.finding import Finding, counted, listed, ok, warning
from kvturn_cli.doctor.verdicts import NO_FAULT, REUSED, cause_of

if TYPE_CHECKING:
    from kvturn.v1.lease_pb2 import Conversation

DOCTORS = "kvturn-doctor-"
"""How the names of doctor's own conversations begin."""
TURNS_LEAST = 10
"""Turns, or conversations, below which a share says nothing."""
FALLBACK_SHARE_MAX = 0.2
LOST_SHARE_MAX = 0.8
_MINTED = re.compile(r"conv-[0-9a-f]{32}|.*~[0-9a-f]{12}", re.DOTALL)


def findings(facts: Facts) -> Iterator[Finding]:
    """Judges the latest turn of each conversation that the lease service remembers."""
    if facts.lease.conversations is None:
        return
    conversations = [
        one for one in facts.lease.conversations if not one.key.conversation_id.startswith(DOCTORS)
    ]
    if not conversations:
        yield ok("traffic.fallbacks", "no conversation of a client is known yet")
        return
    yield _fallbacks(facts, conversations)
    yield _naming(conversations)


def is_minted(conversation_id: str) -> bool:
    """Tells whether the router made up the name because the client gave none."""
    return _MINTED.fullmatch(conversation_id) is not None


def _fallbacks(facts: Facts, conversations: Sequence["Conversation"]) -> Finding:
    verdicts = Counter(
        common_pb2.Verdict.Name(one.latest_turn.verdict).removeprefix("VERDICT_").lower()
        for one in conversations
        if one.HasField("latest_turn")
    )
    later = sum(count for verdict, count in verdicts.items() if verdict not in NO_FAULT)
    reused = sum(count for verdict, count in verdicts.items() if verdict in REUSED)
    shown = listed(f"{verdict} {count:,}" for verdict, count in verdicts.most_common())
    seen = f"latest turns of {counted(len(conversations), 'conversation')}: {shown or 'none told'}"
    if later < TURNS_LEAST or later - reused <= FALLBACK_SHARE_MAX * later:
        return ok("traffic.fallbacks", seen)
    common, count = next(
        (verdict, count)
        for verdict, count in verdicts.most_common()
        if verdict not in NO_FAULT | REUSED
    )
    cause = cause_of(common, facts)
    return warning(
        "traffic.fallbacks",
        f"{later - reused:,} of {later:,} turns that might have reused did not, {count:,} of them"
        f" {common}; {seen}",
        cause.why if cause else "This doctor is older than that verdict.",
        cause.fix if cause else "update kvturn doctor",
    )


def _naming(conversations: Sequence["Conversation"]) -> Finding:
    minted = [one for one in conversations if is_minted(one.key.conversation_id)]
    lost = [one for one in minted if one.turns == 1]
    named = len(conversations) - len(minted)
    seen = f"{counted(named, 'conversation')} named by clients, {len(minted):,} by the router"
    if minted:
        went_on = len(minted) - len(lost)
        seen += f", {went_on:,} of which went on" if went_on else ", none of which went on"
    if len(minted) < TURNS_LEAST or len(lost) <= LOST_SHARE_MAX * len(minted):
        return ok("traffic.naming", seen)
    return warning(
        "traffic.naming",
        f"{seen}: clients tag nothing and are hardly ever recognised",
        "A client that changes its history between turns (time stamps, edits) begins a new"
        " conversation each time.",
        "send X-Conversation-Id: NAME, or conversation_id or session_id in the body, the same for"
        " all turns of a conversation",
    )
