"""Certificates for tests, as files: authorities, and what they vouch for."""

import datetime
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

_DAY = datetime.timedelta(days=1)


@dataclass(frozen=True)
class Pair:
    """Files of a certificate and its key."""

    cert: Path
    key: Path


class Authority:
    """Signs certificates; `ca` is the file of its own."""

    def __init__(self, folder: Path, name: str = "authority") -> None:
        self._folder = folder
        self._name = name
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._count = 0
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        certificate = (
            _begun(subject, subject, self._key.public_key(), valid_days=(-1, 1))
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .sign(self._key, hashes.SHA256())
        )
        self._subject = subject
        self.ca = folder / f"{name}.pem"
        self.ca.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))

    def issue(
        self,
        *,
        dns: Sequence[str] = ("localhost",),
        addresses: Sequence[str] = ("127.0.0.1",),
        uris: Sequence[str] = (),
        valid_days: tuple[int, int] = (-1, 1),
        into: Pair | None = None,
    ) -> Pair:
        """Returns a new certificate with its key, in files of their own or in those of `into`."""
        self._count += 1
        stem = f"{self._name}-{self._count}"
        pair = into or Pair(self._folder / f"{stem}.pem", self._folder / f"{stem}.key")
        key = ec.generate_private_key(ec.SECP256R1())
        names = [
            *map(x509.DNSName, dns),
            *(x509.IPAddress(ipaddress.ip_address(address)) for address in addresses),
            *map(x509.UniformResourceIdentifier, uris),
        ]
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, stem)])
        certificate = (
            _begun(subject, self._subject, key.public_key(), valid_days)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        pair.key.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        pair.key.chmod(0o600)
        pair.cert.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        return pair


def _begun(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePublicKey,
    valid_days: tuple[int, int],
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now + valid_days[0] * _DAY)
        .not_valid_after(now + valid_days[1] * _DAY)
    )
