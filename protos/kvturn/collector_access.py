"""How a collector is asked, by OpenTelemetry's own variables: with which headers, over which TLS.

What a variable for traces leaves open that for all signals says.
"""

from collections.abc import Mapping
from pathlib import Path

from opentelemetry.util.re import parse_env_headers

from kvturn.otlp import said
from kvturn.tls import ClientTls, TlsFiles

_TLS_SETTINGS = (
    "OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE",
    "OTEL_EXPORTER_OTLP_CLIENT_KEY",
    "OTEL_EXPORTER_OTLP_CERTIFICATE",
)


def collector_headers(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the headers of each export, by lower-case name."""
    return dict(parse_env_headers(said("HEADERS", environ)[1], liberal=True))


def collector_tls(environ: Mapping[str, str]) -> ClientTls:
    """Returns TLS to a collector. Raises FileFault for files with which it could never come about.

    Without a variable the system's authorities judge it, and it sees no certificate of ours.
    """
    cert, key, ca = (
        Path(file) if (file := said(name.removeprefix("OTEL_EXPORTER_OTLP_"), environ)[1]) else None
        for name in _TLS_SETTINGS
    )
    return ClientTls(TlsFiles(cert, key, ca, _TLS_SETTINGS))
