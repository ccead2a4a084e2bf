"""The settings of one router process, from flags and KVTURN_ROUTER_* variables.

Each flag has a variable of its name: `--grpc-port` and `KVTURN_ROUTER_GRPC_PORT`;
a flag wins over its variable. Flags that may be repeated take a comma-separated
list in their variable. A wrong value is refused by name, in one line.
"""

import argparse
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple, NoReturn

from kvturn.address import EngineAddress, addresses, engine_address, is_host
from kvturn.keys import parse_keys
from kvturn.lease_access import lease_access
from kvturn.otlp import PROTOCOLS, Destination, WrongSetting, destination_of
from kvturn.spelling import one_line, unknown_variable, with_flag_meant
from kvturn.tls import ClientTls, ServerTls, TlsFiles
from kvturn.watched import FileFault
from kvturn_router.choice.plan import PlanKind, Thresholds
from kvturn_router.engines.engine_key import read_engine_key
from kvturn_router.request.conversation import SESSION_HEADERS
from kvturn_router.telemetry.sampling import Sampler, sampler_of

_VARIABLE: Final = "KVTURN_ROUTER_"
_TRACE_URL: Final = re.compile(r"https?://[\x21-\x7e]{1,2000}")
_SECRET_HEADERS: Final = frozenset({"authorization", "proxy-authorization", "cookie"})
_HEADER_NAME: Final = re.compile(r"[a-z0-9!#$%&'*+.^_`|~-]+")
TRACE_ID: Final = "{trace_id}"
"""What stands for a turn's trace in --trace-url."""
_LOG_LEVELS: Final = ("debug", "info", "warning", "error")


class ConfigError(Exception):
    """A setting is wrong; the message names it and the fix, in one line."""

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """Settings of a router. Addresses are resolved and bounds checked."""

    host: str
    """Address that both fronts listen on."""
    port: int
    """HTTP port, 0 for any free one."""
    grpc_port: int | None
    """gRPC port, 0 for any free one, None for no gRPC front."""
    prefills: tuple[EngineAddress, ...]
    """Prefill engines, at least one unless engines can be named otherwise."""
    decodes: tuple[EngineAddress, ...]
    """Decode engines, at least one unless engines can be named otherwise."""
    workers: int
    """Processes that share the ports."""
    lease: tuple[str, ...]
    """HOST:PORT of each process of the lease service, empty for none."""
    stock_reuse: bool
    """Whether to reuse through stock engines' own handles; only without a lease service."""
    stock_ttl_s: float
    """How long a stock handle is used; must be below decode's decoder_kv_blocks_ttl."""
    stock_handles_max: int
    """Stock handles kept in memory."""
    question_deadline_ms: int
    """Longest wait of a turn for the lease service."""
    read_margin_ms: int
    """How late a KV read may be before the lease service is asked after it."""
    body_bytes_max: int
    """Longest request body."""
    bodies_bytes_max: int
    """Request bodies at once, of one process; more are refused with 503."""
    head_bytes_max: int
    """Longest request head."""
    turns_max: int
    """Turns served at once; more are refused with 429."""
    engine_turns_max: int | None
    """Requests that one engine is given at once, None for any number."""
    queue_places: int
    """Turns that may wait for an engine with room; more are refused with 429."""
    queue_s: float
    """Longest wait for an engine with room; then 429."""
    conversations_max: int
    """Conversations remembered."""
    thresholds: Thresholds
    """What of the choice how to serve a turn is fixed."""
    tenant_header: str | None
    """Lower-case name of the header that names the tenant, None to use API keys."""
    session_headers: tuple[str, ...]
    """Lower-case names of headers in which agents name their session, the most telling first."""
    engine_api_key_file: Path | None
    """Key that engines get instead of the client's, None to pass that on."""
    api_keys_file: Path | None
    """Keys of which a client must bring one, and the tenant of each; None lets engines judge."""
    admin_keys_file: Path | None
    """Keys of operators; None for no admin routes."""
    tls: TlsFiles | None
    """Certificate and key of both fronts, and the authorities of clients' certificates; None for
    no TLS."""
    engine_tls: TlsFiles
    """For engines at https:// addresses: the authorities of theirs, and a certificate of ours."""
    lease_tls: TlsFiles
    """The same for the lease service; without authorities there is no TLS."""
    lease_token_file: Path | None
    """The token that shows the lease service who calls."""
    metrics_without_key: bool
    """Whether /metrics is for anybody even where clients need a key; else it is for operators."""
    traces: Destination | None
    """Where spans go, None for nowhere."""
    trace_url: str
    """Where a turn's trace is shown, with TRACE_ID in its place, "" for nowhere."""
    sampler: Sampler
    """Which turns are traced."""
    connect_timeout_s: float
    """Longest wait for a connection to an engine."""
    prefill_timeout_s: float
    """Longest silence of prefill."""
    decode_timeout_s: float
    """Longest silence of decode, before its answer and within it."""
    health_interval_s: float
    """Time between health questions to an engine."""
    health_timeout_s: float
    """Longest wait for a health answer."""
    health_failures_max: int
    """Failures in a row after which an engine is out."""
    drain_notice_s: float
    """How long after SIGTERM all is still served while readiness says no."""
    grace_s: float
    """How long running turns may go on after that."""
    log_level: str
    """Least level that is logged."""

    @property
    def secrets_files(self) -> tuple[Path, ...]:
        """Files that nobody else should be able to read."""
        files = (
            self.api_keys_file,
            self.admin_keys_file,
            self.lease_token_file,
            self.engine_api_key_file,
            *(each.key for each in (self.tls, self.engine_tls, self.lease_tls) if each),
        )
        return tuple(file for file in files if file is not None)


class _Flag(NamedTuple):
    name: str
    read: Callable[[str], Any]
    default: Any
    metavar: str
    about: str


def _between(least: float, most: float, kind: type[int] | type[float]) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        try:
            number = kind(text)
        except ValueError:
            number = None
        # Written so that NaN, too, is out of range.
        if number is None or not least <= number <= most:
            word = "a whole number" if kind is int else "a number"
            raise ValueError(f"must be {word} from {least:g} to {most:g}")
        return number

    return read


def _whole(least: int, most: int) -> Callable[[str], Any]:
    return _between(least, most, int)


def _seconds(least: float, most: float = 86_400.0) -> Callable[[str], Any]:
    return _between(least, most, float)


def _text(text: str) -> str:
    if not text.strip():
        raise ValueError("must not be empty")
    return text.strip()


def _host(text: str) -> str:
    if not is_host(text.strip()):
        raise ValueError("must be an address or a name of this machine")
    return text.strip()


def _engines(text: str) -> tuple[EngineAddress, ...]:
    return tuple(engine_address(url.strip()) for url in text.split(",") if url.strip())


def _headers(text: str) -> tuple[str, ...]:
    names = tuple(name.strip().lower() for name in text.split(",") if name.strip())
    if not all(_HEADER_NAME.fullmatch(name) for name in names):
        raise ValueError("must be names of headers with commas between")
    secret = next((name for name in names if name in _SECRET_HEADERS), None)
    if secret is not None:
        raise ValueError(f"must not name {secret}, which holds a secret: it would be told on")
    return names


def _header(text: str) -> str:
    names = _headers(text)
    if len(names) != 1:
        raise ValueError("must be the name of one header")
    return names[0]


def _switch(text: str) -> bool:
    words = {
        "1": True,
        "true": True,
        "yes": True,
        "0": False,
        "false": False,
        "no": False,
        "": False,
    }
    if text.strip().lower() not in words:
        raise ValueError("must be 1 or 0")
    return words[text.strip().lower()]


def _one_of(*words: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text.lower() not in words:
            raise ValueError(f"must be one of {', '.join(words)}")
        return text.lower()

    return read


def _file(text: str) -> Path:
    return Path(_text(text))


def _endpoint(text: str) -> str:
    if not text.startswith(("http://", "https://")):
        raise ValueError("must be http://HOST:PORT")
    return text.rstrip("/")


def _trace_url(text: str) -> str:
    if not _TRACE_URL.fullmatch(text) or text.count(TRACE_ID) != 1:
        raise ValueError(
            f"must be http://HOST... or https://HOST... with {TRACE_ID} once in it, "
            f"as http://127.0.0.1:16686/trace/{TRACE_ID}"
        )
    return text


_ratio = _between(0.0, 1.0, float)
_PORT = _whole(0, 65_535)
_COUNT_MAX = 10_000_000

_AUTO: Final = "auto"
_PLANS: Final = (PlanKind.PULL.value, PlanKind.LOCAL.value, PlanKind.RECOMPUTE.value)

_FLAGS: Final = (
    _Flag("host", _host, "127.0.0.1", "ADDRESS", "address to listen on"),
    _Flag("port", _PORT, 8000, "N", "HTTP port, 0 for any free one"),
    _Flag("grpc-port", _PORT, 8001, "N", "gRPC port, 0 for any free one"),
    _Flag("workers", _whole(1, 256), 1, "N", "processes that share the ports"),
    _Flag("stock-ttl-s", _seconds(1), 400.0, "S", "use of a stock handle, below decode's own TTL"),
    _Flag("stock-handles-max", _whole(1, _COUNT_MAX), 10_000, "N", "stock handles in memory"),
    _Flag("question-deadline-ms", _whole(1, 10_000), 50, "MS", "wait for the lease service"),
    _Flag("read-margin-ms", _whole(0, 60_000), 500, "MS", "lateness of a read before it is judged"),
    _Flag("max-body-mb", _whole(1, 1024), 64, "MB", "longest request body"),
    _Flag("max-bodies-mb", _whole(1, 1 << 20), 1024, "MB", "request bodies at once; then 503"),
    _Flag("max-header-kb", _whole(1, 1024), 64, "KB", "longest request head"),
    _Flag("max-inflight", _whole(1, 1_000_000), 4096, "N", "turns at once; more get 429"),
    _Flag("max-inflight-per-engine", _whole(0, 1_000_000), 0, "N", "0 for any number"),
    _Flag("max-queue", _whole(0, 1_000_000), 1024, "N", "turns that wait for an engine; then 429"),
    _Flag("queue-timeout-s", _seconds(0.01), 30.0, "S", "wait for an engine; then 429"),
    _Flag("max-conversations", _whole(1, _COUNT_MAX), 100_000, "N", "conversations remembered"),
    _Flag("plan", _one_of(_AUTO, *_PLANS), _AUTO, "WAY", "auto, pull, local or recompute"),
    _Flag(
        "local-suffix-max-tokens",
        _whole(0, _COUNT_MAX),
        None,
        "N",
        "longest suffix that decode computes itself; else as costs say",
    ),
    _Flag(
        "pull-min-tokens",
        _whole(0, _COUNT_MAX),
        None,
        "N",
        "fewest tokens that are read, not computed; else as costs say",
    ),
    _Flag("holder-margin", _whole(0, 1_000_000), 8, "N", "requests that a holder may have more"),
    _Flag("tenant-header", _header, None, "NAME", "header that names the tenant"),
    _Flag("session-headers", _headers, SESSION_HEADERS, "NAME,...", "agents' session headers"),
    _Flag("engine-api-key-file", _file, None, "FILE", "API key that engines get"),
    _Flag("api-keys-file", _file, None, "FILE", "API keys of clients, a line each: KEY [TENANT]"),
    _Flag("admin-keys-file", _file, None, "FILE", "keys of operators, a line each: KEY [NAME]"),
    _Flag("tls-cert", _file, None, "FILE", "certificate of both fronts; turns TLS on"),
    _Flag("tls-key", _file, None, "FILE", "its key"),
    _Flag("tls-client-ca", _file, None, "FILE", "authorities of certificates clients must show"),
    _Flag("engine-ca", _file, None, "FILE", "authorities of https engines, else the system's"),
    _Flag("engine-cert", _file, None, "FILE", "our certificate for engines that ask for one"),
    _Flag("engine-key", _file, None, "FILE", "its key"),
    _Flag("lease-ca", _file, None, "FILE", "authorities of the lease service; turns TLS to it on"),
    _Flag("lease-cert", _file, None, "FILE", "our certificate for the lease service"),
    _Flag("lease-key", _file, None, "FILE", "its key"),
    _Flag("lease-token-file", _file, None, "FILE", "token that we show the lease service"),
    _Flag("trace-url", _trace_url, "", "URL", f"where /ui links to traces, with {TRACE_ID} in it"),
    _Flag("otlp-endpoint", _endpoint, None, "URL", "OTLP collector for traces"),
    _Flag(
        "otlp-protocol",
        _one_of(*PROTOCOLS),
        None,
        "NAME",
        "grpc or http/protobuf; else as OTEL_* variables say, or grpc",
    ),
    _Flag(
        "trace-ratio",
        _ratio,
        None,
        "R",
        "share of the turns traced that no client traces; else as OTEL_* variables say, or all",
    ),
    _Flag("connect-timeout-s", _seconds(0.01), 3.0, "S", "wait for a connection to an engine"),
    _Flag("prefill-timeout-s", _seconds(0.1), 300.0, "S", "silence of prefill"),
    _Flag("decode-timeout-s", _seconds(0.1), 600.0, "S", "silence of decode"),
    _Flag("health-interval-s", _seconds(0.05), 1.0, "S", "time between health questions"),
    _Flag("health-timeout-s", _seconds(0.05), 2.0, "S", "wait for a health answer"),
    _Flag("health-failures", _whole(1, 1000), 2, "N", "failures in a row until an engine is out"),
    _Flag("drain-notice-s", _seconds(0, 3600), 0.0, "S", "serving on after SIGTERM, not ready"),
    _Flag("grace-s", _seconds(0), 10.0, "S", "time for running turns after SIGTERM"),
    _Flag("log-level", _one_of(*_LOG_LEVELS), "info", "LEVEL", "least level that is logged"),
)
_REPEATED: Final = (
    _Flag(
        "lease",
        addresses,
        (),
        "HOST:PORT,...",
        "lease service; repeatable for its other processes; without it nothing is reused",
    ),
    _Flag("prefill", _engines, (), "URL", "prefill engine, http(s)://HOST:PORT; repeatable"),
    _Flag("decode", _engines, (), "URL", "decode engine, http(s)://HOST:PORT; repeatable"),
)
_SWITCHES: Final = (
    _Flag("no-grpc", _switch, False, "", "no gRPC front"),
    _Flag(
        "metrics-without-key", _switch, False, "", "let anybody read /metrics, also with API keys"
    ),
    _Flag("stock-reuse", _switch, False, "", "reuse through stock engines' own handles"),
)
_ALL: Final = (*_FLAGS, *_REPEATED, *_SWITCHES)


def _variable(flag: _Flag) -> str:
    return _VARIABLE + flag.name.replace("-", "_").upper()


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(with_flag_meant(message, self._option_string_actions))


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="kvturn router",
        description="OpenAI-compatible router for prefill/decode serving with KV reuse.",
        allow_abbrev=False,
        epilog=f"Each flag has a variable: --grpc-port is also {_VARIABLE}GRPC_PORT.",
    )
    for flag in _FLAGS:
        listed = flag.default in (None, "") or isinstance(flag.default, tuple)
        default = "" if listed else f" (default {flag.default})"
        names = ["--grace-s", "--grace"] if flag.name == "grace-s" else [f"--{flag.name}"]
        parser.add_argument(*names, metavar=flag.metavar, help=flag.about + default)
    for flag in _REPEATED:
        parser.add_argument(
            f"--{flag.name}", metavar=flag.metavar, action="append", help=flag.about
        )
    for flag in _SWITCHES:
        parser.add_argument(f"--{flag.name}", action="store_const", const="1", help=flag.about)
    return parser


def parse_config(argv: Sequence[str], environment: Mapping[str, str] = os.environ) -> RouterConfig:
    """Returns the settings. Raises ConfigError; `--help` prints and raises SystemExit."""
    given = vars(_parser().parse_args(list(argv)))
    _refuse_unknown_variables(environment)
    values: dict[str, Any] = {}
    for flag in _ALL:
        name = flag.name.replace("-", "_")
        values[name] = _value(flag, given[name], environment.get(_variable(flag)))
    traces, sampler = _traces(values, environment)
    _refuse_contradictions(values)
    _refuse_files(values)
    return RouterConfig(
        host=values["host"],
        port=values["port"],
        grpc_port=None if values["no_grpc"] else values["grpc_port"],
        prefills=values["prefill"],
        decodes=values["decode"],
        workers=values["workers"],
        lease=values["lease"],
        stock_reuse=values["stock_reuse"],
        stock_ttl_s=values["stock_ttl_s"],
        stock_handles_max=values["stock_handles_max"],
        question_deadline_ms=values["question_deadline_ms"],
        read_margin_ms=values["read_margin_ms"],
        body_bytes_max=values["max_body_mb"] << 20,
        bodies_bytes_max=values["max_bodies_mb"] << 20,
        head_bytes_max=values["max_header_kb"] << 10,
        turns_max=values["max_inflight"],
        engine_turns_max=values["max_inflight_per_engine"] or None,
        queue_places=values["max_queue"],
        queue_s=values["queue_timeout_s"],
        conversations_max=values["max_conversations"],
        thresholds=Thresholds(
            way=None if values["plan"] == _AUTO else PlanKind(values["plan"]),
            local_suffix_tokens_max=values["local_suffix_max_tokens"],
            pull_tokens_min=values["pull_min_tokens"],
            holder_margin=values["holder_margin"],
        ),
        tenant_header=values["tenant_header"],
        session_headers=values["session_headers"],
        engine_api_key_file=values["engine_api_key_file"],
        api_keys_file=values["api_keys_file"],
        admin_keys_file=values["admin_keys_file"],
        tls=_tls_files(values, "tls", "client_ca") if _listens_with_tls(values) else None,
        engine_tls=_tls_files(values, "engine", "ca"),
        lease_tls=_tls_files(values, "lease", "ca"),
        lease_token_file=values["lease_token_file"],
        metrics_without_key=values["metrics_without_key"],
        trace_url=values["trace_url"],
        traces=traces,
        sampler=sampler,
        connect_timeout_s=values["connect_timeout_s"],
        prefill_timeout_s=values["prefill_timeout_s"],
        decode_timeout_s=values["decode_timeout_s"],
        health_interval_s=values["health_interval_s"],
        health_timeout_s=values["health_timeout_s"],
        health_failures_max=values["health_failures"],
        drain_notice_s=values["drain_notice_s"],
        grace_s=values["grace_s"],
        log_level=values["log_level"],
    )


def _traces(
    values: Mapping[str, Any], environment: Mapping[str, str]
) -> tuple[Destination | None, Sampler]:
    """Returns where traces go, and which. Raises ConfigError."""
    try:
        traces = destination_of(values["otlp_endpoint"], values["otlp_protocol"], environment)
        return traces, sampler_of(values["trace_ratio"], environment)
    except WrongSetting as wrong:
        raise ConfigError(str(wrong)) from None


def _value(flag: _Flag, given: str | list[str] | None, variable: str | None) -> Any:
    text = ",".join(given) if isinstance(given, list) else given
    name = f"--{flag.name}"
    if text is None:
        if variable is None:
            return flag.default
        text, name = variable, _variable(flag)
    try:
        return flag.read(text)
    except ValueError as error:
        raise ConfigError(f"{name} {text!r} {error}") from None


def _refuse_unknown_variables(environment: Mapping[str, str]) -> None:
    flags = {_variable(flag): f"--{flag.name}" for flag in _ALL}
    problem = unknown_variable(_VARIABLE, flags, environment)
    if problem:
        raise ConfigError(problem)


def _tls_files(values: Mapping[str, Any], side: str, ca: str) -> TlsFiles:
    names = (f"{side}_cert", f"{side}_key", f"{side}_{ca}")
    cert, key, authorities = (values[name] for name in names)
    cert_flag, key_flag, ca_flag = ("--" + name.replace("_", "-") for name in names)
    return TlsFiles(cert, key, authorities, (cert_flag, key_flag, ca_flag))


def _listens_with_tls(values: Mapping[str, Any]) -> bool:
    return any(values[name] for name in ("tls_cert", "tls_key", "tls_client_ca"))


def _refuse_files(values: Mapping[str, Any]) -> None:
    """Reads what will be read again when it changes, so that it is refused at start."""
    if values["api_keys_file"] and values["tenant_header"]:
        raise ConfigError(
            "--tenant-header and --api-keys-file exclude each other: the key names the tenant"
        )
    try:
        for name in ("api_keys_file", "admin_keys_file"):
            if values[name]:
                parse_keys("--" + name.replace("_", "-"), values[name])
        if values["engine_api_key_file"]:
            read_engine_key("--engine-api-key-file", values["engine_api_key_file"])
        if _listens_with_tls(values):
            ServerTls(_tls_files(values, "tls", "client_ca"))
        ClientTls(_tls_files(values, "engine", "ca"))
        lease_access(
            _tls_files(values, "lease", "ca"), values["lease_token_file"], "--lease-token-file"
        )
    except FileFault as fault:
        raise ConfigError(str(fault)) from None


_NEEDED: Final = {
    "stock-ttl-s": "stock-reuse",
    "stock-handles-max": "stock-reuse",
    "lease-ca": "lease",
    "lease-cert": "lease",
    "lease-key": "lease",
    "lease-token-file": "lease",
}
"""Flags that say something of what another one turns on."""


def _refuse_contradictions(values: Mapping[str, Any]) -> None:
    for flag in _FLAGS:
        needed = _NEEDED.get(flag.name)
        is_said = values[flag.name.replace("-", "_")] != flag.default
        if needed and is_said and not values[needed.replace("-", "_")]:
            raise ConfigError(
                f"--{flag.name} does nothing without --{needed}: add that, or leave it out"
            )
    if values["max_bodies_mb"] < values["max_body_mb"]:
        raise ConfigError("--max-bodies-mb must be at least --max-body-mb: one body must fit")
    for name in ("local-suffix-max-tokens", "pull-min-tokens"):
        if values["plan"] != _AUTO and values[name.replace("-", "_")] is not None:
            raise ConfigError(f"--plan {values['plan']} fixes the way: leave out --{name}")
    for role in ("prefill", "decode"):
        engines = values[role]
        if not engines and not values["lease"] and not values["admin_keys_file"]:
            raise ConfigError(
                f"--{role} is missing: name at least one {role} engine, or the --lease service "
                "at which engines announce themselves"
            )
        places = [engine.place for engine in engines]
        twice = next((one.url for one in engines if places.count(one.place) > 1), None)
        if twice is not None:
            raise ConfigError(f"--{role} {twice} is given twice: name each engine once")
    if values["stock_reuse"] and values["lease"]:
        raise ConfigError(
            "--stock-reuse and --lease exclude each other: a lease service already says "
            "who holds what; leave one out"
        )
    if values["stock_reuse"] and values["workers"] > 1:
        raise ConfigError(
            "--stock-reuse needs --workers 1: stock handles live in one process's memory, and each "
            "may be used only once"
        )
    if not values["no_grpc"] and values["port"] == values["grpc_port"] != 0:
        raise ConfigError("--port and --grpc-port must differ")
