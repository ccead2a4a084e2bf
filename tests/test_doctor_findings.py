"""Each finding of `kvturn doctor`, from the facts that give it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvturn.v1 import common_pb2, lease_pb2
from kvturn_cli.doctor.diagnosis import diagnose
from kvturn_cli.doctor.facts import (
    CacheConfig,
    Certificate,
    Clock,
    CollectorFacts,
    DrivenTurn,
    EngineProbe,
    EtcdFacts,
    EtcdMember,
    Facts,
    HostFacts,
    LeaseFacts,
    LeaseProcess,
    RouterEngine,
    RouterFacts,
    RouterSettings,
    SideChannel,
)
from kvturn_cli.doctor.finding import Finding, Severity, counted
from kvturn_cli.doctor.report import TITLES, document, lines
from kvturn_cli.doctor.verdicts import CAUSES, cause_of

ROUTER = "http://10.0.0.2:8000"
PREFILL, DECODE = "http://10.0.0.5:8100", "http://10.0.0.6:8200"
LEASE = "10.0.0.2:7600"
GIB = 1 << 30


def seconds(count: float) -> Any:
    """Returns a duration for a message's constructor."""
    return {"seconds": int(count), "nanos": int(count % 1 * 1e9)}


def engine(role: str, **settings: Any) -> lease_pb2.Engine:
    """Returns a healthy engine with a session; settings whose value is None are left out."""
    told: dict[str, Any] = {
        "dtype": "bfloat16",
        "kv_cache_dtype": "auto",
        "tensor_parallel_size": 1,
        "max_model_len": 8192,
        "prefix_caching": True,
        "bidirectional_kv_xfer": True,
        "kv_load_failure_policy": "recompute",
        "kv_recompute_threshold": 64,
        "question_deadline": seconds(0.05),
        "kv_buffer_device": "cuda",
        "nixl_backends": ["UCX"],
        "nixl_version": "1.5.1",
        "traced": True,
        "machine": f"machine-{role}",
        "network": f"network-{role}",
        "plain_attention": True,
        **({"decoder_kv_blocks_ttl": seconds(480)} if role == "decode" else {}),
        **settings,
    }
    return lease_pb2.Engine(
        description=lease_pb2.EngineDescription(
            engine_id=f"{role}-0",
            incarnation="i",
            role=common_pb2.EngineRole.Value(f"ENGINE_ROLE_{role.upper()}"),
            http_address=PREFILL if role == "prefill" else DECODE,
            nixl=common_pb2.NixlAddress(
                nixl_engine_id="n",
                host="10.0.0.5" if role == "prefill" else "10.0.0.6",
                port=5600,
            ),
            model="/models/m",
            vllm_version="0.32.0",
            connector_version="0.1.0",
            kv_blocks=1000,
            block_size=16,
            settings=lease_pb2.EngineSettings(
                **{name: value for name, value in told.items() if value is not None}
            ),
        ),
        memory=lease_pb2.KvMemory(total_blocks=1000, free_blocks=700, retained_blocks=200),
        last_heartbeat_age=seconds(0.4),  # type: ignore[arg-type]
    )


def described(**more: Any) -> lease_pb2.DescribeServiceResponse:
    """Returns what a leader with its state in memory tells."""
    return lease_pb2.DescribeServiceResponse(
        **{
            "version": "0.1.0",
            "leads": True,
            "policy": "idle",
            "routers": [lease_pb2.Router(router_id="r1", version="0.1.0", turns_in_flight=2)],
            "times": lease_pb2.LeaseTimes(
                session_ttl=seconds(5),
                heartbeat_interval=seconds(1),
                longest_read=seconds(3),
                idle=seconds(60),
                max_hold=seconds(480),
            ),
            **more,
        }
    )


def turn(verdict: str, **more: Any) -> DrivenTurn:
    """Returns a turn that was served."""
    told: dict[str, Any] = {"prompt_tokens": 1000, "ttft_ms": 400.0, "plan": "pull", **more}
    return DrivenTurn(verdict=verdict, **told)


def healthy(**more: Any) -> Facts:
    """Returns the facts of a deployment that is in order, but for what a test changes."""
    seen = [
        RouterEngine(PREFILL, "prefill", ["session:prefill-0"]),
        RouterEngine(DECODE, "decode", ["session:decode-0"]),
    ]
    return replace(
        Facts(
            RouterFacts(
                ROUTER,
                ready=True,
                settings=RouterSettings("0.1.0", [LEASE], otlp_endpoint="http://10.0.0.2:4317"),
                engines=seen,
                models=["m"],
                clock=Clock("router", -0.01, 0.01),
            ),
            LeaseFacts(
                [LeaseProcess(LEASE, described=described(), answer_ms=1.0)],
                "--lease",
                engines=[engine("prefill"), engine("decode")],
                conversations=[],
            ),
            probes=[EngineProbe(PREFILL), EngineProbe(DECODE, released={"consumed": 90})],
            side_channels=[SideChannel("decode-0", "10.0.0.6", 5600, tried=True)],
            collector=CollectorFacts("http://10.0.0.2:4317", "the router", protocol="grpc"),
            turns=[
                turn("first_turn", plan="recompute"),
                turn("reused", reused_tokens=900, read_bytes=20_000_000, ttft_ms=90.0),
            ],
        ),
        **more,
    )


def with_engines(*engines: lease_pb2.Engine, **more: Any) -> Facts:
    """Returns a deployment with these engines in place of the healthy ones."""
    facts = healthy(**more)
    return replace(facts, lease=replace(facts.lease, engines=engines))


def with_leader(**told: Any) -> Facts:
    """Returns a deployment whose leader tells something else."""
    facts = healthy()
    process = LeaseProcess(LEASE, described=described(**told))
    return replace(facts, lease=replace(facts.lease, processes=[process]))


def with_settings(**changed: Any) -> Facts:
    """Returns a deployment whose router was started otherwise."""
    facts = healthy()
    assert facts.router.settings is not None
    settings = replace(facts.router.settings, **changed)
    return replace(facts, router=replace(facts.router, settings=settings))


def with_conversations(*told: tuple[str, str, int]) -> Facts:
    """Returns a deployment that knows conversations: (id, latest verdict, turns)."""
    facts = healthy()
    conversations = [
        lease_pb2.Conversation(
            key=common_pb2.ConversationKey(model="m", conversation_id=name),
            turns=turns,
            latest_turn=common_pb2.TurnReport(
                verdict=common_pb2.Verdict.Value(f"VERDICT_{verdict.upper()}")
            ),
        )
        for name, verdict, turns in told
    ]
    return replace(facts, lease=replace(facts.lease, conversations=conversations))


def amiss(facts: Facts) -> list[Finding]:
    """Returns what is not in order."""
    return [one for one in diagnose(facts) if one.severity != Severity.OK]


def only(facts: Facts, check: str, severity: Severity) -> Finding:
    """Returns the one finding that is not in order, which must be of that check."""
    [finding] = amiss(facts)
    assert (finding.check, finding.severity) == (check, severity)
    assert finding.why
    assert finding.fix
    return finding


PROBLEM, WARNING = Severity.PROBLEM, Severity.WARNING


def test_of_a_deployment_in_order_nothing_is_amiss() -> None:
    """Each kind of check says something, and all of it is ok."""
    found = list(diagnose(healthy()))
    assert not amiss(healthy())
    # Neither etcd nor TLS is in use there.
    assert {one.group for one in found} == set(TITLES) - {"etcd", "tls"}
    assert not any(one.why or one.fix for one in found)


# --- Services -------------------------------------------------------------------------------------


def test_a_router_that_is_not_there_is_a_problem() -> None:
    """And nothing more is said of it."""
    facts = Facts(RouterFacts(ROUTER, "Connection refused"))
    [finding] = [one for one in amiss(facts) if one.group == "router"]
    assert (finding.check, finding.severity) == ("router.reachable", PROBLEM)
    assert "Connection refused" in finding.seen


def test_a_router_that_is_not_ready_says_why() -> None:
    """In its own words."""
    facts = healthy()
    router = replace(facts.router, ready=False, not_ready="no decode engine is healthy")
    finding = only(replace(facts, router=router), "router.ready", PROBLEM)
    assert "no decode engine is healthy" in finding.seen
    assert "start the engines" in finding.fix


def test_a_router_whose_engines_all_drain_is_told_to_take_them_up_again() -> None:
    """There is nothing to start: what it lacks is there."""
    facts = healthy()
    router = replace(facts.router, ready=False, not_ready="all decode engines are draining")
    finding = only(replace(facts, router=router), "router.ready", PROBLEM)
    assert "kvturn drain ENGINE --undo" in finding.fix
    assert "--decode" not in finding.fix


@pytest.mark.parametrize(
    ("settings", "check", "fix"),
    [
        ({"lease": []}, "router.lease", "--lease HOST:PORT"),
        ({"plan": "recompute"}, "router.plan", "--plan auto"),
    ],
)
def test_a_router_that_cannot_reuse_is_a_problem(
    settings: dict[str, Any], check: str, fix: str
) -> None:
    """It was started so."""
    assert fix in only(with_settings(**settings), check, PROBLEM).fix


def test_settings_that_are_hidden_need_an_operators_key() -> None:
    """What cannot be compared is said."""
    facts = healthy()
    router = replace(facts.router, settings=None, hidden="only an operator may see them")
    assert "--admin-key" in only(replace(facts, router=router), "router.settings", WARNING).fix


def processes(*told: LeaseProcess) -> Facts:
    """Returns a deployment with these lease services."""
    facts = healthy()
    return replace(facts, lease=replace(facts.lease, processes=told))


ETCD = ["10.0.1.1:2379"]
LEADS = LeaseProcess(LEASE, described=described(etcd_endpoints=ETCD))


def standing_by(**more: Any) -> LeaseProcess:
    """Returns a lease service that does not lead."""
    told = {"leads": False, "refusal": "NOT_LEADER", "etcd_endpoints": ETCD, "routers": [], **more}
    return LeaseProcess("10.0.0.3:7600", described=described(**told))


def test_a_leader_and_one_that_stands_by_are_in_order() -> None:
    """Both are told of."""
    facts = processes(LEADS, standing_by(leader=LEASE))
    seen = " ".join(one.seen for one in diagnose(facts) if one.group == "lease")
    assert not amiss(facts)
    assert "10.0.0.3:7600 stands by" in seen


@pytest.mark.parametrize(
    ("told", "check", "severity", "words"),
    [
        ((LEADS,), "lease.leader", WARNING, "nobody is known to stand by"),
        ((LEADS, LeaseProcess("b:1", "gone")), "lease.reachable", WARNING, "b:1: gone"),
        (
            (
                LeaseProcess("a:1", described=described()),
                LeaseProcess("b:1", described=described()),
            ),
            "lease.leader",
            PROBLEM,
            "a:1, b:1 lead at the same time",
        ),
        ((standing_by(leader="10.0.0.9:7600"),), "lease.leader", PROBLEM, "10.0.0.9:7600"),
        ((standing_by(refusal="STORE_UNAVAILABLE"),), "lease.leader", PROBLEM, "etcd"),
        ((standing_by(),), "lease.leader", PROBLEM, "nobody leads"),
        ((LeaseProcess("a:1", "it is silent"),), "lease.reachable", PROBLEM, "it is silent"),
        ((LeaseProcess("a:1"),), "lease.version", WARNING, "older"),
    ],
)
def test_lease_services_are_judged_together(
    told: tuple[LeaseProcess, ...], check: str, severity: Severity, words: str
) -> None:
    """Who leads, who stands by, who is gone."""
    found = [one for one in amiss(processes(*told)) if one.check == check]
    assert [one.severity for one in found] == [severity]
    assert words in found[0].seen


def test_a_token_that_is_not_known_is_to_be_given() -> None:
    """The lease service says that it refuses us."""
    facts = processes(LeaseProcess("a:1", "it refuses us (UNAUTHENTICATED)"))
    [finding] = [one for one in amiss(facts) if one.check == "lease.reachable"]
    assert "--lease-token-file" in finding.fix


def test_a_leader_that_does_not_tell_its_engines_is_a_warning() -> None:
    """What it does not tell is not judged."""
    facts = healthy()
    lease = replace(facts.lease, engines=None, problem="it is silent")
    assert "it is silent" in only(replace(facts, lease=lease), "lease.lists", WARNING).seen


def test_a_leader_without_a_routers_session_is_a_problem() -> None:
    """The router was to ask it."""
    assert "--lease" in only(with_leader(routers=[]), "lease.routers", PROBLEM).fix


def test_sessions_of_other_routers_are_not_ours() -> None:
    """A leader that refuses our router may have taken another one."""
    finding = only(with_settings(router_id="host:7"), "lease.routers", PROBLEM)
    assert finding.seen.startswith("our router has no session with the leader (1 other)")
    assert not amiss(with_settings(router_id="r1"))


def test_whether_our_router_has_a_session_is_not_guessed() -> None:
    """A router that does not tell its name, or so many that the list may be cut."""
    many = with_leader(routers=[lease_pb2.Router(router_id=f"o{n}") for n in range(1_000)])
    assert many.router.settings is not None
    named = replace(many.router, settings=replace(many.router.settings, router_id="host:7"))
    for facts in (healthy(), replace(many, router=named)):
        [finding] = [one for one in diagnose(facts) if one.check == "lease.routers"]
        assert finding.severity == Severity.OK
        assert "whether ours is among them is not told" in finding.seen


# --- Engines --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loaded", "fix"),
    [
        (True, "kvturn_lease_endpoint"),
        (False, '"kv_connector": "KvturnConnector"'),
        (None, '"kv_connector": "KvturnConnector"'),
    ],
)
def test_an_engine_without_a_session_lacks_connector_or_endpoint(
    loaded: bool | None, fix: str
) -> None:
    """Its metrics tell which."""
    facts = with_engines(engine("prefill"))
    facts = replace(facts, probes=[EngineProbe(DECODE, connector_loaded=loaded)])
    assert fix in only(facts, "engines.session", PROBLEM).fix


def test_an_engine_without_an_address_cannot_be_preferred() -> None:
    """Its session does not say where it is."""
    decode = engine("decode")
    decode.description.http_address = ""
    facts = with_engines(engine("prefill"), decode)
    router = replace(facts.router, engines=facts.router.engines and facts.router.engines[:1])
    assert (
        "kvturn_http_address" in only(replace(facts, router=router), "engines.address", PROBLEM).fix
    )


@pytest.mark.parametrize(
    ("missing", "seen", "fix"),
    [
        (
            ["bidirectional_kv_xfer"],
            "bidirectional_kv_xfer not set",
            "bidirectional_kv_xfer to true",
        ),
        (["kvturn_lease_endpoint"], "kvturn_lease_endpoint not set", "lease service's address"),
        ([], "has no session", "its log says why"),
    ],
)
def test_a_connector_that_is_turned_off_says_by_what(
    missing: list[str], seen: str, fix: str
) -> None:
    """The finding names the engine, its side and the setting, and nothing that is set."""
    facts = with_engines(engine("prefill"))
    probe = EngineProbe(DECODE, connector_loaded=True, turned_off_by=missing)
    finding = only(replace(facts, probes=[EngineProbe(PREFILL), probe]), "engines.session", PROBLEM)
    assert finding.seen.startswith(f"{DECODE} (decode): our connector is loaded and ")
    assert seen in finding.seen
    assert fix in finding.fix
    assert "if both are" not in finding.fix


def unplaced(*named: str, loaded: dict[str, bool] = {}) -> Facts:  # noqa: B006 (only read)
    """Returns a deployment whose decode engine tells no address, and what flags name for decode."""
    decode = engine("decode")
    decode.description.http_address = ""
    facts = with_engines(engine("prefill"), decode)
    seen = [RouterEngine(url, "decode", ["flags"]) for url in named]
    router = replace(facts.router, engines=[RouterEngine(PREFILL, "prefill", ["flags"]), *seen])
    probes = [EngineProbe(url, connector_loaded=loaded.get(url, True)) for url in (PREFILL, *named)]
    return replace(facts, router=router, probes=probes)


def test_an_engine_that_flags_name_may_be_the_one_that_tells_no_address() -> None:
    """It is served and read from, and never preferred: one warning, and no engine is told twice."""
    facts = unplaced(DECODE)
    finding = only(facts, "engines.address", WARNING)
    assert finding.seen == (
        f"decode-0 does not say its HTTP address; the router knows {DECODE} by name"
    )
    assert "1 decode engine: decode-0" in [one.seen for one in diagnose(facts)]


def test_of_more_addresses_than_sessions_one_has_none() -> None:
    """Which one nobody knows, unless the metrics of one show no connector."""
    other = "http://10.0.0.7:8200"
    found = {one.check: one for one in amiss(unplaced(DECODE, other))}
    assert found["engines.address"].severity == WARNING
    assert found["engines.session"].seen.endswith(
        f"(unless it is decode-0, which tells no address; then {DECODE} has none)"
    )
    found = {one.check: one for one in amiss(unplaced(DECODE, other, loaded={DECODE: False}))}
    assert found["engines.session"].seen == (
        f"{DECODE} (decode): no session with the lease service, and its metrics show no kvturn"
        " connector"
    )
    assert f"the router knows {other} by name" in found["engines.address"].seen


def test_where_the_routers_engines_are_hidden_an_address_may_be_named() -> None:
    """So that a session without one is no more than a warning."""
    facts = unplaced()
    router = replace(facts.router, engines=None, settings=None, hidden="only an operator may")
    found = {one.check: one.severity for one in amiss(replace(facts, router=router))}
    assert found["engines.address"] == WARNING


def test_who_drains_an_engine_can_take_it_up_again() -> None:
    """The lease service, for all routers, or this router alone."""
    drained = engine("decode")
    drained.draining = True
    both = [RouterEngine(PREFILL, "prefill"), RouterEngine(DECODE, "decode", draining=True)]
    for facts in (with_engines(engine("prefill"), drained), healthy()):
        router = replace(facts.router, engines=both)
        fix = only(replace(facts, router=router), "engines.used", WARNING).fix
        by_session = facts.lease.engines is not None and facts.lease.engines[1].draining
        assert ("kvturn drain decode-0 --undo" in fix) == by_session
        assert (f"POST {ROUTER}/kvturn/v1/engines/drain?url={DECODE}" in fix) != by_session


@pytest.mark.parametrize(
    ("seen", "severity", "words"),
    [
        (RouterEngine(DECODE, "decode", usable=False, reason="refused"), PROBLEM, "refused"),
        (RouterEngine(DECODE, "decode", draining=True), WARNING, "draining"),
        (None, WARNING, "does not know"),
    ],
)
def test_an_engine_that_gets_no_turns_is_told(
    seen: RouterEngine | None, severity: Severity, words: str
) -> None:
    """As the router sees it."""
    facts = healthy()
    engines = [RouterEngine(PREFILL, "prefill", ["session:prefill-0"])]
    router = replace(facts.router, engines=engines + ([seen] if seen else []))
    assert words in only(replace(facts, router=router), "engines.used", severity).seen


def test_a_role_without_engines_is_a_problem() -> None:
    """No turn can be served."""
    facts = with_engines(engine("prefill"))
    router = replace(facts.router, engines=facts.router.engines and facts.router.engines[:1])
    assert "decode" in only(replace(facts, router=router), "engines.known", PROBLEM).seen


def test_a_late_heartbeat_is_a_warning() -> None:
    """Before the session is lost."""
    late = engine("decode")
    late.last_heartbeat_age.FromSeconds(3)
    assert (
        "--session-ttl"
        in only(with_engines(engine("prefill"), late), "engines.heartbeat", WARNING).fix
    )


def test_a_heartbeat_is_late_by_its_own_interval() -> None:
    """Which may be a fraction of a second."""
    late = engine("decode")
    late.last_heartbeat_age.FromMilliseconds(600)
    facts = with_leader(
        times=lease_pb2.LeaseTimes(
            session_ttl=seconds(1),
            heartbeat_interval=seconds(0.25),
            longest_read=seconds(3),
            idle=seconds(60),
            max_hold=seconds(480),
        )
    )
    facts = replace(facts, lease=replace(facts.lease, engines=[engine("prefill"), late]))
    found = [one.seen for one in amiss(facts) if one.check == "engines.heartbeat"]
    assert found == ["decode-0: its last heartbeat is 0.6 s old, one is due each 0.25 s"]


def test_sessions_that_were_lost_lately_are_a_warning() -> None:
    """With how often, and how long ago: each time what the engine held could not be read."""
    lost = engine("decode")
    lost.expired_session_count = 34
    lost.last_expiry_age.FromSeconds(12)
    finding = only(with_engines(engine("prefill"), lost), "engines.expiries", WARNING)
    assert finding.seen == (
        "decode-0 lost 34 sessions, the latest 12 s ago:"
        " it was not heard for the session TTL of 5 s"
    )
    assert "--session-ttl" in finding.fix


def test_a_session_that_was_lost_long_ago_is_not_told_of() -> None:
    """What was amiss then is over."""
    healed = engine("decode")
    healed.expired_session_count = 1
    healed.last_expiry_age.FromSeconds(3600)
    assert not amiss(with_engines(engine("prefill"), healed))


def test_ranks_of_data_parallelism_are_engines_at_one_address() -> None:
    """None of them hides another."""
    other = engine("decode")
    other.description.engine_id = "decode-0-dp1"
    facts = with_engines(engine("prefill"), engine("decode"), other)
    assert [one.name for one in facts.of_role("decode")] == ["decode-0", "decode-0-dp1"]
    assert not amiss(facts)


# --- Versions, equality ---------------------------------------------------------------------------


def of_version(version: str) -> lease_pb2.Engine:
    """Returns a decode engine of that vLLM."""
    decode = engine("decode")
    decode.description.vllm_version = version
    return decode


def both_of(version: str) -> Facts:
    """Returns a deployment of one vLLM."""
    prefill = engine("prefill")
    prefill.description.vllm_version = version
    return with_engines(prefill, of_version(version))


def test_vllms_that_differ_refuse_each_others_kv() -> None:
    """Both are tested, but not together."""
    finding = only(with_engines(engine("prefill"), of_version("0.29.0")), "versions.vllm", PROBLEM)
    assert "0.29.0: decode-0; 0.32.0: prefill-0" in finding.seen


@pytest.mark.parametrize(
    ("version", "severity"), [("0.28.1", PROBLEM), ("0.33.0", WARNING), ("0.30.1+cpu", WARNING)]
)
def test_vllms_that_are_not_tested_are_told(version: str, severity: Severity) -> None:
    """Too old ones are a problem."""
    assert version in only(both_of(version), "versions.vllm", severity).seen


def test_parts_of_other_versions_are_told() -> None:
    """NIXL beside the engines, and kvturn's own parts."""
    facts = with_engines(engine("prefill"), engine("decode", nixl_version="1.4.1"))
    assert "1.4.1: decode-0" in only(facts, "versions.nixl", WARNING).seen
    routers = [lease_pb2.Router(router_id="r2", version="0.2.0")]
    finding = only(with_leader(routers=routers), "versions.kvturn", WARNING)
    assert "0.2.0: router r2" in finding.seen
    assert "lease services first, then routers, then engines" in finding.fix


@pytest.mark.parametrize(
    ("settings", "check", "severity"),
    [
        ({"dtype": "float16"}, "alike.dtype", PROBLEM),
        ({"kv_cache_dtype": "fp8"}, "alike.kv_cache_dtype", PROBLEM),
        ({"secret_check": 7}, "alike.secret", PROBLEM),
        ({"kv_buffer_device": "cpu"}, "alike.kv_buffer_device", PROBLEM),
        ({"tensor_parallel_size": 2}, "alike.tensor_parallel_size", WARNING),
        ({"max_model_len": 4096}, "alike.max_model_len", WARNING),
        ({"prefix_caching": False}, "alike.prefix_caching", WARNING),
        ({"kv_load_failure_policy": "fail"}, "alike.kv_load_failure_policy", WARNING),
        ({"plain_attention": False}, "alike.plain_attention", PROBLEM),
    ],
)
def test_what_differs_or_is_off_on_decode_is_told(
    settings: dict[str, Any], check: str, severity: Severity
) -> None:
    """Prefill is as it should be."""
    assert (
        "decode-0"
        in only(with_engines(engine("prefill"), engine("decode", **settings)), check, severity).seen
    )


def test_model_and_block_size_must_be_equal() -> None:
    """They are not among the settings."""
    decode = engine("decode")
    decode.description.model = "/other/m"
    assert "/other/m" in only(with_engines(engine("prefill"), decode), "alike.model", PROBLEM).seen
    decode = engine("decode")
    decode.description.block_size = 128
    finding = only(with_engines(engine("prefill"), decode), "alike.block_size", PROBLEM)
    assert "128: decode-0; 16: prefill-0" in finding.seen


def test_a_prefill_engine_that_fails_turns_is_a_problem() -> None:
    """The connector refuses to start so; a later vLLM may let it."""
    facts = with_engines(engine("prefill", kv_load_failure_policy="fail"), engine("decode"))
    assert "recompute" in only(facts, "alike.kv_load_failure_policy", PROBLEM).fix


def test_settings_that_nobody_tells_are_not_judged() -> None:
    """A connector that is older than they are."""
    old = [engine("prefill"), engine("decode")]
    for one in old:
        one.description.ClearField("settings")
    assert not amiss(with_engines(*old))


# --- Times ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hold_s", "check", "severity"),
    [(5, "times.session", PROBLEM), (30, "times.idle", WARNING), (300, "times.hold", WARNING)],
)
def test_decode_must_hold_for_longer_than_others_count_on(
    hold_s: float, check: str, severity: Severity
) -> None:
    """Session TTL 5 s, idle 60 s, longest hold 480 s."""
    decode = engine("decode", decoder_kv_blocks_ttl=seconds(hold_s))
    finding = only(with_engines(engine("prefill"), decode), check, severity)
    assert "decoder_kv_blocks_ttl" in finding.fix


def test_a_question_must_leave_time_to_read() -> None:
    """3 s are the longest read."""
    facts = with_settings(question_deadline_ms=2_950)
    assert "--question-deadline-ms" in only(facts, "times.question", WARNING).fix
    slow = engine("prefill", question_deadline=seconds(2.95))
    finding = only(with_engines(slow, engine("decode")), "times.question", WARNING)
    assert "kvturn_question_deadline_ms of prefill-0" in finding.fix


def test_lease_services_go_by_the_same_times() -> None:
    """Else what ends a retention changes with the leader."""
    facts = processes(LEADS, standing_by(policy="pressure"))
    assert "--policy" in only(facts, "times.equal", WARNING).fix


def stock(**settings: Any) -> Facts:
    """Returns a deployment of stock engines, of vLLM 0.33."""
    facts = with_settings(lease=[], stock_reuse=True, **settings)
    engines = [
        RouterEngine(PREFILL, "prefill", ["flags"]),
        RouterEngine(DECODE, "decode", ["flags"]),
    ]
    probes = [EngineProbe(url, vllm_version="0.33.0") for url in (PREFILL, DECODE)]
    router = replace(facts.router, engines=engines)
    return replace(facts, router=router, lease=LeaseFacts(), probes=probes, side_channels=())


def test_stock_handles_must_not_outlive_their_blocks() -> None:
    """vLLM's own hold is 480 s; a lease service is not asked for."""
    assert [one.check for one in amiss(stock())] == ["versions.vllm"]
    found = {one.check: one for one in amiss(stock(stock_ttl_s=480.0))}
    assert found["times.stock"].severity == PROBLEM
    assert "--stock-ttl-s" in found["times.stock"].fix


def test_streams_of_old_stock_engines_carry_no_handle() -> None:
    """Before 0.33 every streamed turn is computed anew."""
    facts = stock()
    probes = [EngineProbe(url, vllm_version="0.32.0") for url in (PREFILL, DECODE)]
    finding = only(replace(facts, probes=probes), "versions.stock_streams", PROBLEM)
    assert "kv_transfer_params" in finding.seen


def test_of_stock_engines_metrics_tell_the_cache() -> None:
    """Block size and prefix caching, without a session."""
    facts = stock()
    probes = [
        EngineProbe(PREFILL, vllm_version="0.33.0", cache=CacheConfig("16", "auto", True)),
        EngineProbe(DECODE, vllm_version="0.33.0", cache=CacheConfig("128", "auto", False)),
    ]
    found = {one.check for one in amiss(replace(facts, probes=probes))}
    assert {"alike.block_size", "alike.prefix_caching"} < found


# --- Addresses, transfer --------------------------------------------------------------------------


def announcing(host: str, *, network: str = "network-decode", **more: Any) -> Facts:
    """Returns a deployment whose decode engine announces this host for its side channel."""
    decode = engine("decode", network=network)
    decode.description.nixl.host = host
    channel = SideChannel("decode-0", host, 5600, tried=False)
    return replace(with_engines(engine("prefill"), decode), side_channels=[channel], **more)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "0.0.0.0"])
def test_an_address_that_cannot_be_right_is_a_problem(host: str) -> None:
    """Loopback between two machines, or all addresses; wherever doctor runs."""
    finding = only(announcing(host), "reach.side_channel", PROBLEM)
    assert "VLLM_NIXL_SIDE_CHANNEL_HOST" in finding.fix


def test_loopback_is_right_where_all_engines_share_it() -> None:
    """One machine, one network."""
    assert not amiss(announcing("127.0.0.1", network="network-prefill"))


def test_without_word_of_networks_hosts_of_addresses_tell_them_apart() -> None:
    """A connector that is older."""
    facts = announcing("127.0.0.1")
    for one in facts.lease.engines or ():
        one.description.ClearField("settings")
    only(facts, "reach.side_channel", PROBLEM)


def test_what_is_not_reached_is_a_warning_unless_here_is_where_engines_are() -> None:
    """The side channel and the HTTP address."""
    tried = SideChannel(
        "decode-0", "10.0.0.6", 5600, tried=True, problem="no connection within 3 s"
    )
    facts = healthy(side_channels=[tried])
    assert "--from-here" in only(facts, "reach.side_channel", WARNING).fix
    here = HostFacts(from_here=True)
    assert "5600" in only(replace(facts, host=here), "reach.side_channel", PROBLEM).fix
    beside = HostFacts(network="network-prefill")
    only(replace(facts, host=beside), "reach.side_channel", PROBLEM)
    only(replace(facts, host=HostFacts(network="network-decode")), "reach.side_channel", WARNING)
    facts = healthy(probes=[EngineProbe(DECODE, "Connection refused"), EngineProbe(PREFILL)])
    only(facts, "reach.http", WARNING)


def test_of_a_large_fleet_it_is_told_how_many_were_not_tried() -> None:
    """Doctor asks the first ones only."""
    facts = healthy()
    seen = [one.seen for one in diagnose(replace(facts, probes=facts.probes[:1]))]
    assert "1 of 2 addresses not tried: the fleet is large" in seen


def test_backends_must_have_one_in_common() -> None:
    """LIBFABRIC against UCX reads nothing; one more on one side may be slow."""
    fabric = {"nixl_backends": ["LIBFABRIC"], "rdma_devices": ["efa_0"]}
    facts = with_engines(engine("prefill"), engine("decode", **fabric))
    assert "LIBFABRIC: decode-0; UCX: prefill-0" in only(facts, "transfer.backends", PROBLEM).seen
    fabric["nixl_backends"].append("UCX")
    facts = with_engines(engine("prefill"), engine("decode", **fabric))
    only(facts, "transfer.backends", WARNING)


def fabric(*devices: str, host: HostFacts = HostFacts()) -> Facts:  # noqa: B008 (immutable)
    """Returns a deployment over LIBFABRIC, whose decode engine has these RDMA devices."""
    both = {"nixl_backends": ["LIBFABRIC"]}
    prefill = engine("prefill", rdma_devices=["efa_0"], **both)
    decode = engine("decode", rdma_devices=list(devices), **both)
    return with_engines(prefill, decode, host=host)


def test_libfabric_without_efa_is_silently_slow() -> None:
    """Seen by the devices of the engine's machine, wherever doctor runs."""
    assert "mlx5_0" in only(fabric("mlx5_0 (mlx5_core)"), "transfer.efa", PROBLEM).seen
    assert not amiss(fabric("efa_0", "rdmap16s27 (efa)"))


def over_ucx(*devices: str, machine: str = "machine-decode") -> Facts:
    """Returns a deployment over UCX, whose decode engine has these RDMA devices."""
    decode = engine("decode", rdma_devices=list(devices), machine=machine)
    return with_engines(engine("prefill"), decode)


def test_ucx_where_there_is_efa_alone_may_be_silently_slow() -> None:
    """Not beside other RDMA devices, nor between engines of one machine."""
    finding = only(over_ucx("rdmap16s27 (efa)", "efa_1"), "transfer.efa", WARNING)
    assert "decode-0 asks for UCX" in finding.seen
    assert '"backends": ["LIBFABRIC"]' in finding.fix
    assert not amiss(over_ucx("efa_0", "mlx5_0 (mlx5_core)"))
    assert not amiss(over_ucx("efa_0", machine="machine-prefill"))
    assert not amiss(over_ucx())


def test_on_the_engines_machine_libfabric_itself_is_asked() -> None:
    """Whether it has the provider, or cannot be asked."""
    here = HostFacts("machine-decode", efa=False, efa_problem="fi_getinfo: -61")
    assert "-61" in only(fabric("efa_0", host=here), "transfer.efa", PROBLEM).seen
    unknown = replace(here, efa=None, efa_problem="fi_info: No such file or directory")
    assert "libfabric-bin" in only(fabric("efa_0", host=unknown), "transfer.efa", WARNING).fix
    assert not amiss(fabric("efa_0", host=replace(here, efa=True)))


# --- etcd, clocks, memory, traces -----------------------------------------------------------------


def cluster(*changed: dict[str, Any], **more: Any) -> Facts:
    """Returns a deployment with an etcd of three members, some of them changed."""
    members = [EtcdMember(f"e{n}:2379", version="3.6.4", leader=1, db_bytes=9**7) for n in range(3)]
    for index, one in enumerate(changed):
        members[index] = replace(members[index], **one)
    return healthy(etcd=replace(EtcdFacts(members, 3, [1.0, 2.0, 9.0]), **more))


def test_an_etcd_in_order_is_told_with_its_pace() -> None:
    """Three members, a majority, room."""
    seen = [one.seen for one in diagnose(cluster()) if one.group == "etcd"]
    assert not amiss(cluster())
    assert "3 of 3 members asked and well" in seen
    assert any("2.0 ms, at worst 9.0 ms" in one for one in seen)


@pytest.mark.parametrize(
    ("facts", "check", "severity", "words"),
    [
        (cluster({"problem": "no answer in time"}), "etcd.members", WARNING, "e0:2379"),
        (cluster(*[{"problem": "gone"}] * 3), "etcd.members", PROBLEM, "gone"),
        (cluster(read_problem="no answer in time"), "etcd.majority", PROBLEM, "no answer"),
        (cluster(*[{"leader": 0}] * 3), "etcd.majority", PROBLEM, "no leader"),
        (cluster(read_ms=[150.0] * 5), "etcd.pace", WARNING, "150.0 ms"),
        (cluster({"errors": ["alarm:NOSPACE"]}), "etcd.alarm", PROBLEM, "NOSPACE"),
        (cluster({"db_bytes": 2 * GIB - 1}), "etcd.space", WARNING, "2147.5 MB"),
        (cluster({"version": "3.5.4"}), "etcd.version", WARNING, "3.5.4"),
        (cluster(cluster_size=5), "etcd.cluster", WARNING, "3 of 5 members"),
        (
            healthy(etcd=EtcdFacts([EtcdMember("e:2379", version="3.6.4", leader=1)], 1, [1.0])),
            "etcd.cluster",
            WARNING,
            "a cluster of 1",
        ),
    ],
)
def test_an_etcd_that_is_not_well_is_told(
    facts: Facts, check: str, severity: Severity, words: str
) -> None:
    """Members, majority, pace, alarms, space, version."""
    found = [one for one in amiss(facts) if one.check == check]
    assert {one.severity for one in found} == {severity}
    assert words in found[0].seen
    assert all(one.group == "etcd" for one in amiss(facts))


def test_clocks_that_certainly_differ_are_told() -> None:
    """A Date header tells whole seconds only, and proves no small difference."""
    wide = [EngineProbe(DECODE, clock=Clock(DECODE, -1.3, -0.3)), EngineProbe(PREFILL)]
    finding = only(healthy(probes=wide), "clocks.skew", WARNING)
    assert "0.3 s ahead" in finding.seen
    assert DECODE in finding.seen
    unsure = [EngineProbe(DECODE, clock=Clock(DECODE, -0.9, 0.1)), EngineProbe(PREFILL)]
    assert not amiss(healthy(probes=unsure))


def test_memory_that_is_too_small_is_told() -> None:
    """By what was given up for it, and by what is free."""
    probes = [EngineProbe(DECODE, released={"pressure": 30, "consumed": 70}), EngineProbe(PREFILL)]
    assert "30 of 100" in only(healthy(probes=probes), "memory.pressure", WARNING).seen
    probes = [EngineProbe(DECODE, released={"pressure": 4, "consumed": 1}), EngineProbe(PREFILL)]
    assert not amiss(healthy(probes=probes))
    full = engine("decode")
    full.memory.free_blocks = 40
    assert "40 free" in only(with_engines(engine("prefill"), full), "memory.free", WARNING).seen


def pressed(policy: str, **released: int) -> Facts:
    """Returns a deployment that gave retentions up, and whose second turn found its own gone."""
    facts = with_leader(policy=policy)
    return replace(
        facts,
        probes=[EngineProbe(PREFILL), EngineProbe(DECODE, released=released)],
        turns=[turn("first_turn"), turn("released")],
    )


@pytest.mark.parametrize(
    ("facts", "memory", "turns"),
    [
        (pressed("idle", pressure=50, idle=10), "lower --idle", ""),
        (pressed("idle", pressure=50, idle=90), "", ""),
        (pressed("idle", pressure=1, idle=90), None, "raise --idle"),
        (pressed("pressure", pressure=50), "", ""),
        (pressed("pressure", consumed=50), None, "more KV memory"),
        (pressed("fixed-ttl", consumed=50), None, "more KV memory"),
    ],
)
def test_a_report_does_not_contradict_itself_about_memory(
    facts: Facts, memory: str | None, turns: str
) -> None:
    """The idle time is raised where memory is not short, lowered where it is, if it has any effect
    at all."""
    found = {one.check: one.fix for one in amiss(facts)}
    assert ("memory.pressure" in found) == (memory is not None)
    assert (memory or "KV memory") in found.get("memory.pressure", "more KV memory")
    assert (turns or "findings on memory") in found["turns.reuse"]
    mentions = [fix for fix in found.values() if "--idle" in fix]
    assert len(mentions) == ("--idle" in f"{memory}{turns}")


def test_under_a_fixed_ttl_that_is_what_ends_retentions() -> None:
    """Neither the idle time nor the longest hold does."""
    facts = replace(with_leader(policy="fixed-ttl"), turns=[turn("first_turn"), turn("expired")])
    assert "--fixed-ttl" in only(facts, "turns.reuse", PROBLEM).fix


@pytest.mark.parametrize(
    ("collector", "words"),
    [
        (CollectorFacts("http://c:4317", "--otlp", "UNAVAILABLE: refused"), "UNAVAILABLE"),
        (
            CollectorFacts("http://c:4318", "the router", protocol="http/protobuf"),
            "(known by the router) answers in http/protobuf, not in grpc",
        ),
    ],
)
def test_a_collector_that_takes_nothing_is_told(collector: CollectorFacts, words: str) -> None:
    """Turns go on without traces, so it is a warning."""
    assert words in only(healthy(collector=collector), "traces.collector", WARNING).seen


def test_certificates_that_end_soon_are_told() -> None:
    """In a week there is time to renew one; past its end nobody connects."""
    lasting = Certificate("https://r:443", 30 * 86_400.0)
    assert not amiss(healthy(certificates=[lasting]))
    soon = healthy(certificates=[lasting, Certificate("lease service l:7600", 2 * 86_400.0)])
    assert only(soon, "tls.certificate", WARNING).seen.startswith("lease service l:7600: ")
    over = healthy(certificates=[Certificate("https://e:8200", 0.0)])
    assert "has expired" in only(over, "tls.certificate", PROBLEM).seen


# --- Traffic and turns ----------------------------------------------------------------------------


def test_the_commonest_fallback_is_explained() -> None:
    """First turns count neither way."""
    told = [(f"c{n}", "released", 3) for n in range(6)] + [(f"d{n}", "reused", 3) for n in range(8)]
    told += [("e", "expired", 2)] + [(f"f{n}", "first_turn", 1) for n in range(40)]
    facts = with_conversations(*told)
    finding = only(facts, "traffic.fallbacks", WARNING)
    assert "7 of 15 turns that might have reused did not, 6 of them released" in finding.seen
    assert (finding.why, finding.fix) == cause_of("released", facts)


def test_few_fallbacks_and_doctors_own_turns_are_no_matter() -> None:
    """Of few turns a share says nothing."""
    told = [(f"c{n}", "reused", 3) for n in range(30)] + [("d", "expired", 2)]
    assert not amiss(with_conversations(*told))
    own = [(f"kvturn-doctor-{n}", "no_lease", 2) for n in range(30)]
    assert not amiss(with_conversations(*own))


def test_clients_that_tag_nothing_and_are_not_recognised_are_told() -> None:
    """The router made up their conversations' names, and none went on."""
    lost = [(f"conv-{n:032x}", "first_turn", 1) for n in range(11)]
    finding = only(with_conversations(*lost, ("trip", "reused", 5)), "traffic.naming", WARNING)
    assert "named by clients, 11 by the router, none of which went on" in finding.seen
    assert "X-Conversation-Id" in finding.fix
    recognised = [(f"agent~{n:012x}", "reused", 4) for n in range(11)]
    assert not amiss(with_conversations(*recognised))


def test_the_second_turn_shows_that_all_works_together() -> None:
    """Read from decode, served by the holder alone, or held by prefill's own cache."""
    for second in (
        turn("reused", reused_tokens=800, read_bytes=1),
        turn("local", plan="local", local_tokens=900),
        turn("below_threshold", local_tokens=950),
        turn("partial_prefix", reused_tokens=100, local_tokens=500),
    ):
        assert not amiss(healthy(turns=[turn("first_turn"), second])), second.verdict
    [finding] = [one for one in diagnose(healthy()) if one.check == "turns.reuse"]
    assert "900 of 1,000 prompt tokens read" in finding.seen
    assert "TTFT 400 ms, then 90 ms" in finding.seen


@pytest.mark.parametrize("verdict", sorted(set(CAUSES) - {"reused", "partial_prefix", "local"}))
def test_why_the_second_turn_did_not_reuse_is_explained(verdict: str) -> None:
    """From its verdict, with the reason of its plan."""
    second = turn(verdict, plan="recompute", plan_reason=f"{verdict} no_holder")
    facts = healthy(turns=[turn("first_turn"), second])
    [finding] = amiss(facts)
    assert finding.check == "turns.reuse"
    assert verdict in finding.seen
    mild = verdict in ("cheaper_to_compute", "below_threshold")
    assert finding.severity == (WARNING if mild else PROBLEM)
    assert mild or (finding.why, finding.fix) == cause_of(verdict, facts)


def test_a_local_turn_is_in_order_only_if_enough_came_from_the_cache() -> None:
    """Decode serves it alone either way; only the usage tells how much it computed anew."""

    def served(**more: Any) -> Facts:
        return healthy(turns=[turn("first_turn"), turn("local", plan="local", **more)])

    [finding] = [one for one in diagnose(served(local_tokens=900)) if one.check == "turns.reuse"]
    assert finding.severity == Severity.OK
    assert "no read from decode was needed, so none was seen (--plan pull" in finding.seen
    finding = only(served(local_tokens=0), "turns.reuse", PROBLEM)
    assert "only 0 of 1,000 prompt tokens from its cache" in finding.seen
    assert "--no-enable-prefix-caching" in finding.fix
    assert "memory" in finding.fix
    only(served(local_tokens=499), "turns.reuse", PROBLEM)
    found = {one.check: one for one in amiss(served(details_told=False))}
    assert found["turns.reuse"].severity == WARNING
    assert "cannot be seen" in found["turns.reuse"].seen
    assert "--enable-prompt-tokens-details" in found["turns.reuse"].fix


def test_each_verdict_of_the_contract_is_explained() -> None:
    """In the order of the contract, none missing, none more."""
    names = [name.removeprefix("VERDICT_").lower() for name in common_pb2.Verdict.keys()[1:]]
    assert list(CAUSES) == names


def test_turns_that_fail_or_tell_too_little_are_told() -> None:
    """A turn that failed, an answer without verdict or details, no turns at all."""
    failed = [DrivenTurn("HTTP 503: no prefill engine")]
    assert "turn 1 failed" in only(healthy(turns=failed), "turns.served", PROBLEM).seen
    bare = [turn("first_turn"), turn("")]
    assert "--router" in only(healthy(turns=bare), "turns.reuse", PROBLEM).fix
    mute = [turn("first_turn"), turn("reused", reused_tokens=900, details_told=False)]
    finding = only(healthy(turns=mute), "turns.usage", WARNING)
    assert "--enable-prompt-tokens-details" in finding.fix
    shrunk = [turn("first_turn"), turn("partial_prefix", reused_tokens=100)]
    only(healthy(turns=shrunk), "turns.reuse", WARNING)
    only(healthy(turns=None, turns_skipped="not ready"), "turns.reuse", WARNING)
    assert not amiss(healthy(turns=None))


# --- The report -----------------------------------------------------------------------------------


def test_the_report_groups_findings_and_counts_them() -> None:
    """Why and fix stand under what is amiss only; commands are not broken."""
    found = list(diagnose(with_settings(plan="recompute")))
    text = [line for line, _ in lines(found)]
    assert text[0] == "Router"
    assert "  PROBLEM --plan recompute: every turn is computed anew" in text
    assert "          fix: start kvturn router with --plan auto" in text
    assert text[-1] == f"1 problem, 0 warnings, {len(found) - 1} in order"
    assert sum("fix:" in line for line in text) == 1
    assert all(len(line) <= 100 for line in text)


def test_the_json_has_all_of_it() -> None:
    """Findings with their groups, both turns, a summary."""
    facts = healthy()
    told = document(facts, list(diagnose(facts)))
    assert told["summary"]["problem"] == 0
    assert told["findings"][0]["group"] == "router"
    assert told["findings"][0]["severity"] == "ok"
    assert [one["verdict"] for one in told["turns"]] == ["first_turn", "reused"]


def test_counts_are_english() -> None:
    """One engine, two engines, no entries."""
    assert [counted(1, "engine"), counted(2, "engine")] == ["1 engine", "2 engines"]
    assert counted(0, "entry") == "0 entries"
    assert counted(2, "way") == "2 ways"
