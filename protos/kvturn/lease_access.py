"""How a client of the lease service shows who it is, and knows whom it talks to."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import grpc.aio

from kvturn.tls import ClientTls, TlsFiles
from kvturn.watched import FileFault, Watched, read_file

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

_token = re.compile(rb"[\x21-\x7e]{1,512}")


class LeaseAccess:
    """TLS and token of a client; without either, calls are plain and anonymous."""

    def __init__(self, tls: ClientTls | None = None, token: Watched[str] | None = None) -> None:
        self._tls = tls
        self._token = token

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What each call carries."""
        # Not call credentials, which gRPC sends over TLS only.
        return () if self._token is None else (("authorization", self._token.value),)

    def channel(self, endpoint: str, options: Sequence[tuple[str, int]]) -> grpc.aio.Channel:
        """Returns a new channel to HOST:PORT, with certificates as they are now."""
        if self._tls is None:
            return grpc.aio.insecure_channel(endpoint, options=options)
        return grpc.aio.secure_channel(endpoint, self._tls.credentials(), options=options)


def lease_access(
    tls: TlsFiles, token_file: Path | None = None, token_setting: str = ""
) -> LeaseAccess:
    """Returns access by files; `ca` turns TLS on. Raises FileFault."""
    cert_setting, _, ca_setting = tls.settings
    if tls.ca is None and tls.paths:
        raise FileFault(f"{cert_setting} needs {ca_setting}, the authorities of the lease service")
    return LeaseAccess(
        None if tls.ca is None else ClientTls(tls),
        None if token_file is None else _watched_token(token_setting, token_file),
    )


def _watched_token(setting: str, file: Path) -> Watched[str]:
    def read() -> str:
        token = read_file(setting, file).strip()
        if not _token.fullmatch(token):
            raise FileFault(f"{setting} {file}: must hold one token of visible ASCII")
        return f"Bearer {token.decode()}"

    return Watched((file,), read)
