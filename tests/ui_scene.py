"""What the router's page is shown in tests: a lease service that knows of some conversations."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf import duration_pb2
from router_harness import FakeLease, Rig, turn_body

from kvturn.v1 import common_pb2, lease_pb2

HOSTILE = "<img src=x onerror=\"document.title='owned'\">"
"""An id that a page which took it for HTML would run."""
TRACE = "0af7651916cd43dd8448eb211c80319c"
MODEL = "smollm2-135m-instruct"


def span(milliseconds: float) -> duration_pb2.Duration:
    duration = duration_pb2.Duration()
    duration.FromMicroseconds(round(milliseconds * 1000))
    return duration


def report(turn: int, verdict: str, prompt: int, reused: int = 0, **more: Any) -> Any:
    """Returns the report of a turn. `more` are members of it, `ms` its time to the first byte."""
    first_byte_ms = more.pop("ms", 300.0)
    plan = more.pop("plan", "pull" if reused else "recompute")
    return common_pb2.TurnReport(
        turn=turn,
        verdict=common_pb2.Verdict.Value(f"VERDICT_{verdict.upper()}"),
        prompt_tokens=prompt,
        reused_tokens=reused,
        plan=common_pb2.PlanKind.Value(f"PLAN_KIND_{plan.upper()}"),
        plan_reason=more.pop("reason", f"{verdict} no_holder"),
        first_byte_time=span(first_byte_ms),
        total_time=span(first_byte_ms * 2),
        prefill_engine="http://10.0.0.5:8100",
        decode_engine="http://10.0.0.6:8200",
        **more,
    )


TURNS = (
    report(1, "first_turn", 1219, ms=1217.0, age=span(95_000)),
    report(
        2,
        "reused",
        1737,
        1266,
        ms=646.0,
        age=span(61_000),
        reason="cheapest at_holder new_tokens=471 held_tokens=1266"
        " pull_ms=610.2 local_ms=702.0 recompute_ms=1800.5",
        saved_time=span(1179),
        trace_id=TRACE,
        read_time=span(4.8),
        read_bytes=29_500_000,
    ),
    report(
        3, "partial_prefix", 1790, 192, ms=1272.0, age=span(40_000), reason="only_way at_holder"
    ),
    report(
        4, "local", 1955, local_tokens=1784, plan="local", ms=96.0, age=span(20_000),
        reason="cheapest at_holder new_tokens=171 held_tokens=1784 pull_ms=320.0 local_ms=101.0",
    ),
    report(5, "engine_lost", 2321, ms=2510.0, age=span(3_000), reason="engine_lost holder_lost"),
)  # fmt: skip


@dataclass
class SceneLease(FakeLease):
    """A lease service that lists conversations, each with the same turns."""

    listed: list[lease_pb2.Conversation] = field(default_factory=list)
    told: Sequence[Any] = TURNS
    asked_for: list[lease_pb2.ListConversationsRequest] = field(default_factory=list)

    async def ListEngines(self, request: Any, context: Any) -> Any:
        await self._answerable(context)
        return lease_pb2.ListEnginesResponse(engines=self.engines)

    async def ListConversations(self, request: Any, context: Any) -> Any:
        await self._answerable(context)
        self.asked_for.append(request)
        found = [
            one
            for one in self.listed
            if request.tenant in ("", one.key.tenant) and request.model in ("", one.key.model)
        ]
        return lease_pb2.ListConversationsResponse(
            conversations=found[: request.page_size or 100], total_size=len(found)
        )

    async def ListTurns(self, request: Any, context: Any) -> Any:
        await self._answerable(context)
        if request.conversation not in [one.key for one in self.listed]:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such conversation")
        name = request.conversation.conversation_id
        turns = [common_pb2.TurnReport.FromString(one.SerializeToString()) for one in self.told]
        for turn in turns:
            turn.conversation_id = name
        lease = lease_pb2.Lease(
            conversation=request.conversation,
            engine_id="decode-0",
            token_count=2368,
            state=lease_pb2.Lease.STATE_ACTIVE,
            idle_in=span(41_000),
        )
        return lease_pb2.ListTurnsResponse(turns=turns, leases=[lease])

    def knows(self, name: str, *, tenant: str = "", latest: Any = TURNS[-1], **more: Any) -> None:
        """Has it know a conversation, with such a latest turn."""
        key = common_pb2.ConversationKey(tenant=tenant, model=MODEL, conversation_id=name)
        held: dict[str, Any] = {"engine_id": "decode-0", "token_count": 2368, "lease_count": 1}
        held["quiet_for"] = span(3000.0 * (len(self.listed) + 1))
        self.listed.append(
            lease_pb2.Conversation(
                key=key,
                turns=latest.turn,
                latest_turn=latest,
                **(held | more),
            )
        )


def engine(
    number: int, role: str, *, total: int = 4096, free: int = 2800, retained: int = 900, **more: Any
) -> lease_pb2.Engine:
    """Returns an engine as the lease service tells of it."""
    return lease_pb2.Engine(
        description=lease_pb2.EngineDescription(
            engine_id=f"{role}-{number}",
            role=common_pb2.EngineRole.Value(f"ENGINE_ROLE_{role.upper()}"),
            http_address=f"http://127.0.0.1:{number + 1}",
            model=MODEL,
            vllm_version="0.32.0",
            block_size=16,
        ),
        lease_count=more.pop("lease_count", retained // 30),
        memory=lease_pb2.KvMemory(total_blocks=total, free_blocks=free, retained_blocks=retained),
        last_heartbeat_age=span(more.pop("heartbeat_ms", 400)),
        **more,
    )


def populated(engines: int = 2) -> SceneLease:
    """Returns a lease service that knows engines, of both roles, and conversations."""
    lease = SceneLease()
    for number in range(engines):
        role = "decode" if number % 3 else "prefill"
        retained = 0 if role == "prefill" else 300 * (number % 5 + 1)
        lease.engines.append(
            engine(number, role, free=3900 - retained - 100 * (number % 7), retained=retained,
                   draining=number % 11 == 10)
        )  # fmt: skip
    for place, latest in enumerate(reversed(TURNS)):
        lease.knows(f"trip-{42 + place}", latest=latest)
    lease.knows(HOSTILE, latest=TURNS[1])
    lease.knows("agents/build/" + "x" * 240, latest=TURNS[0], token_count=0, engine_id="")
    return lease


async def some_turns(rig: Rig) -> None:
    """Has the router serve turns of several verdicts, with reuse and without."""
    rig.prefill.report = None
    lease = rig.lease
    served = (
        ("first_turn", 0, 0), ("reused", 1266, 0), ("reused", 1784, 12), ("partial_prefix", 192, 0),
        ("prefix_mismatch", 0, 0), ("below_threshold", 0, 0),
    )  # fmt: skip
    for place, (verdict, reused, local) in enumerate(served):
        lease.lease_id = "" if verdict == "first_turn" else f"inc.{place}.1"
        lease.http_address = rig.decode.url
        rig.prefill.report = {
            "verdict": verdict,
            "prompt_tokens": 1900,
            "reused_tokens": reused,
            "local_tokens": local,
            "read_ms": 4.5,
            "read_bytes": 29_000_000,
        }
        answer = await rig.post(turn_body(conversation_id=f"trip-{place}", stream=True))
        assert answer.status == 200, answer.body
