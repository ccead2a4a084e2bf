"""Where traces go, as flags and OpenTelemetry's own variables say it. No I/O.

What a flag leaves open the variables of the standard say, those for traces before
those for all signals. Headers and certificates are collector_access.py's.
"""

import re
from collections.abc import Mapping
from typing import Final, NamedTuple
from urllib.parse import urlsplit

from kvturn.address import is_host

GRPC: Final = "grpc"
HTTP: Final = "http/protobuf"
PROTOCOLS: Final = (GRPC, HTTP)

_COMPRESSIONS = ("none", "gzip")
_DISABLED = "OTEL_SDK_DISABLED"
_TRACES_ENDPOINT = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
_HTTP_PATH = "/v1/traces"
# OpenTelemetry's SDK reads it as it is imported, and fails by it; spans here have no such limit.
_ATTRIBUTES_MAX = "OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT"

_count = re.compile(r"[0-9]{1,9}")
_url = re.compile(r"https?://[^\s/]+(/\S*)?")


class WrongSetting(ValueError):
    """A setting that cannot be followed: the flag's or variable's name, and what it must be."""

    def __init__(self, name: str, problem: str) -> None:
        super().__init__(f"{name} {problem}")
        self.name = name
        self.problem = problem


class Destination(NamedTuple):
    """Where spans are sent. `endpoint` is a URL, of http the whole one."""

    endpoint: str
    protocol: str = GRPC


def destination_of(
    endpoint: str | None,
    protocol: str | None,
    environment: Mapping[str, str],
    *,
    names: tuple[str, str] = ("--otlp-endpoint", "--otlp-protocol"),
) -> Destination | None:
    """Returns where spans go, None for nowhere.

    `endpoint` and `protocol` are what was given under `names`, None or "" if nothing was: then the
    variables say it. An endpoint is the collector's: of http the path of traces is added to it,
    but for a variable that is about traces alone. Raises WrongSetting.
    """
    if environment.get(_DISABLED, "").strip().lower() == "true":
        return None
    endpoint_name, endpoint = _first(names[0], endpoint, "ENDPOINT", environment)
    protocol_name, protocol = _first(names[1], protocol, "PROTOCOL", environment)
    protocol = protocol or GRPC
    if protocol not in PROTOCOLS and (endpoint or protocol_name == names[1]):
        raise WrongSetting(protocol_name, f"must be {GRPC} or {HTTP}, not {protocol!r}")
    if not endpoint:
        return None
    if not _is_url(endpoint):
        problem = f"must be a URL like http://HOST:{4317 if protocol == GRPC else 4318}"
        raise WrongSetting(endpoint_name, f"{problem}, not {endpoint!r}")
    whole = protocol == GRPC or endpoint_name == _TRACES_ENDPOINT
    if not whole and not endpoint.rstrip("/").endswith(_HTTP_PATH):
        endpoint = endpoint.rstrip("/") + _HTTP_PATH
    compressed(environment)
    limit = environment.get(_ATTRIBUTES_MAX, "").strip()
    if limit and not _count.fullmatch(limit):
        raise WrongSetting(_ATTRIBUTES_MAX, f"must be a number of attributes, not {limit!r}")
    return Destination(endpoint, protocol)


def compressed(environment: Mapping[str, str]) -> bool:
    """Returns whether exports are to be compressed, by gzip. Raises WrongSetting."""
    name, compression = said("COMPRESSION", environment)
    if compression.lower() not in ("", *_COMPRESSIONS):
        raise WrongSetting(name, f"must be {' or '.join(_COMPRESSIONS)}, not {compression!r}")
    return compression.lower() == "gzip"


def said(setting: str, environment: Mapping[str, str]) -> tuple[str, str]:
    """Returns which of the standard's variables says `setting`, and what it says, "" for none."""
    for variable in (f"OTEL_EXPORTER_OTLP_TRACES_{setting}", f"OTEL_EXPORTER_OTLP_{setting}"):
        if value := environment.get(variable, "").strip():
            return variable, value
    return "", ""


def _is_url(endpoint: str) -> bool:
    try:
        host, port = urlsplit(endpoint).hostname, urlsplit(endpoint).port
    except ValueError:
        return False
    return _url.fullmatch(endpoint) is not None and port != 0 and is_host(host or "")


def _first(
    name: str, given: str | None, setting: str, environment: Mapping[str, str]
) -> tuple[str, str]:
    """Returns what is set first, and under which name."""
    if given:
        return name, given
    variable, value = said(setting, environment)
    return variable or name, value
