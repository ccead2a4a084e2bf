"""The etcd client against real etcd that is killed, frozen, compacted, cut off, full or locked."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import subprocess
from typing import TYPE_CHECKING

import pytest
from awake import within
from etcd_server import EtcdCluster, EtcdServer, until
from tcp_proxy import TcpProxy

from kvturn_lease.etcd.client import EtcdClient, created_at, delete, prefix_end, put, read
from kvturn_lease.etcd.config import EtcdConfig
from kvturn_lease.etcd.errors import (
    EtcdNoSpace,
    EtcdRefused,
    EtcdUnavailable,
    LeaseGone,
    WatchEnded,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable
    from pathlib import Path

    from kvturn.etcd.v3 import etcd_pb2

T = 20.0
ALL = b"k/"


@contextlib.asynccontextmanager
async def client_of(*endpoints: str, **more: object) -> AsyncIterator[EtcdClient]:
    """A client, closed at the end."""
    client = EtcdClient(EtcdConfig(endpoints=endpoints, **more))  # type: ignore[arg-type]
    try:
        yield client
    finally:
        await client.close()


async def write(client: EtcdClient, *numbers: int, timeout_s: float = T) -> int:
    """Puts k/NUMBER in one guarded transaction; returns the revision."""
    puts = [put(b"k/%d" % number, b"x" * 500, 0) for number in numbers]
    response = await client.transact([], puts, timeout_s=timeout_s, safe=True)
    return int(response.header.revision)


class Watcher:
    """Collects what a watch of k/ tells."""

    def __init__(self, client: EtcdClient, revision: int) -> None:
        self.keys: list[bytes] = []
        self.deleted = 0
        self.batches = 0
        self.task = asyncio.create_task(self._run(client, revision))

    async def _run(self, client: EtcdClient, revision: int) -> None:
        async with contextlib.aclosing(client.watch(ALL, revision, prefix_end(ALL))) as batches:
            async for events in batches:
                self.batches += 1
                self._take(events)

    def _take(self, events: Iterable[etcd_pb2.Event]) -> None:
        for event in events:
            if event.type:
                self.deleted += 1
            else:
                self.keys.append(event.kv.key)

    async def stop(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


def numbered(first: int, last: int) -> list[bytes]:
    return [b"k/%d" % number for number in range(first, last)]


# ---- what the calls do -----------------------------------------------------------------------


async def test_keys_pages_conditions_and_deletions(tmp_path: Path) -> None:
    """Pages come from one revision; a transaction whose condition fails changes nothing."""
    async with EtcdServer(tmp_path) as etcd, client_of(etcd.endpoint) as client:
        assert (await client.get(b"k/0", T))[0] is None
        revision = await write(client, *range(5))
        kv, at = await client.get(b"k/0", T)
        assert kv is not None
        assert (kv.create_revision, at) == (revision, revision)
        pages = []
        async for kvs, read_at in client.list_prefix(ALL, T, page_keys=2):
            pages.append([each.key for each in kvs])
            assert read_at == revision
            await write(client, 9)  # comes too late for the pages that follow
        assert pages == [numbered(0, 2), numbered(2, 4), numbered(4, 5)]
        lost = await client.transact(
            [created_at(b"k/0", 0)],
            [delete(b"k/0")],
            [read(b"k/0")],
            timeout_s=T,
            safe=True,
        )
        assert not lost.succeeded
        assert lost.responses[0].response_range.kvs[0].key == b"k/0"
        won = await client.transact(
            [created_at(b"k/0", revision)],
            [delete(b"k/", prefix_end(b"k/"))],
            timeout_s=T,
            safe=True,
        )
        assert won.succeeded
        assert won.responses[0].response_delete_range.deleted == 6


async def test_a_lease_lives_as_long_as_it_is_renewed(tmp_path: Path) -> None:
    """Its key goes with it; renewing one that is gone says so, and so does a put on it."""
    async with EtcdServer(tmp_path) as etcd, client_of(etcd.endpoint) as client:
        lease = secrets.randbits(62)
        assert await client.grant(lease, 60, T) == 60
        assert await client.grant(lease, 60, T) == 60  # as after an answer that was lost
        await client.transact([], [put(b"k/1", b"v", lease)], timeout_s=T, safe=True)
        assert await asyncio.gather(*(client.renew(lease, T) for _ in range(50))) == [60] * 50
        await client.revoke(lease, T)
        await client.revoke(lease, T)
        assert (await client.get(b"k/1", T))[0] is None
        with pytest.raises(LeaseGone):
            await client.renew(lease, T)
        with pytest.raises(LeaseGone):
            await client.transact([], [put(b"k/1", b"v", lease)], timeout_s=T, safe=True)


async def test_an_answer_to_a_keepalive_given_up_is_not_taken_for_a_later_one(
    tmp_path: Path,
) -> None:
    """etcd freezes; one renewal is abandoned in it; the next waits for an answer of its own."""
    async with EtcdServer(tmp_path) as etcd, client_of(etcd.endpoint) as client:
        lease = secrets.randbits(62)
        await client.grant(lease, 60, T)
        await client.renew(lease, T)
        etcd.freeze()
        abandoned = asyncio.create_task(client.renew(lease, T))
        await asyncio.sleep(0.05)
        abandoned.cancel()
        with pytest.raises(EtcdUnavailable):
            await client.renew(lease, 0.2)
        etcd.resume()
        assert await client.renew(lease, T) == 60


# ---- outages ---------------------------------------------------------------------------------


async def test_a_watch_goes_on_after_etcd_was_killed_and_started_again(tmp_path: Path) -> None:
    """kill -9 and a restart under a watch: no event is lost or told twice; puts go on at once."""
    async with EtcdServer(tmp_path) as etcd, client_of(etcd.endpoint) as client:
        watcher = Watcher(client, await write(client, 0))
        for number in range(1, 20):
            await write(client, number)
        etcd.kill()
        with pytest.raises(EtcdUnavailable):
            await write(client, 99, timeout_s=0.2)
        await etcd.start()
        async with within(2):
            for number in range(20, 40):
                await write(client, number)
        await until(lambda: watcher.keys == numbered(0, 40))
        await watcher.stop()


async def test_a_catch_up_that_is_cut_loses_nothing(tmp_path: Path) -> None:
    """3,000 events are fetched through a connection that breaks in the middle of them."""
    async with EtcdServer(tmp_path) as etcd, client_of(etcd.endpoint) as direct:
        first = await write(direct, 0)
        for batch in range(30):
            await asyncio.gather(
                *(write(direct, number) for number in range(100 * batch, 100 * batch + 100))
            )
        for cut_after in (600, 300_000, 1_500_000):
            async with (
                TcpProxy("127.0.0.1", etcd.port) as proxy,
                client_of(f"127.0.0.1:{proxy.port}") as client,
            ):
                proxy.cut_after = cut_after
                watcher = Watcher(client, first + 1)
                await until(lambda watcher=watcher: len(watcher.keys) >= 3_000)
                assert sorted(watcher.keys) == sorted(numbered(0, 3_000))
                assert proxy.connections == 2
                await watcher.stop()


async def test_a_watch_that_missed_a_compaction_says_so(tmp_path: Path) -> None:
    """Cut off while changes come and are compacted, it ends; listing and watching again works."""
    async with (
        EtcdServer(tmp_path) as etcd,
        client_of(etcd.endpoint) as direct,
        TcpProxy("127.0.0.1", etcd.port) as proxy,
        client_of(f"127.0.0.1:{proxy.port}") as client,
    ):
        watcher = Watcher(client, await write(direct, 0))
        await until(lambda: watcher.keys == numbered(0, 1))
        proxy.close()
        for number in range(1, 6):
            revision = await write(direct, number)
        await direct.compact(revision, T)
        await proxy.open()
        with pytest.raises(WatchEnded, match="compacted"):
            await asyncio.wait_for(watcher.task, T)
        listed: list[bytes] = []
        async for kvs, at in client.list_prefix(ALL, T):
            listed += [each.key for each in kvs]
            revision = at
        assert listed == numbered(0, 6)
        again = Watcher(client, revision + 1)
        await write(direct, 6)
        await until(lambda: again.keys == numbered(6, 7))
        await again.stop()


async def test_a_watch_notices_that_etcd_lost_its_data(tmp_path: Path) -> None:
    """A watch from a revision that a wiped etcd has not reached ends instead of waiting for it."""
    async with EtcdServer(tmp_path) as etcd, client_of(etcd.endpoint) as client:
        for number in range(5):
            revision = await write(client, number)
        watcher = Watcher(client, revision)
        await until(lambda: watcher.keys)
        etcd.kill()
        etcd.wipe()
        await etcd.start()
        with pytest.raises(WatchEnded, match="older"):
            await asyncio.wait_for(watcher.task, T)


async def test_the_next_endpoint_is_used_when_one_fails(tmp_path: Path) -> None:
    """The member in use freezes, the next dies: no put fails or waits long, the lease lives on."""
    async with EtcdCluster(tmp_path) as cluster, client_of(*cluster.endpoints) as client:
        lease = secrets.randbits(62)
        await client.grant(lease, 30, T)
        first = await write(client, 0)
        await client.renew(lease, T)
        members = cluster.members
        for start, fault in ((1, members[0].freeze), (50, members[1].kill)):
            fault()
            for number in range(start, start + 49):
                async with within(2.5):
                    await write(client, number, timeout_s=3.0)
            assert await client.renew(lease, 3.0) == 30
            members[0].resume()
            await until(members[0].is_healthy)
        watcher = Watcher(client, first)
        # A put that was tried twice, and applied both times, is told twice.
        await until(lambda: list(dict.fromkeys(watcher.keys)) == numbered(0, 99))
        await watcher.stop()


async def fill(client: EtcdClient) -> None:
    """Puts until etcd takes no more."""
    for number in range(10_000):
        await client.transact(
            [], [put(b"k/%d" % number, bytes(100_000), 0)], timeout_s=T, safe=True
        )


async def test_an_etcd_without_space_is_told_apart(tmp_path: Path) -> None:
    """Puts are refused for want of space; reads, keepalives and revocations go on."""
    quota = ("--quota-backend-bytes", str(1024 * 1024))
    async with EtcdServer(tmp_path, *quota) as etcd, client_of(etcd.endpoint) as client:
        lease = secrets.randbits(62)
        await client.grant(lease, 30, T)
        with pytest.raises(EtcdNoSpace):
            await fill(client)
        with pytest.raises(EtcdNoSpace):
            await client.grant(secrets.randbits(62), 30, T)
        assert await client.renew(lease, T) == 30
        assert (await client.get(b"k/0", T))[0] is not None
        await client.revoke(lease, T)


async def test_a_lease_of_many_keys_ends_under_a_watch(tmp_path: Path) -> None:
    """The deletions are one revision and more than one message may hold; all of them come."""
    async with EtcdServer(tmp_path) as etcd, client_of(etcd.endpoint) as client:
        lease, count = secrets.randbits(62), 12_000
        await client.grant(lease, 60, T)
        revision = 0
        for start in range(0, count, 1_280):
            transactions = [
                client.transact(
                    [],
                    [
                        put(b"k/%0400d" % number, b"", lease)
                        for number in range(first, min(first + 128, count))
                    ],
                    timeout_s=T,
                    safe=True,
                )
                for first in range(start, min(start + 1_280, count), 128)
            ]
            responses = await asyncio.gather(*transactions)
            revision = max(response.header.revision for response in responses)
        watcher = Watcher(client, revision + 1)
        await client.revoke(lease, T)
        await until(lambda: watcher.deleted == count)
        assert watcher.batches == 1
        await watcher.stop()


# ---- who may ask -----------------------------------------------------------------------------


def make_certificates(folder: Path) -> None:
    """Makes ca.pem, cert.pem and key.pem; one certificate serves etcd and its clients."""
    names = folder / "names"
    names.write_text("subjectAltName=IP:127.0.0.1\nextendedKeyUsage=serverAuth,clientAuth\n")
    sign = "openssl x509 -req -days 2 -CAcreateserial"
    new = "openssl req -newkey rsa:2048 -nodes -days 2"
    for command in (
        f"{new} -x509 -subj /CN=ca -keyout ca.key -out ca.pem",
        f"{new} -subj /CN=root -keyout key.pem -out request.pem",
        f"{sign} -in request.pem -CA ca.pem -CAkey ca.key -extfile names -out cert.pem",
    ):
        subprocess.run(command.split(), cwd=folder, check=True, capture_output=True)


async def test_tls_with_certificates_on_both_sides(tmp_path: Path) -> None:
    """With certificates it works; without our own, or with another authority, it does not."""
    make_certificates(tmp_path)
    ca, cert, key = (tmp_path / name for name in ("ca.pem", "cert.pem", "key.pem"))
    flags = ("--cert-file", str(cert), "--key-file", str(key))
    flags += ("--client-cert-auth", "--trusted-ca-file", str(ca))
    async with EtcdServer(tmp_path, *flags, scheme="https") as etcd:
        async with client_of(etcd.endpoint, ca_file=ca, cert_file=cert, key_file=key) as client:
            await write(client, 1)
            watcher = Watcher(client, 1)
            await until(lambda: watcher.keys == numbered(1, 2))
            await watcher.stop()
        for wrong in ({"ca_file": ca}, {}):
            async with client_of(etcd.endpoint, **wrong) as client:
                with pytest.raises(EtcdUnavailable):
                    await write(client, 2, timeout_s=0.3)


async def lock(etcd: EtcdServer) -> None:
    """Asks for user and password from now on."""
    await etcd.ctl("user", "add", "root:right-5f1")
    await etcd.ctl("user", "grant-role", "root", "root")
    await etcd.ctl("auth", "enable")


async def test_a_user_logs_in_and_again_when_the_token_is_no_longer_known(tmp_path: Path) -> None:
    """Over plaintext too; tokens end with their time and with a restart, and nobody notices."""
    async with (
        EtcdServer(tmp_path, "--auth-token-ttl", "1") as etcd,
        client_of(etcd.endpoint, user="root", password="right-5f1") as client,
    ):
        await write(client, 0)  # before etcd asks for a user
        await lock(etcd)
        await write(client, 1)
        lease = secrets.randbits(62)
        await client.grant(lease, 60, T)
        async with client_of(etcd.endpoint, user="root", password="wrong-7a2") as wrong:
            with pytest.raises(EtcdRefused) as refused:
                await write(wrong, 2)
        assert "root" in str(refused.value)
        assert "wrong-7a2" not in str(refused.value)
        async with client_of(etcd.endpoint) as nobody:
            with pytest.raises(EtcdRefused):
                await write(nobody, 2)
        watcher = Watcher(client, 1)
        await until(lambda: watcher.keys == numbered(0, 2))
        etcd.kill()
        await etcd.start()  # which forgets every token
        await write(client, 2)
        assert await client.renew(lease, T) == 60
        await until(lambda: watcher.keys == numbered(0, 3))
        await asyncio.sleep(2.1)  # the token's time, and etcd's tick for looking at it
        await write(client, 3)
        await until(lambda: watcher.keys == numbered(0, 4))
        await watcher.stop()


async def test_a_login_that_is_not_answered_holds_no_call_beyond_its_time(tmp_path: Path) -> None:
    """Nor does one call wait for the login of another; once etcd answers, all are logged in."""
    async with (
        EtcdServer(tmp_path) as etcd,
        client_of(etcd.endpoint, user="root", password="right-5f1") as client,
    ):
        await lock(etcd)
        etcd.freeze()
        async with within(0.8):
            calls = [client.get(b"k/0", 0.2) for _ in range(5)]
            answers = await asyncio.gather(*calls, return_exceptions=True)
        assert {type(answer) for answer in answers} == {EtcdUnavailable}
        etcd.resume()
        await write(client, 1)
