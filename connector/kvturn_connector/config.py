"""What the connector is told: `kv_connector_extra_config`, checked once at start."""

from __future__ import annotations

import difflib
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvturn.address import addresses, engine_address, is_unspecified
from kvturn.lease_access import LeaseAccess, lease_access
from kvturn.otlp import Destination, WrongSetting, destination_of
from kvturn.tls import TlsFiles
from kvturn.watched import FileFault, read_file, warn_of_open_secrets

if TYPE_CHECKING:
    from collections.abc import Mapping

NS_PER_MS = 1_000_000
NS_PER_S = 1_000_000_000

NAME_BYTES_MAX = 128

SWITCHES = ("kvturn_lease_endpoint", "bidirectional_kv_xfer")
"""Without both the connector does what the stock one does."""

_PREFIX = "kvturn_"
_OTLP_KEYS = ("kvturn_otlp_endpoint", "kvturn_otlp_protocol")
_ACCESS_KEYS = (
    "kvturn_lease_cert",
    "kvturn_lease_key",
    "kvturn_lease_ca",
    "kvturn_lease_token_file",
)
_OWN_KEYS = (
    "kvturn_lease_endpoint",
    "kvturn_engine_name",
    "kvturn_http_address",
    "kvturn_question_deadline_ms",
    "kvturn_retentions_max",
    "kvturn_secret_file",
    *_OTLP_KEYS,
    "kvturn_nixl_progress_delay_us",
    *_ACCESS_KEYS,
)
_UPSTREAM_KEYS = ("bidirectional_kv_xfer", "kv_recompute_threshold", "decoder_kv_blocks_ttl")
_ALIKE = 0.85
"""How alike a key must be to one of these to be taken for it, misspelt; 1: equal."""


class ConfigError(ValueError):
    """A key of `kv_connector_extra_config` has a wrong value; the message names key and fix."""


@dataclass(frozen=True)
class ConnectorConfig:
    """Settings of one engine's connector. Keys keep upstream's names where upstream has them."""

    lease_endpoints: tuple[str, ...]
    """`kvturn_lease_endpoint`: HOST:PORT of the lease service, or of each of its processes with
    commas between, at most 16. Empty: behave as the stock one."""
    engine_name: str
    """`kvturn_engine_name`: the engine's stable name across restarts, at most 128 bytes. Default:
    its NIXL engine id, which is new at each start."""
    http_address: str
    """`kvturn_http_address`: base URL of this engine's HTTP API as routers reach it. May be empty:
    then only routers that learn the engine's address elsewhere prefer it for its conversations."""
    bidirectional: bool
    """`bidirectional_kv_xfer` (default false): without it nothing is retained and nothing read."""
    recompute_threshold_tokens: int
    """`kv_recompute_threshold` (default 64): below this many readable tokens prefill computes."""
    max_hold_ns: int
    """`decoder_kv_blocks_ttl` (seconds, default 480): decode gives a retention up after this."""
    question_deadline_ns: int
    """`kvturn_question_deadline_ms` (default 50): how long prefill waits for BeginRead."""
    retentions_max: int
    """`kvturn_retentions_max` (default 4096): retentions an engine holds at a time."""
    secret: bytes
    """Content of the file `kvturn_secret_file`: keys the digests; the same on all engines of a
    cluster, 16 to 64 bytes. Default: empty, digests are not keyed."""
    traces: Destination | None
    """`kvturn_otlp_endpoint`, `kvturn_otlp_protocol` ("grpc" or "http/protobuf"): OTLP collector
    for the connector's spans. Default: as OpenTelemetry's variables say, which vLLM sets for its
    processes from --otlp-traces-endpoint. None: no spans."""
    nixl_progress_delay_us: int
    """`kvturn_nixl_progress_delay_us` (default 0): how long NIXL's progress thread sleeps between
    looks when no event wakes it. At 0, NIXL's own setting, the thread of every worker spins on a
    core for as long as the engine lives; above 0, events still wake it at once. Set it (1000)
    where engines share cores."""
    lease_access: LeaseAccess = field(default_factory=LeaseAccess, compare=False)
    """`kvturn_lease_ca`: file of the certificates to check the lease service's against; turns TLS
    on. `kvturn_lease_cert`, `kvturn_lease_key`: files of the engine's own certificate and its key.
    `kvturn_lease_token_file`: file of the token that shows the lease service who calls."""

    @property
    def active(self) -> bool:
        """True if kvturn does anything; otherwise the connector is the stock one."""
        return bool(self.lease_endpoints) and self.bidirectional

    @classmethod
    def from_extra(cls, extra: Mapping[str, Any]) -> ConnectorConfig:
        """Reads and checks `kv_connector_extra_config`.

        Raises:
            ConfigError: an unknown `kvturn_*` key, one that is misspelt, a wrong type or a value
                out of range.
        """
        _refuse_unknown(extra)
        return cls(
            lease_endpoints=_endpoints(extra, "kvturn_lease_endpoint"),
            engine_name=_name(extra, "kvturn_engine_name"),
            http_address=_url(extra, "kvturn_http_address"),
            bidirectional=_flag(extra, "bidirectional_kv_xfer"),
            recompute_threshold_tokens=_count(extra, "kv_recompute_threshold", 64, 0, 1 << 24),
            max_hold_ns=int(_number(extra, "decoder_kv_blocks_ttl", 480, 1, 86_400) * NS_PER_S),
            question_deadline_ns=int(
                _number(extra, "kvturn_question_deadline_ms", 50, 1, 10_000) * NS_PER_MS
            ),
            retentions_max=_count(extra, "kvturn_retentions_max", 4096, 1, 1_000_000),
            secret=_secret(_text(extra, "kvturn_secret_file")),
            traces=_traces(extra),
            nixl_progress_delay_us=_count(extra, "kvturn_nixl_progress_delay_us", 0, 0, 1_000_000),
            lease_access=_lease_access(extra),
        )


def turned_off_by(extra: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the switches that are not set, for want of which the connector is the stock one."""
    return tuple(key for key in SWITCHES if not extra.get(key))


def _refuse_unknown(extra: Mapping[str, Any]) -> None:
    # Other keys are upstream's own, which it does not judge either.
    known = (*_OWN_KEYS, *_UPSTREAM_KEYS)
    for key in extra:
        if key in known:
            continue
        meant = difflib.get_close_matches(key, known, 1, _ALIKE)
        if meant:
            raise ConfigError(f"{key}: unknown key; did you mean {meant[0]}?")
        if key.startswith(_PREFIX):
            raise ConfigError(f"{key}: unknown key; known are {', '.join(sorted(_OWN_KEYS))}")


def _traces(extra: Mapping[str, Any]) -> Destination | None:
    endpoint, protocol = (_text(extra, key) for key in _OTLP_KEYS)
    try:
        return destination_of(endpoint, protocol, os.environ, names=_OTLP_KEYS)
    except WrongSetting as wrong:
        raise ConfigError(f"{wrong.name}: {wrong.problem}") from None


def _text(extra: Mapping[str, Any], key: str) -> str:
    value = extra.get(key, "")
    if not isinstance(value, str):
        raise ConfigError(f"{key}: expected text, got {value!r}")
    return value


def _flag(extra: Mapping[str, Any], key: str) -> bool:
    value = extra.get(key, False)
    if not isinstance(value, bool):
        raise ConfigError(f"{key}: expected true or false, got {value!r}")
    return value


def _number(extra: Mapping[str, Any], key: str, default: float, low: float, high: float) -> float:
    value = extra.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{key}: expected a number, got {value!r}")
    if not low <= value <= high:
        raise ConfigError(f"{key}: {value} is not between {low:g} and {high:g}")
    return value


def _count(extra: Mapping[str, Any], key: str, default: int, low: int, high: int) -> int:
    value = _number(extra, key, default, low, high)
    if value != int(value):
        raise ConfigError(f"{key}: {value} is not a whole number")
    return int(value)


def _name(extra: Mapping[str, Any], key: str) -> str:
    name = _text(extra, key)
    if len(name.encode(errors="replace")) > NAME_BYTES_MAX:
        raise ConfigError(f"{key}: longer than {NAME_BYTES_MAX} bytes")
    if not name.isprintable():
        raise ConfigError(f"{key}: {name!r} has characters that cannot be shown; leave them out")
    return name


def _endpoints(extra: Mapping[str, Any], key: str) -> tuple[str, ...]:
    text = _text(extra, key)
    try:
        return addresses(text) if text else ()
    except ValueError as error:
        raise ConfigError(f"{key}: {text!r} {error}") from None


def _url(extra: Mapping[str, Any], key: str) -> str:
    url = _text(extra, key)
    if not url:
        return ""
    try:
        address = engine_address(url)
    except ValueError as error:
        raise ConfigError(f"{key}: {url!r} {error}, such as http://10.0.0.6:8200") from None
    if is_unspecified(address.host):
        raise ConfigError(
            f"{key}: {url!r} must have a host that routers can reach, such as http://10.0.0.6:8200"
        )
    return address.url


def _lease_access(extra: Mapping[str, Any]) -> LeaseAccess:
    texts = [_text(extra, key) for key in _ACCESS_KEYS]
    cert, key, ca, token = (Path(text) if text else None for text in texts)
    warn_of_open_secrets(file for file in (key, token) if file is not None)
    try:
        return lease_access(TlsFiles(cert, key, ca, _ACCESS_KEYS[:3]), token, _ACCESS_KEYS[3])
    except FileFault as fault:
        raise ConfigError(str(fault)) from None


def _secret(path: str) -> bytes:
    if not path:
        return b""
    try:
        secret = read_file("kvturn_secret_file:", Path(path)).strip()
    except FileFault as fault:
        raise ConfigError(f"{fault}; name a file the engine can read") from None
    if not 16 <= len(secret) <= 64:
        raise ConfigError(f"kvturn_secret_file: {path} holds {len(secret)} bytes, not 16 to 64")
    return secret
