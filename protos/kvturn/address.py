"""Addresses as people write them: HOST:PORT, IPv6 in brackets, and base URLs of engines. No I/O."""

import ipaddress
import re
from typing import NamedTuple

ENDPOINTS_MAX = 16
"""Addresses that one setting may name."""

_host_port = re.compile(r"(?P<host>\[[0-9a-fA-F:.]+\]|[^\s:/@\[\]]+):(?P<port>[0-9]{1,5})")
_engine_url = re.compile(
    r"http(?P<tls>s)?://(?P<host>[a-z0-9._-]{1,253}|\[[0-9a-f:.]+\])(:(?P<port>[0-9]{1,5}))?/?",
    re.IGNORECASE | re.ASCII,
)


def is_address(text: str) -> bool:
    """Tells whether a text is HOST:PORT, with a port that one can connect to."""
    named = _host_port.fullmatch(text)
    return named is not None and 0 < int(named["port"]) < 65_536 and is_host(named["host"])


def is_host(text: str) -> bool:
    """Tells whether a text can be looked up as a host.

    A name with an empty part, or one of more than 63 characters, ends in an exception of its own
    that nobody who connects expects.
    """
    try:
        text.encode("idna")
    except UnicodeError:
        return False
    return re.search(r"[\s/]", text) is None and text != ""


def ip_address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Returns the IP address that a host is, in brackets or not; None for a name."""
    try:
        return ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return None


def is_unspecified(host: str) -> bool:
    """Tells whether a host means all addresses of a machine, and so none that can be reached."""
    address = ip_address(host)
    return host in ("", "*") or (address is not None and address.is_unspecified)


def is_loopback(host: str) -> bool:
    """Tells whether a host can be reached from its own machine alone."""
    address = ip_address(host)
    return host == "localhost" or (address is not None and address.is_loopback)


def addresses(text: str) -> tuple[str, ...]:
    """Returns HOST:PORT, or several with commas between. Raises ValueError with what it must be."""
    named = tuple(part.strip() for part in text.split(","))
    if not all(map(is_address, named)):
        raise ValueError(
            "must be HOST:PORT, or several with commas between, IPv6 addresses in brackets"
        )
    if len(named) > ENDPOINTS_MAX:
        raise ValueError(f"must name at most {ENDPOINTS_MAX} endpoints")
    return named


def address_of(host: str, port: int) -> str:
    """Returns HOST:PORT, an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class EngineAddress(NamedTuple):
    """Where an engine listens."""

    url: str
    """As given, without a trailing slash."""
    host: str
    """A name or an IP address, IPv6 without brackets."""
    port: int

    @property
    def secure(self) -> bool:
        """Whether it is spoken to over TLS."""
        return self.url.lower().startswith("https://")

    @property
    def place(self) -> str:
        """The address in the form in which two that mean the same engine are equal."""
        host = "127.0.0.1" if self.host == "localhost" else self.host
        return f"{host}:{self.port}"


def engine_address(url: str) -> EngineAddress:
    """Returns the parts of an engine's base URL.

    Raises ValueError, in words that follow the URL, if it is not
    `http://HOST:PORT` or `https://HOST:PORT` with nothing after it.
    """
    if not url.lower().startswith(("http://", "https://")):
        raise ValueError("must begin with http:// or https://")
    parts = _engine_url.fullmatch(url)
    port = int(parts["port"] or (443 if parts["tls"] else 80)) if parts else 0
    if parts is None or not 0 < port < 65_536:
        raise ValueError("must be http://HOST:PORT and nothing more")
    host = parts["host"].lower()
    if host.startswith("["):
        try:
            host = ipaddress.IPv6Address(host[1:-1]).compressed
        except ValueError:
            raise ValueError("must have an IPv6 address in its brackets") from None
    elif not is_host(host):
        raise ValueError("must have a host whose parts have 1 to 63 characters")
    return EngineAddress(url.removesuffix("/"), host, port)
