"""Connections whose other end is gone without a word: its machine lost power, or the way to it.

Nothing ever comes of such an end, no reset either. Over an idle connection the kernel asks after
it; of what was sent and is not acknowledged it tells how long it has been trying.
"""

import socket
import struct
from typing import Final, Protocol

VANISHED_S: Final = 30
"""How long an end that does not answer the kernel counts as there."""

_IDLE_S: Final = 15
_INTERVAL_S: Final = 5
_PROBES: Final = (VANISHED_S - _IDLE_S) // _INTERVAL_S
# Not every platform has all of them.
_KEEPALIVE: Final = [
    (getattr(socket, name), value)
    for name, value in (
        ("TCP_KEEPIDLE", _IDLE_S),
        ("TCP_KEEPINTVL", _INTERVAL_S),
        ("TCP_KEEPCNT", _PROBES),
    )
    if hasattr(socket, name)
]
_USER_TIMEOUT: Final[int | None] = getattr(socket, "TCP_USER_TIMEOUT", None)
_INFO: Final[int | None] = getattr(socket, "TCP_INFO", None)
# Of Linux's struct tcp_info: tcpi_retransmits, and tcpi_last_ack_recv in milliseconds.
_info: Final = struct.Struct("=2xB53xI")


class Socket(Protocol):
    """What of a socket is used here; event loops have kinds of their own."""

    def setsockopt(self, level: int, option: int, value: int, /) -> None:
        """As of a socket."""

    def getsockopt(self, level: int, option: int, size: int, /) -> bytes:
        """As of a socket."""


def ask_after(connection: Socket) -> None:
    """Has the kernel end an idle connection whose other end does not answer.

    Connections that a listening socket takes are as it is.
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE:
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def bound_sending(connection: Socket) -> None:
    """Has the kernel end a connection on which nothing of what is sent is taken.

    Also for an end that is there and does not read, while its buffers are full.
    """
    if _USER_TIMEOUT is not None:
        connection.setsockopt(socket.IPPROTO_TCP, _USER_TIMEOUT, VANISHED_S * 1000)


def has_vanished(connection: Socket) -> bool:
    """Tells whether what is sent is acknowledged no more, where the platform tells that.

    An end that does not read, but is there, acknowledges all that it has room for.
    """
    if _INFO is None:
        return False
    try:
        told = connection.getsockopt(socket.IPPROTO_TCP, _INFO, _info.size)
    except OSError:
        return False  # It is ending anyway.
    if len(told) < _info.size:
        return False
    retransmits, quiet_ms = _info.unpack(told)
    return bool(retransmits and quiet_ms > VANISHED_S * 1000)
