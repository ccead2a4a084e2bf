"""Real lease service processes, and engines that talk to them with the connector's own client.

Spans are short: a session lives 1 s, a read lasts 0.4 s, so that retentions run out 1.43 s after an
engine last vouched for them (K*(TTL + R)), and leases are inherited that long.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Self, TypeVar

import grpc
from etcd_server import EtcdServer, until

from kvturn.clock import boottime_ns
from kvturn.lease_channels import error_info
from kvturn.v1 import common_pb2, lease_pb2, lease_pb2_grpc
from kvturn_cli.leash import die_with_parent
from kvturn_cli.ports import HOST, pick_free
from kvturn_connector.config import ConnectorConfig
from kvturn_connector.digest import Scope
from kvturn_connector.lease_client import LeaseClient, Question
from kvturn_connector.reader import Answer, End
from kvturn_connector.retention import Retentions
from kvturn_connector.session import EngineSession

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
    from pathlib import Path
    from types import TracebackType

T = TypeVar("T")

SESSION_TTL_S = 1.0
HEARTBEAT_S = 0.25
LONGEST_READ_S = 0.4
LEADERSHIP_S = 2
OUTLIVING = "--session-ttl=3"
OUTLIVING_HOLD_S = 3.47
"""With this flag decode holds its retentions for longer than a failover takes."""
LASTING = ("--session-ttl=10", "--heartbeat=0.25", "--longest-read=3")
"""Spans that no busy machine exceeds."""
HOLD_S = 1.43
"""K*(TTL + R), and what an engine's next look at its holds may add."""
HOLD_SLACK_S = 0.3
PATIENT_S = 5.0
"""A question deadline that no busy machine exceeds: an answer that is lost is a grant lost."""
SPANS = (
    f"--session-ttl={SESSION_TTL_S}",
    f"--heartbeat={HEARTBEAT_S}",
    f"--longest-read={LONGEST_READ_S}",
)
TOKENS = list(range(100))
SCOPE = Scope(tenant="", model="m")
UNREACHABLE = common_pb2.VERDICT_LEASE_SERVICE_UNREACHABLE
GUARD_S = 120.0
_taken: set[int] = set()
_threads = ThreadPoolExecutor(32, "lease-rig")
"""Calls that wait for a frozen service hold up no others."""


def conversation(name: str) -> common_pb2.ConversationKey:
    """As a router names it for a client without a key."""
    return common_pb2.ConversationKey(model="m", conversation_id=name)


class LeaseProcess:
    """One process of the lease service, on a port of its own for as long as the test runs."""

    def __init__(self, folder: Path, *flags: str, name: str = "lease") -> None:
        self.port = pick_free(_taken)
        self.endpoint = f"{HOST}:{self.port}"
        self.log = folder / f"{name}.log"
        self._flags = flags
        self._process: subprocess.Popen[bytes] | None = None

    async def __aenter__(self) -> Self:
        self.launch()
        await until(self.listens, GUARD_S)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()

    def launch(self) -> None:
        """Starts it and does not wait."""
        assert self._process is None
        others = ("KVTURN_", "OTEL_")
        environment = {k: v for k, v in os.environ.items() if not k.startswith(others)}
        with self.log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "kvturn_lease", f"--port={self.port}", *SPANS, *self._flags],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
                preexec_fn=die_with_parent,
            )

    async def listens(self) -> bool:
        """Tells whether it answers, as leader or not."""
        assert self._process is not None
        assert self._process.poll() is None, self.log.read_text()[-2_000:]
        return bool(await self.stance())

    async def stance(self) -> str:
        """Returns "LEADS", the reason of its refusal, or "" if it does not answer."""
        try:
            await self.call("ListEngines", lease_pb2.ListEnginesRequest())
        except grpc.RpcError as error:
            return error_info(error)[0]  # type: ignore[arg-type]
        return "LEADS"

    async def leads(self) -> bool:
        """Tells whether it leads."""
        return await self.stance() == "LEADS"

    async def call(self, method: str, request: Any, timeout_s: float = 1.0) -> Any:
        """Makes one call over a connection of its own.

        On a thread: grpc.aio shares one queue among all event loops of a process, and each
        engine here has one.
        """
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(_threads, self._call, method, request, timeout_s)

    def _call(self, method: str, request: Any, timeout_s: float) -> Any:
        options = (("grpc.use_local_subchannel_pool", 1),)
        with grpc.insecure_channel(self.endpoint, options=options) as channel:
            stub = lease_pb2_grpc.LeaseServiceStub(channel)
            return getattr(stub, method)(request, timeout=timeout_s)

    async def resolve(self, name: str) -> Any:
        """Returns who holds a conversation."""
        request = lease_pb2.ResolveConversationRequest(conversation=conversation(name))
        return await self.call("ResolveConversation", request)

    async def lease_of(self, name: str, timeout_s: float = GUARD_S) -> str:
        """Returns the lease to read of a conversation as soon as there is one."""
        return await lease_of((self,), name, timeout_s)

    async def engines(self) -> list[str]:
        """Returns the engines with a session, none if it does not lead."""
        with contextlib.suppress(grpc.RpcError):
            answer = await self.call("ListEngines", lease_pb2.ListEnginesRequest())
            return [engine.description.engine_id for engine in answer.engines]
        return []

    def kill(self) -> None:
        """Kills it with -9; nothing if it does not run."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def terminate(self) -> None:
        """Asks it to stop in order; does not wait."""
        assert self._process is not None
        self._process.terminate()

    def freeze(self) -> None:
        """Stops it in the middle of whatever it does."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Lets a frozen one go on."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)


@contextlib.asynccontextmanager
async def lease_cluster(
    folder: Path, etcd: EtcdServer, *more: str, count: int = 2
) -> AsyncIterator[list[LeaseProcess]]:
    """Runs so many lease services on one etcd; the first that leads comes first."""
    secret = folder / "secret"
    secret.write_text("0123456789abcdef0123456789abcdef")
    flags = (
        f"--store=etcd://{etcd.endpoint}",
        f"--leadership={LEADERSHIP_S}",
        f"--secret-file={secret}",
        *more,
    )
    services = [LeaseProcess(folder, *flags, name=f"lease{index}") for index in range(count)]
    async with contextlib.AsyncExitStack() as stack:
        for service in services:
            service.launch()
            stack.callback(service.kill)
        for service in services:
            await until(service.listens, GUARD_S)
        first = await leader_of(services)
        yield [first, *(service for service in services if service is not first)]


async def leader_of(services: Sequence[LeaseProcess]) -> LeaseProcess:
    """Returns the one that leads, as soon as one does."""
    found: list[LeaseProcess] = []

    async def look() -> bool:
        found.extend([service for service in services if await service.leads()])
        return bool(found)

    await until(look, GUARD_S)
    return found[0]


async def lease_of(services: Sequence[LeaseProcess], name: str, timeout_s: float = GUARD_S) -> str:
    """Returns the lease to read of a conversation as soon as the leader knows one."""
    found = ""

    async def look() -> bool:
        nonlocal found
        for service in services:
            with contextlib.suppress(grpc.RpcError):
                found = found or (await service.resolve(name)).lease_id
        return bool(found)

    await until(look, timeout_s)
    return found


def connector_config(endpoints: Sequence[str], question_s: float) -> ConnectorConfig:
    return ConnectorConfig.from_extra(
        {
            "kvturn_lease_endpoint": ",".join(endpoints),
            "bidirectional_kv_xfer": True,
            "kvturn_question_deadline_ms": question_s * 1000,
        }
    )


class Engine:
    """The connector's client as a decode engine uses it, or as prefill does, without vLLM."""

    def __init__(
        self,
        endpoints: Sequence[str],
        name: str = "d1",
        incarnation: str | None = None,
        question_s: float = PATIENT_S,
        http_address: str = "",
    ) -> None:
        self.incarnation = incarnation or name
        nixl = common_pb2.NixlAddress(
            nixl_engine_id=self.incarnation, host=HOST, port=1, tp_size=1, dcp_size=1, pp_size=1
        )
        description = lease_pb2.EngineDescription(
            engine_id=name,
            incarnation=self.incarnation,
            role=common_pb2.ENGINE_ROLE_DECODE,
            http_address=http_address,
            nixl=nixl,
        )
        retentions = Retentions(self.incarnation, 100, 480 * 10**9)
        self.session = EngineSession(description, retentions, lease_pb2.KvMemory)
        self.client = LeaseClient(connector_config(endpoints, question_s), name, self.session)
        self._questions = itertools.count()
        self._freed: dict[int, float] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await asyncio.to_thread(self.client.shutdown)

    async def until_registered(self, timeout_s: float = GUARD_S) -> None:
        await until(lambda: self.client.registered, timeout_s)

    def retain(self, number: int, name: str) -> None:
        """Holds the blocks of a finished turn and offers them."""
        offer = common_pb2.Retention(
            conversation=conversation(name),
            token_count=len(TOKENS),
            block_size=16,
            groups=[common_pb2.BlockGroup(block_ids=range(1, 8))],
            turn=number,
        )
        self.client.retain(number, offer, TOKENS, SCOPE, "")

    @property
    def freed(self) -> dict[int, float]:
        """When each retention was freed, by number, in seconds of the monotonic clock."""
        for one in self.client.take_freed():
            self._freed[one.number] = time.monotonic()
        return self._freed

    async def ask(self, lease_id: str, name: str) -> Answer | int:
        """Asks as prefill does. Returns the answer, or the verdict where there was none."""
        number = str(next(self._questions))
        key = conversation(name)
        self.client.ask(Question(number, lease_id, key, TOKENS, SCOPE, "", boottime_ns()))
        answers: list[tuple[Question, Answer | int]] = []
        await until(lambda: bool(answers.extend(self.client.take_answers()) or answers), GUARD_S)
        ((question, answer),) = answers
        assert question.request_id == number
        return answer

    async def granted(self, lease_id: str, name: str) -> bool:
        """Asks as prefill does; tells whether it may read."""
        answer = await self.ask(lease_id, name)
        return isinstance(answer, Answer) and answer.granted

    def end_read(self, lease_id: str) -> None:
        """Tells that a read is over."""
        end = lease_pb2.EndReadRequest(lease_id=lease_id, outcome=lease_pb2.READ_OUTCOME_COMPLETED)
        self.client.end_read(End(end))


class EngineProcess:
    """An Engine in a process of its own, that can be frozen and killed."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def tell(self, *words: object) -> Any:
        """Has it do something; returns its answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(" ".join(map(str, words)).encode() + b"\n")
        async with asyncio.timeout(GUARD_S):
            return json.loads(await self._process.stdout.readline())

    async def until_registered(self) -> None:
        async def registered() -> bool:
            return bool((await self.tell("state"))["registered"])

        await until(registered, GUARD_S)

    async def freed(self) -> list[int]:
        """Numbers of what it has freed so far."""
        return list((await self.tell("state"))["freed"])

    def send_signal(self, number: int) -> None:
        self._process.send_signal(number)


@contextlib.asynccontextmanager
async def engine_process(
    endpoints: Sequence[str], name: str, incarnation: str
) -> AsyncIterator[EngineProcess]:
    """Runs an engine until the block ends."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, __file__, ",".join(endpoints), name, incarnation),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        preexec_fn=die_with_parent,
    )
    try:
        yield EngineProcess(process)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def obey(endpoints: Sequence[str], name: str, incarnation: str) -> None:
    """An engine process: takes one command per line of stdin, answers with one of JSON."""
    async with Engine(endpoints, name, incarnation) as engine:
        while line := await asyncio.to_thread(sys.stdin.readline):
            match line.split():
                case ["retain", number, conversation_id]:
                    engine.retain(int(number), conversation_id)
            state = {"registered": engine.client.registered, "freed": sorted(engine.freed)}
            print(json.dumps(state), flush=True)


async def timed(awaitable: Awaitable[T]) -> tuple[T, float]:
    """Returns a result and how many seconds it took."""
    began_s = time.monotonic()
    return await awaitable, time.monotonic() - began_s


async def steadily(condition: Callable[[], Awaitable[object]], span_s: float) -> bool:
    """Tells whether a condition held whenever it was looked at for that long."""
    end_s = time.monotonic() + span_s
    while time.monotonic() < end_s:
        if not await condition():
            return False
        await asyncio.sleep(0.02)
    return True


if __name__ == "__main__":
    asyncio.run(obey(sys.argv[1].split(","), sys.argv[2], sys.argv[3]))
