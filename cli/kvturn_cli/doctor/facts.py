"""What is known of a deployment, as probes found it. No I/O.

"" and None stand for what is not known. A `problem` says in words why something could not be asked.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvturn.address import engine_address
from kvturn.otlp import GRPC
from kvturn.v1 import common_pb2, lease_pb2


@dataclass(frozen=True)
class Clock:
    """How far a clock is ahead of ours, in seconds: between `low_s` and `high_s`."""

    name: str
    low_s: float
    high_s: float


@dataclass(frozen=True)
class LeaseProcess:
    """One process of the lease service."""

    endpoint: str
    problem: str = ""
    described: lease_pb2.DescribeServiceResponse | None = None
    """None if it could not be asked, or is too old to tell."""
    answer_ms: float = 0.0
    clock: Clock | None = None

    @property
    def leads(self) -> bool:
        """Whether it says that it leads."""
        return self.described is not None and self.described.leads


@dataclass(frozen=True)
class LeaseFacts:
    """The lease service. Lists are the leader's, None if it could not be asked."""

    processes: Sequence[LeaseProcess] = ()
    asked_of: str = ""
    """How the endpoints are known, e.g. "--lease"."""
    engines: Sequence[lease_pb2.Engine] | None = None
    conversations: Sequence[lease_pb2.Conversation] | None = None
    problem: str = ""
    """Why the lists are missing."""

    @property
    def leader(self) -> lease_pb2.DescribeServiceResponse | None:
        """What the leader says of itself; None if none is known to lead."""
        found = (one.described for one in self.processes if one.leads)
        return next(found, None)


@dataclass(frozen=True)
class RouterEngine:
    """An engine as the router sees it."""

    url: str
    role: str = ""
    named_by: Sequence[str] = ()
    usable: bool = True
    reason: str = ""
    draining: bool = False

    @property
    def has_session(self) -> bool:
        """Whether it is known by its session with the lease service."""
        return any(name.startswith("session:") for name in self.named_by)


@dataclass(frozen=True)
class RouterSettings:
    """How the router was started, as it tells."""

    version: str = ""
    lease: Sequence[str] = ()
    plan: str = "auto"
    pull_min_tokens: int | None = None
    question_deadline_ms: int = 50
    stock_reuse: bool = False
    stock_ttl_s: float = 400.0
    api_keys: bool = False
    otlp_endpoint: str | None = None
    otlp_protocol: str | None = None
    """None also of a router that does not tell it."""
    router_id: str = ""
    """What it calls itself to the lease service: of several workers, the one that answered."""


@dataclass(frozen=True)
class RouterFacts:
    """The router."""

    url: str
    problem: str = ""
    ready: bool = False
    not_ready: str = ""
    """Why it is not ready, in its words."""
    settings: RouterSettings | None = None
    engines: Sequence[RouterEngine] | None = None
    hidden: str = ""
    """Why settings and engines are not told."""
    models: Sequence[str] = ()
    models_problem: str = ""
    clock: Clock | None = None


@dataclass(frozen=True)
class CacheConfig:
    """What vLLM's metrics tell of its KV cache."""

    block_size: str = ""
    cache_dtype: str = ""
    prefix_caching: bool | None = None


@dataclass(frozen=True)
class EngineProbe:
    """An engine, asked from here."""

    url: str
    problem: str = ""
    vllm_version: str = ""
    connector_loaded: bool | None = None
    """Whether its metrics have those of our connector; None if they could not be read."""
    turned_off_by: Sequence[str] | None = None
    """Settings for want of which our connector does nothing; None if it does not tell."""
    cache: CacheConfig = field(default_factory=CacheConfig)
    released: dict[str, int] = field(default_factory=dict)
    """Retentions that it freed since it started, by reason."""
    clock: Clock | None = None


@dataclass(frozen=True)
class SideChannel:
    """Where an engine's NIXL side channel was tried from here."""

    engine_id: str
    host: str
    port: int
    tried: bool
    problem: str = ""


@dataclass(frozen=True)
class EtcdMember:
    """One member of etcd's cluster."""

    endpoint: str
    problem: str = ""
    version: str = ""
    leader: int = 0
    db_bytes: int = 0
    db_used_bytes: int = 0
    quota_bytes: int = 0
    errors: Sequence[str] = ()


@dataclass(frozen=True)
class EtcdFacts:
    """etcd. Times are of linearizable reads, which a majority must agree to."""

    members: Sequence[EtcdMember] = ()
    cluster_size: int = 0
    """Members of the cluster, asked or not; 0 if not known."""
    read_ms: Sequence[float] = ()
    read_problem: str = ""


@dataclass(frozen=True)
class CollectorFacts:
    """Where traces go."""

    endpoint: str
    asked_of: str
    """How it is known, e.g. "--otlp"."""
    problem: str = ""
    refused: bool = False
    """Whether the problem is who we are."""
    protocol: str = ""
    """"grpc" or "http/protobuf", as it answered."""
    wanted: str = GRPC
    """In what the router exports; of another collector what its address is meant for."""
    answer_ms: float = 0.0


@dataclass(frozen=True)
class Certificate:
    """What a server shows to whoever connects over TLS."""

    name: str
    """Whose it is."""
    left_s: float
    """How long it is still valid, in seconds; 0 if it is not any more."""


@dataclass(frozen=True)
class HostFacts:
    """The machine on which doctor runs."""

    machine: str = ""
    network: str = ""
    efa: bool | None = None
    """Whether libfabric has an EFA provider here; None if it was not or cannot be asked."""
    efa_problem: str = ""
    from_here: bool = False
    """Whether what is not reachable from here counts as not reachable for engines."""


@dataclass(frozen=True)
class DrivenTurn:
    """A turn that doctor drove."""

    problem: str = ""
    verdict: str = ""
    plan: str = ""
    plan_reason: str = ""
    conversation_id: str = ""
    prompt_tokens: int = 0
    reused_tokens: int = 0
    local_tokens: int = 0
    read_ms: float = 0.0
    read_bytes: int = 0
    ttft_ms: float = 0.0
    usage_told: bool = True
    """Whether the answer's usage came."""
    details_told: bool = True
    """Whether it had prompt_tokens_details."""

    @property
    def kept_tokens(self) -> int:
        """Tokens of the prompt that were not computed."""
        return self.reused_tokens + self.local_tokens


@dataclass(frozen=True)
class Facts:
    """All of it. None: not looked at, or there is none."""

    router: RouterFacts
    lease: LeaseFacts = field(default_factory=LeaseFacts)
    probes: Sequence[EngineProbe] = ()
    side_channels: Sequence[SideChannel] = ()
    etcd: EtcdFacts | None = None
    collector: CollectorFacts | None = None
    certificates: Sequence[Certificate] = ()
    """Those of router, lease services and engines that are reached over TLS."""
    host: HostFacts = field(default_factory=HostFacts)
    turns: Sequence[DrivenTurn] | None = None
    """The two turns; None if none were driven."""
    turns_skipped: str = ""
    """Why there are none."""

    @property
    def stock(self) -> bool:
        """Whether the router reuses through stock engines' handles."""
        return self.router.settings is not None and self.router.settings.stock_reuse

    @property
    def policy(self) -> str:
        """What ends retentions, as the leader says; "" if none is known to lead."""
        return self.lease.leader.policy if self.lease.leader is not None else ""

    @property
    def engines(self) -> list["EngineFacts"]:
        """Every engine that the router or the lease service knows, joined by address."""
        return _joined(self)

    def of_role(self, role: str) -> list["EngineFacts"]:
        """Returns the engines that serve a leg, "prefill" or "decode"."""
        return [engine for engine in self.engines if engine.role in (role, "both")]


@dataclass
class EngineFacts:
    """One engine: its session, how the router sees it, how it answers here."""

    url: str = ""
    session: lease_pb2.Engine | None = None
    seen: RouterEngine | None = None
    probe: EngineProbe | None = None

    @property
    def name(self) -> str:
        """What to call it."""
        return self.session.description.engine_id if self.session else self.url

    @property
    def role(self) -> str:
        """ "prefill", "decode", "both", or "" if nobody says."""
        if self.session is not None:
            role = common_pb2.EngineRole.Name(self.session.description.role)
            return role.removeprefix("ENGINE_ROLE_").lower()
        return self.seen.role if self.seen else ""

    @property
    def settings(self) -> lease_pb2.EngineSettings | None:
        """How it was started; None if it does not tell."""
        if self.session is None or not self.session.description.HasField("settings"):
            return None
        return self.session.description.settings

    @property
    def vllm_version(self) -> str:
        """vLLM's version, as its connector or its HTTP API says."""
        if self.session is not None:
            return self.session.description.vllm_version
        return self.probe.vllm_version if self.probe else ""

    @property
    def block_size(self) -> str:
        """Tokens of a KV block."""
        if self.session is not None and self.session.description.block_size:
            return str(self.session.description.block_size)
        return self.probe.cache.block_size if self.probe else ""

    @property
    def prefix_caching(self) -> bool | None:
        """Whether its own prefix caching is on."""
        if self.settings is not None and self.settings.HasField("prefix_caching"):
            return self.settings.prefix_caching
        return self.probe.cache.prefix_caching if self.probe else None


def place_of(url: str) -> str:
    """Returns the address in a form in which equal ones are equal; the text itself if it is none.

    As the router compares them.
    """
    try:
        return engine_address(url).place
    except ValueError:
        return url


def _joined(facts: Facts) -> list[EngineFacts]:
    # Ranks of data parallelism are engines of their own, at one address.
    engines = [
        EngineFacts(one.description.http_address, session=one) for one in facts.lease.engines or ()
    ]
    at: dict[str, list[EngineFacts]] = {}
    for engine in engines:
        if engine.url:
            at.setdefault(place_of(engine.url), []).append(engine)
    for seen in facts.router.engines or ():
        place = place_of(seen.url)
        if place not in at:
            at[place] = [EngineFacts(seen.url)]
            engines += at[place]
        for engine in at[place]:
            engine.seen = seen
    for probe in facts.probes:
        for engine in at.get(place_of(probe.url), ()):
            engine.probe = probe
    return engines
