"""How a client of the lease service shows who it is, and knows whom it talks to."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

import grpc
import grpc.aio

from kvturn.tls import ClientTls, TlsFiles, client_tls, connection_problem
from kvturn.watched import FileFault, Watched, read_file

if TYPE_CHECKING:
    import ssl
    from collections.abc import Sequence
    from pathlib import Path

_token = re.compile(rb"[\x21-\x7e]{1,512}")


class AccessSettings(NamedTuple):
    """How a client is given its access, for what is said of it."""

    cert: str = "--lease-cert"
    key: str = "--lease-key"
    ca: str = "--lease-ca"
    token: str = "--lease-token-file"


class LeaseAccess:
    """TLS and token of a client; without either, calls are plain and anonymous."""

    def __init__(
        self,
        tls: ClientTls | None = None,
        token: Watched[str] | None = None,
        settings: AccessSettings = AccessSettings(),  # noqa: B008 (immutable)
    ) -> None:
        self._tls = tls
        self._token = token
        self._settings = settings

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What each call carries."""
        # Not call credentials, which gRPC sends over TLS only.
        return () if self._token is None else (("authorization", self._token.value),)

    @property
    def context(self) -> ssl.SSLContext | None:
        """What judges the server of a connection that is not gRPC's; None without TLS."""
        return None if self._tls is None else self._tls.context()

    def channel(self, endpoint: str, options: Sequence[tuple[str, int]]) -> grpc.aio.Channel:
        """Returns a new channel to HOST:PORT, with certificates as they are now."""
        if self._tls is None:
            return grpc.aio.insecure_channel(endpoint, options=options)
        return grpc.aio.secure_channel(endpoint, self._tls.credentials(), options=options)

    def problem(self, code: grpc.StatusCode, details: str) -> str:
        """Returns in words why a call failed, with the setting to look at where one is at fault."""
        if code in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
            verb = "set" if self._token is None else "check"
            return f"it refuses us ({code.name}): {details}; {verb} {self._settings.token}"
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            return "it is silent"
        if code is grpc.StatusCode.UNAVAILABLE:
            return connection_problem(details, self._settings[:3], tls=self._tls is not None)
        return f"it answered {code.name}: {details}"


def lease_access(
    tls: TlsFiles, token_file: Path | None = None, token_setting: str = ""
) -> LeaseAccess:
    """Returns access by files; `ca` turns TLS on. Raises FileFault."""
    return LeaseAccess(
        client_tls(tls, "the lease service"),
        None if token_file is None else _watched_token(token_setting, token_file),
        AccessSettings(*tls.settings, token_setting or AccessSettings().token),
    )


def _watched_token(setting: str, file: Path) -> Watched[str]:
    def read() -> str:
        token = read_file(setting, file).strip()
        if not _token.fullmatch(token):
            raise FileFault(f"{setting} {file}: must hold one token of visible ASCII")
        return f"Bearer {token.decode()}"

    return Watched((file,), read)
