"""The decode engines of a benchmark: real session streams that hold many leases."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

import grpc
from grpc.aio import EOF  # type: ignore[attr-defined]

from bench.lease import workload
from bench.lease.processes import BenchError
from kvturn.v1 import lease_pb2, lease_pb2_grpc

_MESSAGE_BYTES_MAX = 256 * 1024 * 1024
_DEADLINE_S = 120.0
_OPENING_AT_ONCE = 16
_CHANNEL_OPTIONS = (
    ("grpc.max_send_message_length", _MESSAGE_BYTES_MAX),
    # Each engine has a connection of its own, as engines on different machines do.
    ("grpc.use_local_subchannel_pool", 1),
)


class EngineSession:
    """One engine's session."""

    def __init__(self, target: str, index: int, points: int) -> None:
        self.index = index
        self.released = 0
        """Leases that it was told to free."""
        self._points = points
        self._channel = grpc.aio.insecure_channel(target, options=_CHANNEL_OPTIONS)
        self._stub: Any = lease_pb2_grpc.LeaseServiceStub(self._channel)
        self._call: Any = None
        self._sequence = 0
        self._sending = asyncio.Lock()
        self._last = lease_pb2.EngineSessionResponse()
        self._acknowledgements: deque[asyncio.Future[None]] = deque()
        self._reader: asyncio.Task[None] | None = None

    async def open(self, inventory: list[int]) -> None:
        """Registers with those retentions, and proves the session with a heartbeat."""
        retentions = [workload.retention(self.index, each, self._points) for each in inventory]
        register = lease_pb2.RegisterEngine(
            engine=workload.description(self.index), inventory=retentions
        )
        self._call = self._stub.EngineSession()
        await self._send(register=register)
        self._last = await self._call.read()
        if not self._last.HasField("registered"):
            raise BenchError(f"engine {self.index} was not registered: {self._last}")
        self._reader = asyncio.create_task(self._read_all())
        await self.heartbeat()

    async def close(self) -> None:
        """Ends the session."""
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)
            self._call.cancel()
        await self._channel.close(None)

    async def heartbeat(self) -> None:
        """Heartbeats and waits for the acknowledgement, before which all else was processed."""
        acknowledged: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        beat = lease_pb2.Heartbeat(
            echo_term=self._last.term,
            echo_sequence=self._last.sequence,
            memory=lease_pb2.KvMemory(total_blocks=100_000, free_blocks=50_000),
        )
        await self._send(acknowledged, heartbeat=beat)
        async with asyncio.timeout(_DEADLINE_S):
            await acknowledged

    async def grant(self, number: int) -> None:
        """Announces a retention; it is not waited for."""
        retention = workload.retention(self.index, number, self._points)
        await self._send(grant=lease_pb2.Grant(retention=retention))

    async def grant_and_wait(self, number: int) -> None:
        """Announces a retention, and waits until it has been taken."""
        await self.grant(number)
        await self.heartbeat()

    async def _send(self, acknowledged: asyncio.Future[None] | None = None, **message: Any) -> None:
        async with self._sending, asyncio.timeout(_DEADLINE_S):
            self._sequence += 1
            if acknowledged is not None:
                self._acknowledgements.append(acknowledged)
            await self._call.write(
                lease_pb2.EngineSessionRequest(
                    session_number=workload.SESSION_NUMBER, sequence=self._sequence, **message
                )
            )

    async def _read_all(self) -> None:
        error = BenchError(f"the session of engine {self.index} ended")
        try:
            while (response := await self._call.read()) is not EOF:
                self._last = response
                match response.WhichOneof("message"):
                    case "heartbeat_ack":
                        self._acknowledgements.popleft().set_result(None)
                    case "release":
                        self.released += 1
                    case "grant_refused":
                        reason = response.grant_refused.reason
                        error = BenchError(f"engine {self.index}: grant refused: {reason}")
                        break
        except grpc.aio.AioRpcError as ended:
            error = BenchError(f"the session of engine {self.index} ended: {ended.details()}")
        finally:
            for waiting in self._acknowledgements:
                if not waiting.done():
                    waiting.set_exception(error)


class Fleet:
    """Engines that hold the leases `oldest` to `newest`, without a gap; readers take the oldest."""

    def __init__(self, target: str, engine_count: int, points: int) -> None:
        self.points = points
        self.engines = [EngineSession(target, index, points) for index in range(engine_count)]
        self.oldest = 1
        self.newest = 0
        self._holders: dict[int, EngineSession] = {}
        self._turn = 0

    @property
    def lease_count(self) -> int:
        """Leases that are held."""
        return self.newest - self.oldest + 1

    async def open(self, inventory_count: int = 0) -> None:
        """Opens all sessions, with so many leases in their inventories together."""
        count = len(self.engines)
        for first in range(0, count, _OPENING_AT_ONCE):
            await asyncio.gather(
                *(
                    engine.open(list(range(engine.index + 1, inventory_count + 1, count)))
                    for engine in self.engines[first : first + _OPENING_AT_ONCE]
                )
            )
        self.newest = inventory_count
        for number in range(1, inventory_count + 1):
            self._holders[number] = self.engines[(number - 1) % count]

    async def close(self) -> None:
        """Ends all sessions."""
        await asyncio.gather(*(engine.close() for engine in self.engines))

    def next_engines(self, count: int) -> list[EngineSession]:
        """Returns up to `count` engines, others each time until all have had their turn."""
        count = min(count, len(self.engines))
        chosen = [self.engines[(self._turn + each) % len(self.engines)] for each in range(count)]
        self._turn += count
        return chosen

    def new_number(self, engine: EngineSession) -> int:
        """Returns the number of the next lease, which `engine` is about to announce."""
        self.newest += 1
        self._holders[self.newest] = engine
        return self.newest

    def take_oldest(self, count: int) -> list[tuple[int, int]]:
        """Returns (engine, number) of the leases held for the longest time, to be read now."""
        assert count <= self.lease_count
        numbers = range(self.oldest, self.oldest + count)
        taken = [(self._holders.pop(number).index, number) for number in numbers]
        self.oldest += count
        return taken

    async def grant(self, count: int, engines_at_once: int) -> None:
        """Announces new leases on a few engines, and waits until they have been taken."""
        engines = self.next_engines(engines_at_once)

        async def announce(engine: EngineSession, share: int) -> None:
            for _ in range(share):
                await engine.grant(self.new_number(engine))
            await engine.heartbeat()

        shares = [count // len(engines)] * len(engines)
        shares[0] += count % len(engines)
        await asyncio.gather(*map(announce, engines, shares))

    async def heartbeat_all(self) -> None:
        """Lets each engine heartbeat once, which also acknowledges all releases."""
        for first in range(0, len(self.engines), _OPENING_AT_ONCE):
            await asyncio.gather(
                *(each.heartbeat() for each in self.engines[first : first + _OPENING_AT_ONCE])
            )
