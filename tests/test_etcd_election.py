"""One lease service leads, others stand by: elected in real etcd, as real processes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import signal
import time
from collections import Counter
from typing import TYPE_CHECKING

import grpc
import pytest
from awake import within
from etcd_server import EtcdServer, until
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status
from lease_rig import GUARD_S, OUTLIVING, LeaseProcess
from test_etcd_client import make_certificates
from test_lease_service import RawEngine

from kvturn.clock import boottime_ns
from kvturn.v1 import common_pb2, lease_pb2, lease_pb2_grpc
from kvturn_lease.config import ConfigError, parse_config
from kvturn_lease.election import Election
from kvturn_lease.etcd.client import EtcdClient
from kvturn_lease.etcd.config import EtcdConfig
from kvturn_lease.leadership import Leadership
from kvturn_lease.outages import Outages

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from kvturn_lease.etcd_store import Fence

S = 1_000_000_000
LEADERSHIP_S = 5
"""More than a pause of a busy machine."""
SESSION_TTL = "--session-ttl=10"
SLACK_S = 2.5
"""etcd looks for ended leases twice a second; two busy cores do the rest."""
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class Candidate(LeaseProcess):
    """A lease service that stands for election."""

    def __init__(self, folder: Path, etcd: EtcdServer, name: str, *flags: str) -> None:
        secret = folder / "secret"
        secret.write_text("0123456789abcdef")
        super().__init__(
            folder,
            f"--store=etcd://{etcd.endpoint}",
            f"--secret-file={secret}",
            f"--leadership={LEADERSHIP_S}",
            SESSION_TTL,
            *flags,
            name=name,
        )

    async def stop(self) -> int:
        """Ends it in order; returns its exit code."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        code = await asyncio.to_thread(self._process.wait, GUARD_S)
        self._process = None
        return code

    async def refusal(self) -> tuple[str, str]:
        """Returns with which reason it refuses, and which leader it names."""
        with pytest.raises(grpc.RpcError) as raised:
            await self.call("ListEngines", lease_pb2.ListEnginesRequest(), GUARD_S)
        assert raised.value.code() == grpc.StatusCode.UNAVAILABLE
        status = rpc_status.from_call(raised.value)
        info = error_details_pb2.ErrorInfo()
        assert status is not None, raised.value.details()
        assert status.details[0].Unpack(info)
        return info.reason, info.metadata.get("leader", "")

    async def health(self, service: str) -> int:
        """Returns what its health check says."""

        def ask() -> int:
            with grpc.insecure_channel(self.endpoint) as channel:
                request = health_pb2.HealthCheckRequest(service=service)
                return health_pb2_grpc.HealthStub(channel).Check(request, timeout=GUARD_S).status

        return await asyncio.to_thread(ask)

    @contextlib.asynccontextmanager
    async def engine(self, name: str, incarnation: str, number: int) -> AsyncIterator[RawEngine]:
        """An engine's session on it."""
        async with grpc.aio.insecure_channel(self.endpoint) as channel:
            engine = RawEngine(lease_pb2_grpc.LeaseServiceStub(channel), name, number)
            description = engine.description()
            description.incarnation = incarnation
            await engine.send(register=lease_pb2.RegisterEngine(engine=description))
            yield engine

    def lines(self, text: str) -> int:
        """Returns how many lines of its log hold the text."""
        return sum(text in line for line in self.log.read_text().splitlines())


@contextlib.asynccontextmanager
async def two_services(
    folder: Path, etcd: EtcdServer, *flags: str
) -> AsyncIterator[tuple[Candidate, Candidate]]:
    """A leader and a standby that knows it."""
    first = Candidate(folder, etcd, "a", *flags)
    second = Candidate(folder, etcd, "b", *flags)
    async with first:
        await until(first.leads)
        async with second:
            await until(lambda: knows(second, first))
            yield first, second


async def knows(standby: Candidate, leader: Candidate) -> bool:
    return await standby.refusal() == ("NOT_LEADER", leader.endpoint)


# ---- one leads -------------------------------------------------------------------------------


async def test_a_leader_that_stops_hands_over_at_once(tmp_path: Path) -> None:
    """The standby refuses and names the leader; when that is told to stop, it leads."""
    async with EtcdServer(tmp_path) as etcd, two_services(tmp_path, etcd) as (first, second):
        assert await first.health("kvturn.v1.LeaseService") == SERVING
        assert await second.health("kvturn.v1.LeaseService") == NOT_SERVING
        assert await second.health("") == SERVING
        with pytest.raises(grpc.RpcError):
            async with second.engine("d1", "i1", 1) as engine:
                await engine.read()
        async with within(1.5):
            assert await first.stop() == 0
            await until(second.leads)
        assert await second.health("kvturn.v1.LeaseService") == SERVING
        assert await second.stop() == 0
        assert await etcd.ctl("get", "", "--prefix") == ""
        assert "found 0 leases" in await etcd.ctl("lease", "list")


class SlowOffice:
    """An office that is tidied up only when told so."""

    def __init__(self) -> None:
        self.assumed, self.leaving, self.may_leave = (asyncio.Event() for _ in range(3))
        self.left = False

    async def assume(self, fence: Fence, until_ns: int) -> None:
        self.assumed.set()

    def extend(self, until_ns: int) -> bool:
        return True

    async def vacate(self) -> None:
        self.leaving.set()
        await self.may_leave.wait()
        self.left = True

    def stand_by(self, refusal: Exception) -> None:
        pass


async def test_a_leader_told_to_stop_while_its_term_ends_tidies_up(tmp_path: Path) -> None:
    """What writes to etcd is ended before the client is closed, and the next one leads at once."""
    async with EtcdServer(tmp_path) as etcd:
        client = EtcdClient(EtcdConfig(endpoints=(etcd.endpoint,)))
        office, outages = SlowOffice(), Outages(logging.getLogger("test"))
        election = Election(
            client, office, outages, boottime_ns, key=b"leader", address="h:1", ttl_s=60
        )
        running = asyncio.create_task(election.run())
        await office.assumed.wait()
        election.over.set()
        await office.leaving.wait()
        running.cancel()
        asyncio.get_running_loop().call_later(0.1, office.may_leave.set)
        await asyncio.wait({running}, timeout=GUARD_S)
        assert running.cancelled()
        assert office.left
        assert await etcd.ctl("get", "leader") == ""
        await client.close()


async def test_a_leader_key_that_would_never_run_out_is_removed(tmp_path: Path) -> None:
    """As a copy of etcd's keys without their leases leaves it: nobody leads there, ever."""
    async with EtcdServer(tmp_path) as etcd:
        await etcd.ctl("put", "kvturn/leader", "somebody:1")
        async with Candidate(tmp_path, etcd, "a") as one:
            await until(one.leads)
            assert one.lines("removing a leader key") == 1


async def test_one_that_may_not_read_the_records_says_so_once_and_leaves_the_lead(
    tmp_path: Path,
) -> None:
    """Its user may write the leader key alone. Another, whose user may do all, leads for good."""
    words = tmp_path / "words"
    words.write_text("word")
    async with EtcdServer(tmp_path) as etcd:
        for command in (
            "user add root:word",
            "user grant-role root root",
            "user add few:word",
            "role add few",
            "role grant-permission few readwrite kvturn/leader",
            "user grant-role few few",
            "auth enable",
        ):
            await etcd.ctl(*command.split())
        login = f"--etcd-password-file={words}"
        async with Candidate(tmp_path, etcd, "few", "--etcd-user=few", login) as few:
            await until(lambda: few.lines("cannot be read") == 1)
            async with Candidate(tmp_path, etcd, "all", "--etcd-user=root", login) as able:
                await until(able.leads)
                await until(lambda: knows(few, able))
                assert few.lines("cannot be read") == 1
                assert few.lines("permission denied") == 1
                assert few.lines("no longer leading") == 0


async def test_a_leader_that_is_killed_is_replaced_and_its_fences_hold(tmp_path: Path) -> None:
    """Killed with -9: the standby leads when the leadership has run out, knows who is fenced and
    what became of a conversation, and takes no engine for alive that it has not heard."""
    async with EtcdServer(tmp_path) as etcd, two_services(tmp_path, etcd) as (first, second):
        async with first.engine("d1", "old", 1) as engine:
            await engine.read()
            async with first.engine("d1", "new", 1) as newer:
                await newer.read()
                await newer.beat()
                retention = newer.retention(1)
                retention.lease_id = "new.1.1"
                await newer.send(grant=lease_pb2.Grant(retention=retention))
                await newer.beat()

                async def recorded() -> bool:
                    return len((await etcd.ctl("get", "", "--prefix")).splitlines()) == 6

                await until(recorded)
                first.kill()
                async with within(LEADERSHIP_S + SLACK_S):
                    await until(second.leads)
        assert await second.engines() == []
        key = common_pb2.ConversationKey(tenant="t", model="m", conversation_id="c")
        request = lease_pb2.ResolveConversationRequest(conversation=key)

        async def recalled() -> bool:
            answer = await second.call("ResolveConversation", request)
            return (answer.engine_id, answer.verdict) == ("d1", common_pb2.VERDICT_ENGINE_LOST)

        await until(recalled)
        async with second.engine("d1", "old", 2) as stale:
            code, info = await stale.error()
            assert (code, info.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "SESSION_FENCED")
        async with second.engine("d1", "new", 2) as back:
            assert (await back.read()).HasField("registered")


async def test_a_leader_that_was_frozen_never_answers_again_as_leader(tmp_path: Path) -> None:
    """Questions and heartbeats that reached it while it was frozen, and all that come after it
    was resumed, are refused; the engines' sessions on it end."""
    async with EtcdServer(tmp_path) as etcd, two_services(tmp_path, etcd) as (first, second):
        async with first.engine("d1", "i1", 1) as engine:
            await engine.read()
            await engine.beat()
            first.freeze()
            heartbeat = lease_pb2.Heartbeat(
                echo_term=engine.last.term, echo_sequence=engine.last.sequence
            )
            await engine.send(heartbeat=heartbeat)
            waiting = [asyncio.create_task(first.refusal()) for _ in range(4)]
            async with within(LEADERSHIP_S + SLACK_S):
                await until(second.leads)
            first.resume()
            assert {reason for reason, _ in await asyncio.gather(*waiting)} == {"NOT_LEADER"}
            code, info = await engine.error()
            assert (code, info.reason) == (grpc.StatusCode.UNAVAILABLE, "NOT_LEADER")
        await until(lambda: knows(first, second))
        assert first.lines("no longer leading") == 1


# ---- etcd fails ------------------------------------------------------------------------------


async def test_a_frozen_etcd_silences_the_leader_in_time(tmp_path: Path) -> None:
    """Before etcd could elect another the leader stops speaking; both say that etcd is away; when
    it is back one leads within seconds. Each change is one line."""
    async with EtcdServer(tmp_path) as etcd, two_services(tmp_path, etcd) as (first, second):
        etcd.freeze()
        async with within(LEADERSHIP_S + 0.5):
            await until(lambda: not_leading(first))
        for each in (first, second):
            await until(lambda each=each: says_store_unavailable(each))
        etcd.resume()
        async with within(3):
            await until(lambda: either_leads(first, second))
        for each in (first, second):
            assert each.lines("etcd does not") == 1
            assert "Traceback" not in each.log.read_text()


async def test_short_outages_of_etcd_do_not_unseat_the_leader(tmp_path: Path) -> None:
    """etcd is killed and started again several times; the leader leads on. A wiped etcd, or a
    leader key that somebody deleted, ends the term, and somebody is elected again."""
    async with EtcdServer(tmp_path) as etcd, Candidate(tmp_path, etcd, "a") as only:
        await until(only.leads)
        for _ in range(2):
            etcd.kill()
            await etcd.start()
            await until(lambda: renewed(etcd))
        assert only.lines("no longer leading") == 0
        etcd.kill()
        etcd.wipe()
        await etcd.start()
        await until(lambda: only.lines("INFO kvturn.lease: leading") == 2)
        await etcd.ctl("del", "kvturn/leader")
        await until(lambda: only.lines("INFO kvturn.lease: leading") == 3)
        await until(only.leads)


async def test_an_etcd_without_space_leaves_the_leader_in_office(tmp_path: Path) -> None:
    """Keepalives work, so it leads on, far past the leadership TTL; it says once what is wrong."""
    quota = ("--quota-backend-bytes", str(1024 * 1024))
    async with EtcdServer(tmp_path, *quota) as etcd, Candidate(tmp_path, etcd, "a") as leader:
        await until(leader.leads)
        await etcd.fill()
        async with leader.engine("d1", "i1", 1) as engine:
            await engine.read()
            ends_s = time.monotonic() + LEADERSHIP_S + 0.3
            while time.monotonic() < ends_s:
                await engine.beat()
                await asyncio.sleep(0.1)
            assert await leader.leads()
        assert leader.lines("out of space") == 1
        assert leader.lines("no longer leading") == 0


async def not_leading(service: Candidate) -> bool:
    return await service.leads() is False


async def either_leads(first: Candidate, second: Candidate) -> bool:
    return bool(await first.leads() or await second.leads())


async def says_store_unavailable(service: Candidate) -> bool:
    return await service.refusal() == ("STORE_UNAVAILABLE", "")


async def renewed(etcd: EtcdServer) -> bool:
    """Tells whether etcd got a keepalive since it started."""
    metrics = (await etcd.get("/metrics")).decode()
    name = "etcd_debugging_lease_renewed_total "
    return any(line.startswith(name) and line != f"{name}0" for line in metrics.splitlines())


# ---- what etcd keeps -------------------------------------------------------------------------


async def test_nothing_of_engines_that_are_gone_stays(tmp_path: Path) -> None:
    """Engines with retentions come, heartbeat and go: but for the leader's, keys and etcd leases
    are none in the end. Heartbeats in between add no revision."""
    async with EtcdServer(tmp_path) as etcd, Candidate(tmp_path, etcd, "a", OUTLIVING) as leader:
        await until(leader.leads)
        async with contextlib.AsyncExitStack() as stack:
            beats: Counter[str] = Counter()
            for number in range(5):
                name = f"d{number}"
                engine = await stack.enter_async_context(leader.engine(name, f"inc-{name}", 1))
                await engine.read()
                await engine.beat()
                retention = engine.retention(1)
                retention.conversation.conversation_id = f"c{number}"
                await engine.send(grant=lease_pb2.Grant(retention=retention))
                beating = asyncio.create_task(keep_beating(engine, beats))
                stack.callback(beating.cancel)
            keys = ("get", "kvturn/", "--prefix", "--keys-only")

            async def all_recorded() -> bool:
                return len((await etcd.ctl(*keys)).split()) == 11

            await until(all_recorded)
            before = await etcd.ctl("get", "none", "--write-out", "fields")
            beats.clear()
            await until(lambda: len(beats) == 5 and min(beats.values()) >= 20)
            after = await etcd.ctl("get", "none", "--write-out", "fields")
            assert revision_of(after) == revision_of(before)

        async def only_the_leader_is_left() -> bool:
            leases = await etcd.ctl("lease", "list")
            found = (await etcd.ctl(*keys)).split()
            return found == ["kvturn/leader"] and "found 1 leases" in leases

        await until(only_the_leader_is_left)


async def keep_beating(engine: RawEngine, beats: Counter[str]) -> None:
    """Heartbeats for an engine, and counts them."""
    while True:
        await engine.beat()
        beats[engine.name] += 1
        await asyncio.sleep(0.05)


def revision_of(fields: str) -> str:
    return next(line for line in fields.splitlines() if "Revision" in line)


# ---- the core of it, and its settings --------------------------------------------------------


def test_trust_counts_from_when_the_keepalive_was_sent() -> None:
    """3 s granted are trusted for 3 s / K from the sending, and renewed after a third of that."""
    leadership = Leadership()
    assert not leadership.leads(1)
    leadership.acknowledge(10 * S, 3)
    assert leadership.until_ns == 10 * S + int(3 * S * 0.99 / 1.01)
    assert leadership.leads(leadership.until_ns - 1)
    assert not leadership.leads(leadership.until_ns)
    assert leadership.renew_ns == 10 * S + int(3 * S * 0.99 / 1.01) // 3
    until_ns = leadership.until_ns
    leadership.acknowledge(9 * S, 3)  # an answer that came late shortens nothing
    assert leadership.until_ns == until_ns
    leadership.acknowledge(11 * S, 3)
    assert leadership.until_ns == until_ns + S


KEY_OF_ANOTHER = {"ca": "ca.pem", "cert": "cert.pem", "key": "ca.key"}


def test_wrong_settings_of_etcd_are_refused_by_name(tmp_path: Path) -> None:
    """Each names the flag and the fix, and no password is ever part of the message."""
    nowhere = str(tmp_path / "nowhere")
    text, empty = tmp_path / "text", tmp_path / "empty.pem"
    text.write_text("short")
    empty.write_text("-----BEGIN CERTIFICATE-----")
    make_certificates(tmp_path)
    strangers = {name: tmp_path / file for name, file in KEY_OF_ANOTHER.items()}
    etcd = "--store=etcd://h:1"
    not_a_store = r"--store \(KVTURN_LEASE_STORE\) must be memory or etcd://HOST:PORT"
    for argv, words in (
        (["--store=redis://h:1"], not_a_store),
        (["--store=etcd://h"], not_a_store),
        (["--store=etcd://h:1,"], not_a_store),
        (["--store=etcd://u:word@h:1"], "the user comes by --etcd-user"),
        (["--store=etcd://::1:2379"], not_a_store),
        (["--store=etcd://a b:1"], not_a_store),
        ([f"--etcd-ca={text}"], "etcd-ca needs --store etcd"),
        ([etcd, f"--etcd-ca={nowhere}"], "etcd-ca .*nowhere: cannot be read"),
        ([etcd, f"--etcd-ca={text}"], "etcd-ca .*text: holds no certificate in PEM"),
        ([etcd, f"--etcd-ca={empty}"], "etcd-ca .*empty.pem: holds no certificate"),
        (
            [etcd, *(f"--etcd-{name}={file}" for name, file in strangers.items())],
            "is not the key, without a passphrase, of the certificate",
        ),
        ([etcd, "--etcd-user=u"], "etcd-user needs a password, which comes by --etcd-pass"),
        ([etcd, "--etcd-user=u:word"], "etcd-user must be a name alone"),
        ([etcd, f"--secret-file={text}"], "at least 16 bytes"),
        (
            [etcd, "--host=0.0.0.0"],
            r"advertise \(KVTURN_LEASE_ADVERTISE\) must be given, HOST:PORT",
        ),
        ([etcd, "--host=0:0::0"], r"advertise \(KVTURN_LEASE_ADVERTISE\) must be given, HOST:PORT"),
        ([etcd, "--advertise=h"], r"advertise \(KVTURN_LEASE_ADVERTISE\) must be HOST:PORT"),
        ([etcd, "--advertise=::1:7600"], r"advertise \(KVTURN_LEASE_ADVERTISE\) must be HOST:PORT"),
        (
            [etcd, "--leadership=1"],
            r"leadership \(KVTURN_LEASE_LEADERSHIP\) must be 2 to 60 whole seconds",
        ),
        (
            [etcd, "--leadership=2.5"],
            r"leadership \(KVTURN_LEASE_LEADERSHIP\) must be 2 to 60 whole seconds",
        ),
    ):
        with pytest.raises(ConfigError, match=words) as refused:
            parse_config(argv, {})
        assert "word" not in str(refused.value).replace("password", "")


def test_secrets_come_from_files_or_the_environment_and_are_not_shown(tmp_path: Path) -> None:
    """Neither a password nor the cluster secret is in what a settings object prints."""
    password, secret = tmp_path / "password", tmp_path / "secret"
    password.write_text("from-file\n")
    secret.write_text(secrets.token_hex(16))
    argv = ["--store=etcd://a:1,b:2", "--etcd-user=u", f"--secret-file={secret}"]
    environ = {"KVTURN_LEASE_ETCD_PASSWORD": "from-environ"}
    config = parse_config(argv, environ)
    assert config.etcd is not None
    assert config.etcd.endpoints == ("a:1", "b:2")
    assert config.etcd.password == "from-environ"
    config = parse_config([*argv, f"--etcd-password-file={password}"], environ)
    assert config.etcd is not None
    assert config.etcd.password == "from-file"
    assert "from-" not in repr(config)
    assert secret.read_text() not in repr(config)


def test_certificates_that_belong_together_are_taken(tmp_path: Path) -> None:
    make_certificates(tmp_path)
    files = {"ca": "ca.pem", "cert": "cert.pem", "key": "key.pem"}
    flags = [f"--etcd-{name}={tmp_path / file}" for name, file in files.items()]
    config = parse_config(["--store=etcd://[::1]:2379", *flags], {})
    assert config.etcd is not None
    assert config.etcd.key_file == tmp_path / "key.pem"


async def test_a_standby_names_a_leader_at_an_ipv6_address_as_clients_do(tmp_path: Path) -> None:
    """By default, from its --host: clients compare the name with the endpoints they were given."""
    async with EtcdServer(tmp_path) as etcd:
        first = Candidate(tmp_path, etcd, "a", "--host=::1")
        first.endpoint = f"[::1]:{first.port}"
        async with first:
            await until(first.leads)
            async with Candidate(tmp_path, etcd, "b") as second:
                await until(lambda: knows(second, first))
