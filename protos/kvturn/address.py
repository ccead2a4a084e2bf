"""Addresses as people write them: HOST:PORT, IPv6 in brackets. No I/O."""

import re

ENDPOINTS_MAX = 16
"""Addresses that one setting may name."""

_host_port = re.compile(r"(?P<host>\[[0-9a-fA-F:.]+\]|[^\s:/@\[\]]+):(?P<port>[0-9]{1,5})")


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
