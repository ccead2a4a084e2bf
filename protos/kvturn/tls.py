"""TLS of listeners and of clients, from files that may change while they are used.

Files are read again when they change; new connections are made with what they say then, and
connections that are open go on. All checks are OpenSSL's own: TLS 1.2 at least, and clients check
the server's name.
"""

from __future__ import annotations

import logging
import ssl
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

import grpc

from kvturn.watched import FileFault, Watched, read_file

if TYPE_CHECKING:
    from pathlib import Path

logger = logging.getLogger("kvturn.tls")

T = TypeVar("T")

_DAY_S: Final = 86_400.0
_SOON_S: Final = 7 * _DAY_S


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files of one side of connections; certificate and key go together.

    For a listener `ca` holds the authorities of its clients, who then must show a certificate
    (mTLS); for a client those of its server, None for the system's.
    """

    cert: Path | None
    key: Path | None
    ca: Path | None
    settings: tuple[str, str, str]
    """How the three are set, for what is said of them."""

    @property
    def paths(self) -> tuple[Path, ...]:
        """The files that there are."""
        return tuple(file for file in (self.cert, self.key, self.ca) if file is not None)


class Pem(NamedTuple):
    """What the files hold, checked to fit together."""

    cert: bytes | None
    key: bytes | None
    ca: bytes | None


class ServerTls:
    """TLS of listeners."""

    def __init__(self, files: TlsFiles) -> None:
        """Raises FileFault for files with which TLS could never come about."""
        if files.cert is None:
            given = files.settings[1 if files.key is not None else 2]
            raise FileFault(f"{given} needs {files.settings[0]}, the listener's own")
        self.files = files
        self._context = Watched(files.paths, lambda: _server_context(files))
        self._pem = Watched(files.paths, lambda: _read(files))
        self._ends = _Ends(files)

    def context(self) -> ssl.SSLContext:
        """Returns what an asyncio listener takes; each handshake uses the files of its time."""
        listener = _server_context(self.files)
        used = [self._context.value]
        self._ends.look()

        def choose(connection: ssl.SSLObject, name: str | None, _: ssl.SSLContext) -> None:
            latest = self._context.value
            connection.context = latest
            if latest is not used[0]:
                used[0] = latest
                self._ends.look()

        # Called in every handshake, also without a name, and before certificates are chosen.
        listener.sni_callback = choose
        return listener

    def credentials(self) -> grpc.ServerCredentials:
        """Returns what a gRPC listener takes; each handshake uses the files of its time."""
        pem = self._pem.value
        used = [pem]
        self._ends.look()

        def fetch() -> grpc.ServerCertificateConfiguration | None:
            latest = self._pem.value
            if latest is used[0]:
                return None
            used[0] = latest
            self._ends.look()
            return _configuration(latest)

        return grpc.dynamic_ssl_server_credentials(
            _configuration(pem),
            fetch,  # type: ignore[arg-type]  # None is for no change
            require_client_authentication=pem.ca is not None,
        )


class _Ends:
    """Warns of a certificate of ours that has expired or soon will, once each time it is new."""

    def __init__(self, files: TlsFiles) -> None:
        self._files = files
        self._seen = b""

    def look(self) -> None:
        """Looks at the file, when it was read."""
        cert = self._files.cert
        if cert is None:
            return
        try:
            pem = read_file(self._files.settings[0], cert)
        except FileFault:  # it went a moment ago
            return
        if pem == self._seen:
            return
        self._seen = pem
        left_s = min(certificates_left_s(pem, time.time()), default=_SOON_S)
        if said := ending(left_s):
            logger.warning(
                "%s %s: its certificate %s, and past its end nobody who checks it connects;"
                " replace the file, it is read again",
                self._files.settings[0],
                cert,
                said,
            )


def ending(left_s: float) -> str:
    """Returns what is to be warned of a certificate that is valid for so long, "" if nothing is."""
    if left_s <= 0:
        return "has expired"
    return f"ends in {left_s / _DAY_S:.1f} days" if left_s < _SOON_S else ""


def certificates_left_s(pem: bytes, now_s: float) -> list[float]:
    """Returns how long each certificate in a PEM text is still valid, below 0 once it is not.

    `now_s` is Unix time. None where they cannot be read (OpenSSL has the say, not this), and in
    the connector without the package for it, which the services bring.
    """
    try:
        # Not before it is needed: that takes a tenth of a second.
        from cryptography import x509

        found = x509.load_pem_x509_certificates(pem)
    except (ImportError, ValueError):
        return []
    return [one.not_valid_after_utc.timestamp() - now_s for one in found]


class ClientTls:
    """TLS of connections to servers."""

    def __init__(self, files: TlsFiles) -> None:
        """Raises FileFault for files with which TLS could never come about."""
        self._files = files
        self._pem = Watched(files.paths, lambda: _read(files))
        self._contexts: Watched[ssl.SSLContext] | None = None
        if files.paths:
            self._contexts = Watched(files.paths, lambda: _client_context(files))
        self._ends = _Ends(files)
        self._used: object = None

    def context(self) -> ssl.SSLContext:
        """Returns what the next asyncio connection takes."""
        if self._contexts is None:
            # Not before it is needed: to read the system's authorities takes a while.
            self._contexts = Watched((), lambda: _client_context(self._files))
        return self._looked_at(self._contexts.value)

    def credentials(self) -> grpc.ChannelCredentials:
        """Returns what the next gRPC channel takes; a channel keeps to what it was made with."""
        pem = self._looked_at(self._pem.value)
        return grpc.ssl_channel_credentials(pem.ca, pem.key, pem.cert)

    def _looked_at(self, value: T) -> T:
        if value is not self._used:
            self._used = value
            self._ends.look()
        return value


def trusting(setting: str, ca: Path | None) -> ssl.SSLContext | None:
    """Returns what judges servers by the authorities in a file, None, for the system's, without.

    Raises FileFault; `setting` is how the file is given.
    """
    if ca is None:
        return None
    return ClientTls(TlsFiles(None, None, ca, ("", "", setting))).context()


def client_tls(files: TlsFiles, whose: str) -> ClientTls | None:
    """Returns TLS to servers that `ca` judges, None, for plain connections, without any file.

    `whose` authorities are wanted beside a certificate. Raises FileFault.
    """
    cert_setting, key_setting, ca_setting = files.settings
    if files.ca is None and files.paths:
        given = key_setting if files.cert is None else cert_setting
        raise FileFault(f"{given} needs {ca_setting}, the authorities of {whose}")
    return ClientTls(files) if files.paths else None


def connection_problem(details: str, settings: tuple[str, str, str], *, tls: bool) -> str:
    """Returns in words why a gRPC connection did not come about, with the setting to look at.

    `details` are gRPC's: a chain of causes, of which the last one tells most. `settings` are ours
    for certificate, key and authorities, `tls` whether we use it.
    """
    cert, key, ca = settings
    last = details.removesuffix(": OK").rpartition(": ")[2]
    if "WRONG_VERSION_NUMBER" in details:
        return f"it speaks no TLS: leave {ca} out, or set --tls-cert and --tls-key there"
    if "CERTIFICATE_VERIFY_FAILED" in details:
        return f"its certificate is not to be trusted by {ca}: {last}"
    if "Hostname Verification" in details:
        return "its certificate does not name the address at which we call it"
    if last == "Socket closed" and not tls:
        return f"it closes connections at once: if it has --tls-cert, set {ca}"
    if last == "Socket closed":
        return (
            "it closes TLS connections at once: if it has --tls-client-ca, "
            f"it must trust what {cert} and {key} hold"
        )
    return last or "no connection"


def _server_context(files: TlsFiles) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    _load(context, files)
    if files.ca is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        # A resumed session would not show the certificate again, whoever signed it.
        context.options |= ssl.OP_NO_TICKET
        context.num_tickets = 0
    return context


def _client_context(files: TlsFiles) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    if files.ca is None:
        context.load_default_certs()
    _load(context, files)
    return context


def _read(files: TlsFiles) -> Pem:
    _load(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), files)
    return Pem(
        *(
            None if file is None else read_file(setting, file)
            for setting, file in zip(files.settings, (files.cert, files.key, files.ca), strict=True)
        )
    )


def _load(context: ssl.SSLContext, files: TlsFiles) -> None:
    """Loads the files into the context. Raises FileFault."""
    cert_setting, key_setting, ca_setting = files.settings
    if (files.cert is None) != (files.key is None):
        given, missing = (
            (cert_setting, key_setting) if files.key is None else (key_setting, cert_setting)
        )
        raise FileFault(f"{given} needs {missing}: a certificate and its key go together")
    if files.ca is not None:
        read_file(ca_setting, files.ca)
        try:
            context.load_verify_locations(files.ca)
        except ssl.SSLError:
            raise FileFault(f"{ca_setting} {files.ca}: holds no certificate in PEM form") from None
    if files.cert is not None and files.key is not None:
        for setting, file in ((cert_setting, files.cert), (key_setting, files.key)):
            if b"-----BEGIN " not in read_file(setting, file):
                raise FileFault(f"{setting} {file}: is no PEM file")
        try:
            context.load_cert_chain(files.cert, files.key, password=_no_passphrase)
        except (ssl.SSLError, ValueError):
            raise FileFault(
                f"{key_setting} {files.key}: is not the key, without a passphrase, of the "
                f"certificate in {cert_setting} {files.cert}"
            ) from None


def _no_passphrase() -> str:
    """Keeps OpenSSL from asking on the terminal."""
    return ""


def _configuration(pem: Pem) -> grpc.ServerCertificateConfiguration:
    assert pem.key is not None
    assert pem.cert is not None
    return grpc.ssl_server_certificate_configuration([(pem.key, pem.cert)], pem.ca)
