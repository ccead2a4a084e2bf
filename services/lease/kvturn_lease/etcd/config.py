"""How to reach etcd."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class EtcdConfig:
    """Endpoints, certificates and user of one etcd cluster."""

    endpoints: tuple[str, ...]
    """HOST:PORT of each member, at least one."""
    ca_file: Path | None = None
    """Certificates that etcd's is checked against; None talks without TLS."""
    cert_file: Path | None = None
    """Our own certificate, where etcd asks for one."""
    key_file: Path | None = None
    """The certificate's key."""
    user: str = ""
    """User to log in as; empty for none."""
    password: str = field(default="", repr=False)
    """The user's password."""
    prefix: str = "kvturn/"
    """What all our keys begin with."""
