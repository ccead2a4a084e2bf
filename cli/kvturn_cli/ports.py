"""Free and taken TCP ports on loopback."""

import contextlib
import random
import socket

HOST = "127.0.0.1"
# Below the range from which Linux takes ports for outgoing connections (32768 and up), so that
# none of those takes a port between our finding it free and its process listening on it.
FIRST, LAST = 20_000, 32_000


def is_free(port: int, host: str = HOST) -> bool:
    """Tells whether a process could listen on this port now."""
    with contextlib.closing(socket.socket()) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True


def is_listening(port: int) -> bool:
    """Tells whether a process accepts connections on this loopback port."""
    with contextlib.closing(socket.socket()) as probe:
        probe.settimeout(1)
        return probe.connect_ex((HOST, port)) == 0


def pick_free(taken: set[int]) -> int:
    """Returns a free port that is not in `taken`, and adds it there."""
    for _ in range(1_000):
        port = random.randint(FIRST, LAST)
        if port not in taken and is_free(port):
            taken.add(port)
            return port
    raise OSError(f"no free port between {FIRST} and {LAST}")
