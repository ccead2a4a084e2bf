"""All settings of the lease service, checked at start.

`LessorConfig` holds the constants of the lease rules and the limits of the core; `LeaseConfig`
adds what the process needs around it. Every flag has a variable of the same name:
`--session-ttl` is also `KVTURN_LEASE_SESSION_TTL`; the flag wins.
"""

from __future__ import annotations

import argparse
import math
import re
from dataclasses import dataclass, field
from enum import StrEnum
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from kvturn.address import is_address, is_host, is_unspecified
from kvturn.keys import parse_keys
from kvturn.otlp import Destination, WrongSetting, destination_of
from kvturn.spelling import one_line, unknown_variable, with_flag_meant
from kvturn.tls import ServerTls, TlsFiles, client_tls
from kvturn.watched import FileFault, read_file
from kvturn_lease.callers import Role
from kvturn_lease.etcd.config import EtcdConfig
from kvturn_lease.routers import RouterLimits
from kvturn_lease.usage import Limits

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_SECOND_NS = 1_000_000_000
_MILLISECOND_NS = 1_000_000

CLOCK_DRIFT = Fraction(1, 100)
"""rho: bound on the drift of any machine's clock."""

SESSION_TTL_MAX_NS = 3600 * _SECOND_NS
LONGEST_READ_MAX_NS = 600 * _SECOND_NS
_SPAN_MAX_NS = 7 * 24 * 3600 * _SECOND_NS
_COUNT_MAX = 100_000_000
_LEADERSHIP_MIN_NS = 2 * _SECOND_NS  # etcd grants no less
_LEADERSHIP_MAX_NS = 60 * _SECOND_NS
_SECRET_BYTES_MIN = 16
_MEMORY = "memory"
_ETCD_SCHEME = "etcd://"
_PASSWORD_VARIABLE = "KVTURN_LEASE_ETCD_PASSWORD"
_VARIABLE = "KVTURN_LEASE_"
_TLS = ("cert", "key", "ca")
_LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
_PASSWORD_PLACE = f"comes by --etcd-password-file or {_PASSWORD_VARIABLE}"


class ConfigError(Exception):
    """A setting that is refused; the message names it and the fix, in one line."""

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


def stretched_ns(span_ns: int) -> int:
    """Returns the span times K = (1 + rho) / (1 - rho), rounded up.

    Whoever waits K times a span by its own clock has waited at least the span by any other's.
    """
    return math.ceil(span_ns * (1 + CLOCK_DRIFT) / (1 - CLOCK_DRIFT))


class Policy(StrEnum):
    """What ends the retention of a conversation that nobody ended and nobody read."""

    IDLE = "idle"
    """No sign of life for the idle time, or past what the client said."""
    PRESSURE = "pressure"
    """Only that its engine needs memory, first those whose client is not back as it said; or the
    longest hold."""
    FIXED_TTL = "fixed-ttl"
    """A fixed time from its grant, whatever its conversation does; for comparison."""


def shrunk_ns(span_ns: int) -> int:
    """Returns the span divided by K, rounded down.

    Whoever has waited that long by its own clock has waited at most the span by any other's.
    """
    return math.floor(span_ns * (1 - CLOCK_DRIFT) / (1 + CLOCK_DRIFT))


@dataclass(frozen=True, slots=True, kw_only=True)
class LessorConfig:
    """Constants of the lease rules, policies and limits of the core."""

    session_ttl_ns: int = 5 * _SECOND_NS
    """How long a session is trusted after the last message that its engine echoed."""
    heartbeat_ns: int = 1 * _SECOND_NS
    """How often engines heartbeat. At most a quarter of the session TTL."""
    longest_read_ns: int = 3 * _SECOND_NS
    """R: a read counts only if it completed this soon after it was asked for."""
    question_deadline_ns: int = 50 * _MILLISECOND_NS
    """Q: how long readers wait for an answer; only checked against R."""
    read_margin_ns: int = 100 * _MILLISECOND_NS
    """Least time that Q must leave of R for the handshake and the read itself."""
    idle_ns: int = 60 * _SECOND_NS
    """A conversation without sign of life for this long gives up its retention."""
    max_hold_ns: int = 480 * _SECOND_NS
    """Longest hold of one retention, and longest absence a client may declare."""
    policy: Policy = Policy.IDLE
    """What ends a retention that nobody ended and nobody read."""
    fixed_ttl_ns: int = 480 * _SECOND_NS
    """Hold of each retention under the policy fixed-ttl. At most the longest hold."""
    leases_max: int = 200_000
    """Leases in all, those of engines that are away included."""
    leases_per_engine_max: int = 20_000
    """Leases of one engine, those that wait for their release included."""
    blocks_per_engine_max: int = 4_000_000
    """Blocks under leases of one engine."""
    tokens_per_engine_max: int = 100_000_000
    """Tokens under leases of one engine."""
    leases_per_tenant_max: int = 200_000
    """Leases of one tenant that have not ended; a conversation has one."""
    blocks_per_tenant_max: int = 100_000_000
    """Blocks under leases of one tenant that have not ended."""
    tokens_per_tenant_max: int = 1_000_000_000
    """Tokens under leases of one tenant that have not ended."""
    blocks_per_lease_max: int = 262_144
    """Blocks of one retention, over all KV cache groups."""
    tokens_per_lease_max: int = 16_777_216
    """Tokens of one retention."""
    engines_max: int = 2_000
    """Engines with a session."""
    engines_away_max: int = 8_000
    """Engines without a session that are still fenced by what is remembered of them."""
    conversations_max: int = 200_000
    """Conversations without a lease that are remembered; the longest unused go first."""
    expiries_per_tick_max: int = 1_000
    """Deadlines that one expire() works off, so that no tick holds up a question for long."""

    @property
    def reader_bound_ns(self) -> int:
        """K*R: after this long from its grant no reader remains."""
        return stretched_ns(self.longest_read_ns)

    @property
    def inherit_bound_ns(self) -> int:
        """K*(TTL + R): after this long no reader of an earlier term remains."""
        return stretched_ns(self.session_ttl_ns + self.longest_read_ns)

    @property
    def engine_limits(self) -> Limits:
        """Most that one engine may have under leases."""
        return Limits(
            self.leases_per_engine_max, self.blocks_per_engine_max, self.tokens_per_engine_max
        )

    @property
    def tenant_limits(self) -> Limits:
        """Most that one tenant may have under leases that have not ended."""
        return Limits(
            self.leases_per_tenant_max, self.blocks_per_tenant_max, self.tokens_per_tenant_max
        )

    @property
    def hold_ns(self) -> int:
        """How long a retention is held at most under the policy."""
        return self.fixed_ttl_ns if self.policy == Policy.FIXED_TTL else self.max_hold_ns

    @property
    def away_memory_ns(self) -> int:
        """How long the leases of an engine that went away are remembered."""
        return self.max_hold_ns + self.inherit_bound_ns

    def __post_init__(self) -> None:
        """Raises ConfigError unless the order that the lease rules need holds."""
        _check(self.heartbeat_ns > 0, f"{_both('heartbeat')} must be above 0")
        _check(
            self.session_ttl_ns >= 4 * self.heartbeat_ns,
            f"{_both('session-ttl')} must be at least 4 times --heartbeat; raise --session-ttl "
            "or lower --heartbeat",
        )
        _check(
            self.question_deadline_ns + self.read_margin_ns < self.longest_read_ns,
            f"{_both('longest-read')} must exceed --question-deadline by more than "
            f"{self.read_margin_ns / _SECOND_NS:g} s; raise --longest-read "
            "or lower --question-deadline",
        )
        _check(
            self.session_ttl_ns <= SESSION_TTL_MAX_NS,
            f"{_both('session-ttl')} must be at most {SESSION_TTL_MAX_NS // _SECOND_NS} seconds",
        )
        _check(
            self.longest_read_ns <= LONGEST_READ_MAX_NS,
            f"{_both('longest-read')} must be at most {LONGEST_READ_MAX_NS // _SECOND_NS} seconds",
        )
        _check(self.idle_ns > 0, f"{_both('idle')} must be above 0")
        _check(
            0 < self.fixed_ttl_ns <= self.max_hold_ns or self.policy != Policy.FIXED_TTL,
            f"{_both('fixed-ttl')} must be at most --max-hold; "
            "lower --fixed-ttl or raise --max-hold",
        )
        _check(
            self.max_hold_ns >= self.idle_ns,
            f"{_both('max-hold')} must be at least --idle; raise --max-hold or lower --idle",
        )
        _check(
            self.leases_per_engine_max <= self.leases_max,
            f"{_both('leases-per-engine')} must be at most --leases; "
            "raise --leases or lower --leases-per-engine",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseConfig:
    """Settings of the lease service's process."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = 7600
    """Port to listen on; 0 takes a free one."""
    lessor: LessorConfig = field(default_factory=LessorConfig)
    """The core's."""
    queued_messages_max: int = 32_768
    """What may wait for one engine or router to read it before its stream is ended: messages for
    an engine; turns and engines for a router."""
    routers: RouterLimits = field(default_factory=RouterLimits)
    """Limits of the routers' sessions."""
    questions_max: int = 10_000
    """Calls in progress besides the session streams of engines and routers."""
    message_bytes_max: int = 256 * 1024 * 1024
    """Largest message taken: a Register with a full inventory."""
    shutdown_grace_ns: int = 500 * _MILLISECOND_NS
    """How long calls in progress may take to end after a signal to stop."""
    etcd: EtcdConfig | None = None
    """Where records are kept and the leader is elected; None: in memory, and it leads alone."""
    secret: bytes = field(default=b"", repr=False)
    """The cluster secret that keys the names of conversations in etcd; empty: one of its own."""
    leadership_ns: int = 3 * _SECOND_NS
    """How long nobody leads after a leader died: the TTL of its etcd lease, whole seconds."""
    advertise: str = ""
    """HOST:PORT where clients reach this process; empty: host and port."""
    tls: TlsFiles | None = None
    """The listener's certificate and key, and the authorities of its clients' certificates; None
    listens without TLS."""
    token_files: Mapping[Role, Path] = field(default_factory=dict)
    """By role, the file of the tokens that give it."""
    metrics_host: str = ""
    """Address of the metrics' listener; empty: the host."""
    metrics_port: int | None = None
    """Its port, 0 for a free one; None for no such listener."""
    traces: Destination | None = None
    """Where traces go; None for nowhere."""
    log_level: str = "INFO"
    """Least level that is logged."""

    def __post_init__(self) -> None:
        """Raises ConfigError for settings that contradict each other."""
        for name, host in (("host", self.host), ("metrics-host", self.metrics_host or self.host)):
            _check(is_host(host), f"{_both(name)} must be an address or a name of this machine")
        _check(
            self.queued_messages_max > self.lessor.leases_per_engine_max,
            f"{_both('queued-messages')} must exceed --leases-per-engine, all of which may be "
            "released at once; raise --queued-messages or lower --leases-per-engine",
        )
        _check(
            self.leadership_ns % _SECOND_NS == 0
            and _LEADERSHIP_MIN_NS <= self.leadership_ns <= _LEADERSHIP_MAX_NS,
            f"{_both('leadership')} must be {_LEADERSHIP_MIN_NS // _SECOND_NS} to "
            f"{_LEADERSHIP_MAX_NS // _SECOND_NS} whole seconds",
        )
        _check(
            not self.token_files
            or (self.tls is not None and self.tls.ca is not None)
            or {Role.ENGINE, Role.ROUTER} <= self.token_files.keys(),
            "--engine-tokens-file and --router-tokens-file go together: without one nobody is an "
            "engine, without the other nobody is a router",
        )
        _check(
            self.metrics_host == "" or self.metrics_port is not None,
            "--metrics-host needs --metrics-port",
        )
        _check(
            self.metrics_port in (None, 0)
            or self.metrics_port != self.port
            or self.metrics_host not in ("", self.host),
            "--metrics-port must differ from --port",
        )
        _check(
            self.etcd is None or self.advertise != "" or not is_unspecified(self.host),
            f"{_both('advertise')} must be given, HOST:PORT, because clients cannot reach "
            f"--host {self.host}",
        )

    @property
    def trusts_all(self) -> bool:
        """Whether whoever reaches the listener may act as an engine, a router or an operator."""
        return not self.token_files and (self.tls is None or self.tls.ca is None)

    @property
    def records_ttl_s(self) -> int:
        """How long etcd keeps what it holds of an engine after the engine's last heartbeats.

        Long enough for the next leader to find the records of an engine that lives.
        """
        return math.ceil((3 * self.lessor.session_ttl_ns + self.leadership_ns) / _SECOND_NS)


def parse_config(argv: Sequence[str], environ: Mapping[str, str]) -> LeaseConfig:
    """Reads flags and KVTURN_LEASE_* variables.

    Raises ConfigError naming the wrong setting and the fix; SystemExit(0) after --help.
    """
    defaults = LeaseConfig()
    parser = _Parser("kvturn lease", environ)
    parser.text("host", "ADDRESS", defaults.host, "address to listen on")
    parser.count("port", defaults.port, "port to listen on, 0 for a free one", 0, 65_535)
    _add_lessor_settings(parser)
    parser.count("queued-messages", defaults.queued_messages_max, "messages queued for one engine")
    parser.count("questions", defaults.questions_max, "calls in progress")
    parser.text("store", "STORE", _MEMORY, "memory, or etcd://HOST:PORT,HOST:PORT of one cluster")
    parser.text(
        "etcd-ca", "FILE", "", "file of the certificates to check etcd's against; turns TLS on"
    )
    parser.text("etcd-cert", "FILE", "", "file of our certificate for etcd")
    parser.text("etcd-key", "FILE", "", "file of its key")
    parser.text("etcd-user", "NAME", "", "user to log in to etcd as")
    parser.text(
        "etcd-password-file", "FILE", "", f"file of the password, instead of {_PASSWORD_VARIABLE}"
    )
    parser.text("etcd-prefix", "PREFIX", "kvturn/", "what our keys in etcd begin with")
    parser.text(
        "secret-file", "FILE", "", "file of the cluster secret, the same for all lease services"
    )
    parser.seconds("leadership", defaults.leadership_ns, "TTL of a leader in etcd")
    parser.text("advertise", "HOST:PORT", "", "HOST:PORT where clients reach this process")
    parser.text("tls-cert", "FILE", "", "file of the listener's certificate; turns TLS on")
    parser.text("tls-key", "FILE", "", "file of its key")
    parser.text(
        "tls-client-ca", "FILE", "", "file of the authorities whose certificates callers must show"
    )
    for role in Role:
        parser.text(f"{role}-tokens-file", "FILE", "", f"file of the tokens of {role}s, one a line")
    parser.text(
        "metrics-host", "ADDRESS", "", "address of /metrics and /health over HTTP, else --host"
    )
    parser.optional_port("metrics-port", "their port, 0 for a free one; without it there are none")
    parser.text("otlp-endpoint", "URL", "", "OTLP collector for traces, http(s)://HOST:PORT")
    parser.text(
        "otlp-protocol", "NAME", "", "grpc or http/protobuf; else as OTEL_* variables say, or grpc"
    )
    parser.text("log-level", "LEVEL", defaults.log_level, "DEBUG, INFO, WARNING or ERROR")
    values = parser.parse(argv)
    log_level = str(values["log-level"]).upper()
    _check(log_level in _LOG_LEVELS, f"{_both('log-level')} must be DEBUG, INFO, WARNING or ERROR")
    return LeaseConfig(
        host=str(values["host"]),
        port=int(values["port"]),
        lessor=_lessor_config(values),
        queued_messages_max=int(values["queued-messages"]),
        questions_max=int(values["questions"]),
        etcd=_etcd_config(values, environ),
        secret=_secret(str(values["secret-file"])),
        leadership_ns=int(values["leadership"]),
        advertise=_advertised(str(values["advertise"])),
        tls=_tls(values),
        token_files=_token_files(values),
        metrics_host=str(values["metrics-host"]),
        metrics_port=None if values["metrics-port"] == "" else int(values["metrics-port"]),
        traces=_traces(values, environ),
        log_level=log_level,
    )


def _add_lessor_settings(parser: _Parser) -> None:
    core = LessorConfig()
    parser.seconds("session-ttl", core.session_ttl_ns, "trust in an engine after its last echo")
    parser.seconds("heartbeat", core.heartbeat_ns, "interval of the engines' heartbeats")
    parser.seconds("longest-read", core.longest_read_ns, "longest read of a retention")
    parser.seconds("question-deadline", core.question_deadline_ns, "how long readers wait for us")
    parser.seconds("idle", core.idle_ns, "silence after which a conversation is idle")
    parser.seconds("max-hold", core.max_hold_ns, "longest hold of one retention")
    parser.text("policy", "NAME", core.policy, "what ends retentions: idle, pressure or fixed-ttl")
    parser.seconds("fixed-ttl", core.fixed_ttl_ns, "hold under --policy fixed-ttl")
    parser.count("leases", core.leases_max, "leases in all")
    parser.count("leases-per-engine", core.leases_per_engine_max, "leases of one engine")
    for holder, limits in (("engine", core.engine_limits), ("tenant", core.tenant_limits)):
        if holder == "tenant":
            parser.count("leases-per-tenant", limits.leases, "leases of one tenant")
        parser.count(f"blocks-per-{holder}", limits.blocks, f"blocks leased of one {holder}")
        parser.count(
            f"tokens-per-{holder}", limits.tokens, f"tokens leased of one {holder}", most=10**12
        )
    parser.count("blocks-per-lease", core.blocks_per_lease_max, "blocks of one lease")
    parser.count("tokens-per-lease", core.tokens_per_lease_max, "tokens of one lease")
    parser.count("engines", core.engines_max, "engines with a session")
    parser.count("conversations", core.conversations_max, "conversations remembered without lease")


def _lessor_config(values: Mapping[str, int | str]) -> LessorConfig:
    policy = str(values["policy"])
    _check(policy in list(Policy), f"{_both('policy')} must be idle, pressure or fixed-ttl")
    _check(
        policy == Policy.FIXED_TTL or int(values["fixed-ttl"]) == LessorConfig().fixed_ttl_ns,
        f"{_both('fixed-ttl')} does nothing under --policy {policy}; leave it out, or give "
        "--policy fixed-ttl",
    )
    engines_max = int(values["engines"])
    return LessorConfig(
        session_ttl_ns=int(values["session-ttl"]),
        heartbeat_ns=int(values["heartbeat"]),
        longest_read_ns=int(values["longest-read"]),
        question_deadline_ns=int(values["question-deadline"]),
        idle_ns=int(values["idle"]),
        max_hold_ns=int(values["max-hold"]),
        policy=Policy(policy),
        fixed_ttl_ns=int(values["fixed-ttl"]),
        leases_max=int(values["leases"]),
        leases_per_engine_max=int(values["leases-per-engine"]),
        blocks_per_engine_max=int(values["blocks-per-engine"]),
        tokens_per_engine_max=int(values["tokens-per-engine"]),
        leases_per_tenant_max=int(values["leases-per-tenant"]),
        blocks_per_tenant_max=int(values["blocks-per-tenant"]),
        tokens_per_tenant_max=int(values["tokens-per-tenant"]),
        blocks_per_lease_max=int(values["blocks-per-lease"]),
        tokens_per_lease_max=int(values["tokens-per-lease"]),
        engines_max=engines_max,
        engines_away_max=4 * engines_max,
        conversations_max=int(values["conversations"]),
    )


def _etcd_config(values: Mapping[str, int | str], environ: Mapping[str, str]) -> EtcdConfig | None:
    """Returns how to reach etcd, None for the memory store. Raises ConfigError."""
    store = str(values["store"])
    if store == _MEMORY:
        for name in ("etcd-ca", "etcd-cert", "etcd-key", "etcd-user", "etcd-password-file"):
            _check(values[name] == "", f"--{name} needs --store etcd://HOST:PORT")
        return None
    shape = f"{_both('store')} must be memory or etcd://HOST:PORT,HOST:PORT"
    _check(store.startswith(_ETCD_SCHEME), shape)
    endpoints = tuple(store.removeprefix(_ETCD_SCHEME).split(","))
    _check("@" not in store, f"{shape}; the user comes by --etcd-user")
    _check(all(map(is_address, endpoints)), shape)
    files = etcd_files(
        *(Path(file) if (file := str(values[f"etcd-{name}"])) else None for name in _TLS)
    )
    user = str(values["etcd-user"])
    _check(":" not in user, f"--etcd-user must be a name alone; the password {_PASSWORD_PLACE}")
    password = environ.get(_PASSWORD_VARIABLE, "")
    if values["etcd-password-file"]:
        secret = _read("etcd-password-file", str(values["etcd-password-file"]))
        password = secret.decode(errors="replace").rstrip("\r\n")
    _check(user == "" or password != "", f"--etcd-user needs a password, which {_PASSWORD_PLACE}")
    prefix = str(values["etcd-prefix"])
    _check(prefix != "", f"{_both('etcd-prefix')} must not be empty, e.g. kvturn/")
    return EtcdConfig(
        endpoints=endpoints,
        ca_file=files.ca,
        cert_file=files.cert,
        key_file=files.key,
        user=user,
        password=password,
        prefix=prefix,
    )


def etcd_files(cert: Path | None, key: Path | None, ca: Path | None) -> TlsFiles:
    """Returns the files of TLS to etcd, once they fit together. Raises ConfigError."""
    files = TlsFiles(cert, key, ca, ("--etcd-cert", "--etcd-key", "--etcd-ca"))
    try:
        client_tls(files, "etcd")
    except FileFault as fault:
        raise ConfigError(str(fault)) from None
    return files


def _traces(values: Mapping[str, int | str], environ: Mapping[str, str]) -> Destination | None:
    """Returns where traces go, None for nowhere. Raises ConfigError."""
    endpoint, protocol = str(values["otlp-endpoint"]), str(values["otlp-protocol"])
    names = _both("otlp-endpoint"), _both("otlp-protocol")
    try:
        return destination_of(endpoint, protocol, environ, names=names)
    except WrongSetting as wrong:
        raise ConfigError(str(wrong)) from None


def _tls(values: Mapping[str, int | str]) -> TlsFiles | None:
    """Returns the listener's files, None for no TLS. Raises ConfigError."""
    names = ("tls-cert", "tls-key", "tls-client-ca")
    cert, key, ca = (Path(file) if (file := str(values[name])) else None for name in names)
    settings = ("--tls-cert", "--tls-key", "--tls-client-ca")
    files = TlsFiles(cert, key, ca, settings)
    try:
        return ServerTls(files).files if files.paths else None
    except FileFault as fault:
        raise ConfigError(str(fault)) from None


def _token_files(values: Mapping[str, int | str]) -> dict[Role, Path]:
    """Returns the files of tokens by role. Raises ConfigError."""
    files = {}
    for role in Role:
        setting = f"{role}-tokens-file"
        if file := str(values[setting]):
            files[role] = Path(file)
            try:
                parse_keys(f"--{setting}", files[role])
            except FileFault as fault:
                raise ConfigError(str(fault)) from None
    return files


def _secret(file: str) -> bytes:
    if not file:
        return b""
    secret = _read("secret-file", file).strip()
    _check(
        len(secret) >= _SECRET_BYTES_MIN,
        f"--secret-file {file}: must hold at least {_SECRET_BYTES_MIN} bytes, "
        "e.g. of openssl rand -hex 32",
    )
    return secret


def _advertised(address: str) -> str:
    _check(address == "" or is_address(address), f"{_both('advertise')} must be HOST:PORT")
    return address


def _read(name: str, file: str) -> bytes:
    try:
        return read_file(f"--{name}", Path(file))
    except FileFault as fault:
        raise ConfigError(str(fault)) from None


def _check(holds: bool, problem: str) -> None:
    if not holds:
        raise ConfigError(problem)


class _ArgumentParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        said = with_flag_meant(message, self._option_string_actions)
        raise ConfigError(f"{said.removeprefix('argument ')} (see --help)")


class _Parser:
    """Settings that come as a flag, as a variable, or by default, in that order."""

    def __init__(self, prog: str, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self._argparse = _ArgumentParser(
            prog=prog, description="Runs the kvturn lease service.", allow_abbrev=False
        )
        self._names: list[str] = []

    def text(self, name: str, metavar: str, default: str, meaning: str) -> None:
        """Adds a setting taken as it is."""
        shown = f" (default {default})" if default else ""
        self._add(name, metavar, default, str, f"{meaning}{shown}")

    def count(
        self, name: str, default: int, meaning: str, least: int = 1, most: int = _COUNT_MAX
    ) -> None:
        """Adds a whole number."""

        def parse(text: str) -> int:
            try:
                value = int(text)
            except ValueError:
                raise ConfigError(f"{_both(name)} must be a whole number, e.g. {default}") from None
            _check(least <= value <= most, f"{_both(name)} must be {least} to {most}")
            return value

        self._add(name, "N", default, parse, f"{meaning} (default {default})")

    def optional_port(self, name: str, meaning: str) -> None:
        """Adds a port that may be left out; its value is then empty."""

        def parse(text: str) -> int | str:
            if text == "":
                return ""
            is_port = re.fullmatch(r"[0-9]{1,5}", text) is not None and int(text) <= 65_535
            _check(is_port, f"{_both(name)} must be 0 to 65535")
            return int(text)

        self._add(name, "N", "", parse, meaning)

    def seconds(self, name: str, default_ns: int, meaning: str) -> None:
        """Adds a span given in seconds and kept in nanoseconds."""
        default_s = default_ns / _SECOND_NS

        def parse(text: str) -> int:
            try:
                value_ns = round(float(text) * _SECOND_NS)
            except (ValueError, OverflowError):
                raise ConfigError(f"{_both(name)} must be seconds, e.g. {default_s:g}") from None
            _check(
                _MILLISECOND_NS <= value_ns <= _SPAN_MAX_NS,
                f"{_both(name)} must be 0.001 to {_SPAN_MAX_NS // _SECOND_NS} seconds",
            )
            return value_ns

        self._add(name, "SECONDS", default_ns, parse, f"{meaning} (default {default_s:g})")

    def parse(self, argv: Sequence[str]) -> dict[str, int | str]:
        """Returns the value of every setting by name. Raises ConfigError."""
        parsed = vars(self._argparse.parse_args(argv))
        self._refuse_unknown_variables()
        return {name: parsed[name.replace("-", "_")] for name in self._names}

    def _refuse_unknown_variables(self) -> None:
        flags = {_variable(name): f"--{name}" for name in self._names}
        flags[_PASSWORD_VARIABLE] = "or --etcd-password-file"
        problem = unknown_variable(_VARIABLE, flags, self._environ)
        _check(problem == "", problem)

    def _add(self, name: str, metavar: str, default: object, parse: object, meaning: str) -> None:
        self._names.append(name)
        variable = _variable(name)
        if variable in self._environ:
            default = self._environ[variable]  # argparse parses defaults that are text
        self._argparse.add_argument(
            f"--{name}",
            default=default,
            type=parse,  # type: ignore[arg-type]
            metavar=metavar,
            help=meaning,
        )


def _both(name: str) -> str:
    """Returns how a setting is given: as a flag or as a variable."""
    return f"--{name} ({_variable(name)})"


def _variable(name: str) -> str:
    return _VARIABLE + name.upper().replace("-", "_")
