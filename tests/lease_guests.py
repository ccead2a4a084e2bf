"""A lease service process with guests: engines and a router that say what a test has them say.

Sessions live for as long as the test: nobody has to heartbeat.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import grpc.aio
from lease_rig import GUARD_S, LeaseProcess

from kvturn.v1 import common_pb2, lease_pb2, lease_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

SPANS = ("--session-ttl=600", "--heartbeat=100", "--longest-read=3", "--idle=900", "--max-hold=900")


@contextlib.asynccontextmanager
async def lease_service(folder: Path, *flags: str) -> AsyncIterator[Guests]:
    """Runs a lease service; its guests come as they are asked to."""
    async with LeaseProcess(folder, *SPANS, *flags) as process:
        guests = Guests(process)
        try:
            yield guests
        finally:
            await guests.leave()


class Guests:
    """The lease service's process, and who talks to it."""

    def __init__(self, process: LeaseProcess) -> None:
        self.process = process
        self.endpoint = process.endpoint
        self._channels: list[grpc.aio.Channel] = []

    def _stub(self) -> Any:
        channel = grpc.aio.insecure_channel(self.endpoint)
        self._channels.append(channel)
        return lease_pb2_grpc.LeaseServiceStub(channel)

    async def engine(self, engine_id: str, **more: Any) -> EngineGuest:
        """Returns an engine with a session, as a decode engine unless told otherwise."""
        return await EngineGuest(self._stub(), engine_id).register(**more)

    async def router(self) -> RouterGuest:
        """Returns a router with a session."""
        return await RouterGuest(self._stub()).open()

    async def leave(self) -> None:
        """Ends all sessions without a word."""
        for channel in self._channels:
            await channel.close()
        self._channels.clear()


class EngineGuest:
    """An engine's session."""

    def __init__(self, stub: Any, engine_id: str) -> None:
        self.engine_id = engine_id
        self._call = stub.EngineSession()
        self._sequence = 0
        self._granted = 0

    async def register(
        self,
        role: common_pb2.EngineRole = common_pb2.ENGINE_ROLE_DECODE,
        memory: tuple[int, int, int] = (100, 60, 30),
        **about: Any,
    ) -> EngineGuest:
        """Opens the session; `memory` is total, free and retained blocks."""
        told = {
            "engine_id": self.engine_id,
            "incarnation": self.engine_id,
            "role": role,
            "http_address": f"http://{self.engine_id}:8200",
            "model": "m",
            "vllm_version": "0.29.0",
            "connector_version": "0.1.0",
            "kv_blocks": 100,
            "block_size": 16,
        }
        description = lease_pb2.EngineDescription(**{**told, **about})
        description.nixl.CopyFrom(
            common_pb2.NixlAddress(
                nixl_engine_id="n", host="h", port=1, tp_size=1, dcp_size=1, pp_size=1
            )
        )
        first = await self._say(register=lease_pb2.RegisterEngine(engine=description))
        total, free, retained = memory
        self._memory = lease_pb2.KvMemory(
            total_blocks=total, free_blocks=free, retained_blocks=retained
        )
        beat = lease_pb2.Heartbeat(
            echo_term=first.term, echo_sequence=first.sequence, memory=self._memory
        )
        await self._say(heartbeat=beat)
        return self

    async def grant(self, name: str, turn: int, tokens: int = 64, tenant: str = "") -> str:
        """Retains a turn's KV and waits until the lease service knows; returns the lease id."""
        self._granted += 1
        count = -(-tokens // 16)
        lease_id = f"{self.engine_id}.{self._granted}.1"
        retention = common_pb2.Retention(
            lease_id=lease_id,
            conversation=common_pb2.ConversationKey(tenant=tenant, model="m", conversation_id=name),
            token_count=tokens,
            block_size=16,
            groups=[common_pb2.BlockGroup(block_ids=range(count))],
            digests=common_pb2.TokenDigests(
                stride_tokens=16, digest_bytes=16, values=bytes(16) * count
            ),
            turn=turn,
        )
        await self._send(grant=lease_pb2.Grant(retention=retention))
        await self._say(heartbeat=lease_pb2.Heartbeat(memory=self._memory))
        return lease_id

    async def _send(self, **message: Any) -> None:
        self._sequence += 1
        await self._call.write(
            lease_pb2.EngineSessionRequest(session_number=1, sequence=self._sequence, **message)
        )

    async def _say(self, **message: Any) -> Any:
        await self._send(**message)
        async with asyncio.timeout(GUARD_S):
            return await self._call.read()


class RouterGuest:
    """A router's session."""

    def __init__(self, stub: Any) -> None:
        self._call = stub.RouterSession()
        self._turns = 0

    async def open(self) -> RouterGuest:
        """Opens the session."""
        hello = lease_pb2.RouterHello(router_id="r")
        await self._call.write(lease_pb2.RouterSessionRequest(hello=hello))
        await self._read()
        return self

    async def turn(
        self, name: str, tenant: str = "", model: str = "m", **report: Any
    ) -> lease_pb2.TurnBegun:
        """Has a turn begin and, if there is a report, end; returns once both are known."""
        self._turns += 1
        key = common_pb2.ConversationKey(tenant=tenant, model=model, conversation_id=name)
        begin = lease_pb2.BeginTurn(turn_id=self._turns, conversation=key, reuse=True)
        begun = await self._begin(begin)
        if report:
            end = lease_pb2.EndTurn(turn_id=self._turns, report=common_pb2.TurnReport(**report))
            await self._call.write(lease_pb2.RouterSessionRequest(end_turns=[end]))
            self._turns += 1
            # Answered after what came before it; refused, it leaves nothing behind.
            await self._begin(lease_pb2.BeginTurn(turn_id=self._turns))
        return begun

    async def _begin(self, begin: lease_pb2.BeginTurn) -> lease_pb2.TurnBegun:
        await self._call.write(lease_pb2.RouterSessionRequest(begin_turns=[begin]))
        while True:
            for begun in (await self._read()).turns:
                if begun.turn_id == begin.turn_id:
                    assert isinstance(begun, lease_pb2.TurnBegun)
                    return begun

    async def _read(self) -> Any:
        async with asyncio.timeout(GUARD_S):
            return await self._call.read()
