"""Looks at the certificates that servers show."""

import asyncio
import ssl
import time
from collections.abc import Sequence
from typing import NamedTuple

from kvturn_cli.doctor.facts import Certificate

_HAS_EXPIRED = 10
"""OpenSSL's X509_V_ERR_CERT_HAS_EXPIRED."""


class Server(NamedTuple):
    """Where TLS is spoken, and what judges it there."""

    name: str
    host: str
    port: int
    tls: ssl.SSLContext | None
    """None: the system's authorities."""


async def probe_certificates(servers: Sequence[Server], timeout_s: float) -> list[Certificate]:
    """Returns those that could be seen; who is not reached is told of elsewhere."""
    seen = await asyncio.gather(*(_seen(server, timeout_s) for server in servers))
    return [one for one in seen if one is not None]


async def _seen(server: Server, timeout_s: float) -> Certificate | None:
    tls = server.tls or ssl.create_default_context()
    try:
        async with asyncio.timeout(timeout_s):
            _, writer = await asyncio.open_connection(server.host, server.port, ssl=tls)
    except ssl.SSLCertVerificationError as error:
        return Certificate(server.name, 0.0) if error.verify_code == _HAS_EXPIRED else None
    except (OSError, TimeoutError):
        return None
    shown = writer.get_extra_info("peercert") or {}
    writer.transport.abort()
    end = shown.get("notAfter")
    if end is None:
        return None
    return Certificate(server.name, max(0.0, ssl.cert_time_to_seconds(end) - time.time()))
