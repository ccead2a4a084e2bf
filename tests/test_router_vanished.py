"""Ends of connections that vanish without a word, as when a machine loses power."""

import asyncio
import contextlib
import json
import socket
import struct
from typing import Any

import pytest
from router_harness import router, turn_body
from stub_engine import CHAT, Reply, Seen, chunk

from kvturn_router.vanished import VANISHED_S, has_vanished

KEEPALIVE = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}


def option(connection: Any, name: str) -> int:
    level = socket.SOL_SOCKET if name.startswith("SO_") else socket.IPPROTO_TCP
    return int(connection.getsockopt(level, getattr(socket, name)))


class Told:
    """A socket whose kernel tells this of it."""

    def __init__(self, *, retransmits: int, quiet_s: float) -> None:
        # Linux's struct tcp_info: eight bytes, then numbers of four, its 13th the last of these.
        self.info = struct.pack("=8B13I", 1, 0, retransmits, *[0] * 17, round(quiet_s * 1000))

    def setsockopt(self, level: int, option: int, value: int, /) -> None:
        pytest.fail("it is only looked at")

    def getsockopt(self, level: int, option: int, size: int, /) -> bytes:
        assert (level, option) == (socket.IPPROTO_TCP, socket.TCP_INFO)
        return self.info[:size]


async def hold(seen: Seen, reply: Reply) -> None:
    await reply.begin_stream()
    await reply.event(chunk({"content": "The"}))
    await seen.gone.wait()


async def test_the_kernel_asks_after_clients_and_engines():
    """Whatever is idle: 15 s, then three probes of 5 s. What engines do not take has 30 s, too."""
    async with router() as rig:
        rig.decode.script(CHAT, hold)
        client = await rig.client()
        await client.send("POST", CHAT, json.dumps(turn_body(stream=True)).encode())
        await client.head()
        clients = [one._transport for one in rig.server._listener.connections]
        engines = [one._transport for engine in rig.server._fleet for one in engine.pool._all]
        assert clients
        assert len(engines) >= 2
        for transport in (*clients, *engines):
            assert transport is not None
            connection = transport.get_extra_info("socket")
            assert option(connection, "SO_KEEPALIVE")
            assert {name: option(connection, name) for name in KEEPALIVE} == KEEPALIVE
            # A client that is there may leave its answer alone for much longer.
            unsent_ms = option(connection, "TCP_USER_TIMEOUT")
            assert unsent_ms == (30_000 if transport in engines else 0)


@pytest.mark.parametrize(
    ("retransmits", "quiet_s", "gone"),
    [
        (7, VANISHED_S + 1, True),
        (7, VANISHED_S - 1, False),  # a bad way, not none
        (0, 10 * VANISHED_S, False),  # nothing to acknowledge, or no room for more
    ],
)
def test_who_acknowledges_nothing_that_is_sent_again_has_vanished(
    retransmits: int, quiet_s: float, gone: bool
):
    """By what Linux tells of a connection."""
    assert has_vanished(Told(retransmits=retransmits, quiet_s=quiet_s)) is gone


def test_a_client_that_does_not_read_has_not_vanished():
    """Told by the kernel itself, its buffers full."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname())
        connection, _ = server.accept()
        with client, connection:
            connection.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                while True:
                    connection.send(b"x" * 65536)
            assert not has_vanished(connection)
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 60)
            assert len(info) == 60
            assert info[2] == 0


async def test_a_client_that_vanishes_in_the_midst_of_its_answer_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
):
    """Looked for every few seconds while it is served; decode sees its connection end at once."""
    gone = Told(retransmits=7, quiet_s=VANISHED_S + 1)
    async with router() as rig:
        rig.decode.script(CHAT, hold)
        client = await rig.client()
        await client.send("POST", CHAT, json.dumps(turn_body(stream=True)).encode())
        await client.head()
        listener = rig.server._listener
        (connection,) = [one for one in listener.connections if one._current is not None]
        now = asyncio.get_running_loop().time()
        listener.sweep(now + 60)
        assert rig.server.in_flight == 1
        transport = connection._transport
        assert transport is not None
        monkeypatch.setattr(
            "kvturn_router.front.http_wire.has_vanished", lambda _: has_vanished(gone)
        )
        listener.sweep(now + 61)
        assert rig.server.in_flight == 1  # It was looked after a second ago.
        listener.sweep(now + 70)
        await rig.until(lambda: rig.server.in_flight == 0)
        async with asyncio.timeout(10):
            await rig.decode.turns[0].gone.wait()
