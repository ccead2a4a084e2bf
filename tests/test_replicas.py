"""Three routers in front of the same engines, and a lease service: it does not matter which one.

Routers and lease services are processes. Engines speak HTTP here and hold their sessions with the
connector's own client; what they retain are the bytes of a conversation, taken for its tokens, so
that a turn that reuses another conversation's KV shows.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import math
import socket
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import unquote

import pytest
from awake import within
from etcd_server import EtcdServer, until
from lease_rig import (
    GUARD_S,
    LASTING,
    OUTLIVING,
    SCOPE,
    Engine,
    LeaseProcess,
    conversation,
    lease_cluster,
    lease_of,
)
from router_harness import Answer, Client, router, turn_body
from router_process import Process, process
from stub_engine import CHAT, Reply, Seen, StubEngine

from kvturn.clock import boottime_ns
from kvturn.v1 import common_pb2, lease_pb2
from kvturn_cli.ports import HOST, pick_free
from kvturn_connector.lease_client import Question
from kvturn_connector.reader import Answer as ReadAnswer
from kvturn_connector.reader import End

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from pathlib import Path

    from kvturn_connector.reader import Answer as Granted

BLOCK_SIZE = 16
_taken: set[int] = set()


def tokens_of(messages: Sequence[dict[str, str]]) -> list[int]:
    """Returns a history's tokens: one a byte, as a chat template would join them."""
    return list("".join(f"<{each['role']}>{each['content']}" for each in messages).encode())


class Decode(StubEngine):
    """Generates, and retains what it has generated from."""

    def __init__(self, endpoints: Sequence[str], name: str) -> None:
        super().__init__("decode")
        self.name = name
        self.endpoints = endpoints
        self.grant_delay_s = 0.0
        self.grants = 0
        self.open = asyncio.Event()
        """While it is not set, answers stop after their first half."""
        self.open.set()

    async def start(self) -> Self:
        await super().start()
        self.engine = Engine(self.endpoints, self.name, http_address=self.url)
        return self

    async def stop(self) -> None:
        await super().stop()
        await asyncio.to_thread(self.engine.client.shutdown)

    async def decode(self, seen: Seen, reply: Reply) -> None:
        messages = seen.json["messages"]
        text = f"answer to {messages[-1]['content']} by {self.name}"
        self.text = [text[:6], text[6:]]
        if seen.json.get("stream"):
            await reply.begin_stream()
            events = self.events(seen)
            for data in events[:2]:
                await reply.send(data)
            await self.open.wait()
            for data in events[2:]:
                await reply.send(data)
            await reply.end_stream()
        else:
            answer = self.whole_answer(seen)
            answer["usage"]["prompt_tokens"] = len(tokens_of(messages))
            await self.open.wait()
            await reply.json(answer)
        if seen.gone.is_set():
            return  # an aborted request leaves nothing
        told = (seen.json.get("kv_transfer_params") or {}).get("kvturn", {})
        if "conversation" in told:
            answered = [*messages, {"role": "assistant", "content": text}]
            loop = asyncio.get_running_loop()
            loop.call_later(self.grant_delay_s, self._retain, told, messages, answered)

    def _retain(self, told: dict[str, Any], messages: list[Any], answered: list[Any]) -> None:
        self.grants += 1
        tokens = tokens_of(answered)[:-1]  # the last one's KV was not computed
        offer = common_pb2.Retention(
            conversation=key_of(told),
            token_count=len(tokens),
            block_size=BLOCK_SIZE,
            groups=[common_pb2.BlockGroup(block_ids=range(math.ceil(len(tokens) / BLOCK_SIZE)))],
            turn=told["turn"],
            prompt_tokens=len(tokens_of(messages)),
            history=bytes.fromhex(told.get("history", "")),
        )
        self.engine.client.retain(self.grants, offer, tokens, SCOPE, "")


class Prefill(StubEngine):
    """Reads what it is given a lease on, where the tokens are equal."""

    def __init__(self, endpoints: Sequence[str], name: str) -> None:
        super().__init__("prefill")
        self.name = name
        self.endpoints = endpoints
        self.open = asyncio.Event()
        """While it is not set, requests stop before anything is read."""
        self.open.set()
        self._numbers = itertools.count()
        self._answers: dict[str, Granted | int] = {}

    async def start(self) -> Self:
        await super().start()
        self.engine = Engine(self.endpoints, self.name)
        return self

    async def stop(self) -> None:
        await super().stop()
        await asyncio.to_thread(self.engine.client.shutdown)

    async def prefill(self, seen: Seen, reply: Reply) -> None:
        await self.open.wait()
        if seen.gone.is_set():
            return  # an aborted request reads nothing
        told = seen.json["kv_transfer_params"]["kvturn"]
        tokens = tokens_of(seen.json["messages"])
        report: dict[str, Any] = {"prompt_tokens": len(tokens)}
        if "lease_id" in told:
            report |= await self._read(told, tokens)
        answer = self.prefill_answer()
        answer["kv_transfer_params"]["kvturn"] = report
        await reply.json(answer)

    async def _read(self, told: dict[str, Any], tokens: list[int]) -> dict[str, Any]:
        number, lease_id = str(next(self._numbers)), told["lease_id"]
        client = self.engine.client
        client.ask(Question(number, lease_id, key_of(told), tokens, SCOPE, "", boottime_ns()))

        def answered() -> bool:
            self._answers |= {each.request_id: answer for each, answer in client.take_answers()}
            return number in self._answers

        await until(answered, GUARD_S)
        answer = self._answers.pop(number)
        if not isinstance(answer, ReadAnswer) or not answer.granted:
            verdict = answer.verdict if isinstance(answer, ReadAnswer) else answer
            return {"verdict": common_pb2.Verdict.Name(verdict).removeprefix("VERDICT_").lower()}
        common = answer.common_tokens
        outcome = lease_pb2.READ_OUTCOME_COMPLETED if common else lease_pb2.READ_OUTCOME_NOT_READ
        end = lease_pb2.EndReadRequest(lease_id=lease_id, outcome=outcome, reused_tokens=common)
        client.end_read(End(end))
        whole = common == answer.retention.token_count
        verdict = ("reused" if whole else "partial_prefix") if common else "prefix_mismatch"
        return {"verdict": verdict, "reused_tokens": common}


def key_of(told: dict[str, Any]) -> common_pb2.ConversationKey:
    """Returns the conversation that a leg names."""
    return common_pb2.ConversationKey(
        tenant=told["tenant"], model=told["model"], conversation_id=told["conversation"]
    )


class Replica:
    """One router, on a port of its own for as long as the test runs."""

    def __init__(self, flags: Sequence[str]) -> None:
        self.port = pick_free(_taken)
        self._flags = (*flags, f"--port={self.port}")
        self._stack = contextlib.AsyncExitStack()
        self._process: Process | None = None

    async def start(self) -> None:
        self._process = await self._stack.enter_async_context(process(*self._flags))
        await self._process.until_listening()
        await self._process.until_ready()
        await self.until_session()

    async def until_session(self) -> None:
        """Waits until it says that the lease service answers it."""
        assert self._process is not None
        await self._process.until_session()

    async def kill(self) -> None:
        """Kills it with -9, and shows what it logged should the test fail."""
        running, self._process = self._process, None
        await self._stack.aclose()
        if running is not None and running.process.stderr is not None:
            print((await running.process.stderr.read()).decode())

    async def terminate(self) -> None:
        """Asks it to stop in order, and waits until it has."""
        assert self._process is not None
        self._process.process.terminate()
        code, errors = await self._process.end()
        assert (code, "Traceback" in errors) == (0, False), errors
        await self.kill()

    async def send(self, body: dict[str, Any]) -> Client:
        """Sends a turn on a connection of its own. Raises ConnectionRefusedError."""
        client = Client(*await asyncio.open_connection(HOST, self.port))
        await client.send("POST", CHAT, json.dumps(body).encode())
        return client

    async def post(self, body: dict[str, Any]) -> Answer:
        """Has a turn served. Raises ConnectionRefusedError."""
        client = await self.send(body)
        try:
            return await client.answer()
        finally:
            client.close()


@dataclass
class Chat:
    """A conversation as its client holds it. `tags` go into the bodies of its turns."""

    name: str
    tags: dict[str, Any] = field(default_factory=dict)
    stream: bool = False
    messages: list[dict[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.messages.append({"role": "system", "content": f"This is the talk named {self.name}."})

    @property
    def turns(self) -> int:
        """Turns that were answered."""
        return sum(message["role"] == "assistant" for message in self.messages)

    def next_body(self) -> dict[str, Any]:
        """Returns the body of its next turn."""
        question = f"question {self.turns + 1} of {self.name}"
        asked = [*self.messages, {"role": "user", "content": question}]
        return {"model": "m", "messages": asked, "stream": self.stream, **self.tags}

    def take(self, body: dict[str, Any], answer: Answer) -> Answer:
        """Goes on from an answer."""
        assert answer.status == 200, answer.body
        assert answer.whole
        if self.stream:
            *events, done = answer.events
            assert done == "[DONE]"
            deltas = [json.loads(event)["choices"][0]["delta"] for event in events]
            text = "".join(delta.get("content", "") for delta in deltas)
        else:
            text = answer.json["choices"][0]["message"]["content"]
        assert text.startswith(f"answer to {body['messages'][-1]['content']} by")
        self.messages = [*body["messages"], {"role": "assistant", "content": text}]
        return answer

    async def turn(self, router: Replica) -> Answer:
        """Has its next turn served."""
        body = self.next_body()
        return self.take(body, await router.post(body))

    async def goes_on(self, router: Replica, *, number: int | None = None) -> str:
        """Has its next turn served, which must reuse all that its last one left; returns its id.

        `number` is the turn's: that after those answered unless given, 0 if it does not matter.
        """
        held = tokens_of(self.messages)[:-1]
        number = self.turns + 1 if number is None else number
        answer = await self.turn(router)
        told = int(answer.headers["x-kvturn-turn"])
        found = (answer.verdict, number and told)
        assert found == ("reused", number), (self.name, answer.headers)
        assert int(answer.headers["x-kvturn-reused-tokens"]) == len(held)
        return answer.headers["x-kvturn-conversation"]


class System:
    """Three routers, two engines of each role, and the lease services given."""

    def __init__(self, services: Sequence[LeaseProcess], plan: str) -> None:
        self.services = services
        self._plan = plan
        endpoints = [service.endpoint for service in services]
        self.prefills = [Prefill(endpoints, f"p{number}") for number in (1, 2)]
        self.decodes = [Decode(endpoints, f"d{number}") for number in (1, 2)]
        self.routers: list[Replica] = []

    async def start(self) -> None:
        engines = (*self.prefills, *self.decodes)
        for engine in engines:
            await engine.start()
        flags = [
            f"--lease={','.join(service.endpoint for service in self.services)}",
            *(f"--prefill={engine.url}" for engine in self.prefills),
            *(f"--decode={engine.url}" for engine in self.decodes),
            *("--no-grpc", f"--plan={self._plan}", "--question-deadline-ms=5000"),
        ]
        self.routers = [Replica(flags) for _ in range(3)]
        await asyncio.gather(*(router.start() for router in self.routers))
        for engine in engines:
            await engine.engine.until_registered()

    async def stop(self) -> None:
        for each in self.routers:
            await each.kill()
        await asyncio.gather(*(engine.stop() for engine in (*self.prefills, *self.decodes)))

    async def leases(self) -> dict[str, lease_pb2.Lease]:
        """Returns the leases that can be read, by conversation."""
        answer = await self.services[0].call("ListLeases", lease_pb2.ListLeasesRequest(), GUARD_S)
        active = [each for each in answer.leases if each.state == lease_pb2.Lease.STATE_ACTIVE]
        return {each.conversation.conversation_id: each for each in active}


@contextlib.asynccontextmanager
async def system(folder: Path, plan: str = "pull") -> AsyncIterator[System]:
    """Runs everything with one lease service until the block ends."""
    async with LeaseProcess(folder, *LASTING) as service, running([service], plan) as everything:
        yield everything


@contextlib.asynccontextmanager
async def running(services: Sequence[LeaseProcess], plan: str = "pull") -> AsyncIterator[System]:
    """Runs everything with these lease services until the block ends."""
    everything = System(services, plan)
    try:
        await everything.start()
        yield everything
    finally:
        await everything.stop()


def chats(count: int) -> list[Chat]:
    """Returns conversations of each kind in turn: tagged, in a scope, untagged; half streamed."""
    kinds = ("conversation_id", "session_id", "")
    made = []
    for number in range(count):
        kind = kinds[number % 3]
        name = f"talk {number}"
        made.append(Chat(name, {kind: name} if kind else {}, number % 2 == 1))
    return made


async def test_each_turn_may_come_through_another_router(tmp_path: Path) -> None:
    """20 conversations at once, four turns each, each turn through the next router."""
    async with system(tmp_path) as everything:
        routers = everything.routers

        async def talk(number: int, chat: Chat) -> str:
            first = await chat.turn(routers[number % 3])
            assert (first.verdict, first.headers["x-kvturn-turn"]) == ("first_turn", "1")
            ids = {first.headers["x-kvturn-conversation"]}
            for turn in (1, 2, 3):
                ids.add(await chat.goes_on(routers[(number + turn) % 3]))
            (conversation_id,) = ids
            return conversation_id

        ids = await asyncio.gather(*(talk(*each) for each in enumerate(chats(20))))
        assert len(set(ids)) == 20


async def test_parallel_agents_in_one_session_are_told_apart(tmp_path: Path) -> None:
    """Two agents share a session id, also in the moment when both ask through different routers."""
    async with system(tmp_path) as everything:
        routers = everything.routers
        for tag in ("session_id", "conversation_id"):
            agents = [Chat(f"agent {number}", {tag: f"one {tag}"}) for number in (1, 2)]
            for decode in everything.decodes:
                decode.open.clear()
            first = [asyncio.create_task(agents[n].turn(routers[n])) for n in (0, 1)]
            await until(lambda: sum(len(decode.turns) for decode in everything.decodes) >= 2)
            for decode in everything.decodes:
                decode.open.set()
            begun = {(await each).headers["x-kvturn-conversation"] for each in first}
            assert len(begun) == 2
            for turn in (1, 2, 3):
                going_on = [agents[n].goes_on(routers[(n + turn) % 3]) for n in (0, 1)]
                assert set(await asyncio.gather(*going_on)) == begun
            for decode in everything.decodes:
                decode.seen.clear()


async def test_a_turn_waits_for_the_grant_of_the_one_before(tmp_path: Path) -> None:
    """The client asks on at another router while the grant of its last turn is under way."""
    async with system(tmp_path) as everything:
        for decode in everything.decodes:
            decode.grant_delay_s = 0.1
        for chat in chats(6):
            await chat.turn(everything.routers[0])
            for router in everything.routers[1:]:
                await chat.goes_on(router)


async def test_a_killed_router_costs_its_turns_in_flight_and_no_more(tmp_path: Path) -> None:
    """kill -9 with turns in both legs: other routers' turns and all conversations go on."""
    async with system(tmp_path) as everything:
        dying, *others = everything.routers
        talks = chats(12)
        await asyncio.gather(*(chat.turn(dying) for chat in talks))
        before, during, elsewhere = talks[:5], talks[5:9], talks[9:]
        for decode in everything.decodes:
            decode.open.clear()
        lost = [await dying.send(chat.next_body()) for chat in during]
        spared = [asyncio.create_task(chat.goes_on(others[0])) for chat in elsewhere]
        await until(lambda: _seen(everything.decodes) == 12 + 7, GUARD_S)
        for prefill in everything.prefills:
            prefill.open.clear()
        lost += [await dying.send(chat.next_body()) for chat in before]
        await until(lambda: _seen(everything.prefills) == 12 + 7 + 5, GUARD_S)
        held = await everything.leases()
        assert len(held) == 5
        assert not any(lease.HasField("idle_in") for lease in held.values())

        decoding = [
            seen
            for engine in everything.decodes
            for seen in engine.turns[-7:]
            if not seen.gone.is_set()
        ]
        await dying.kill()

        async def forgotten() -> bool:
            leases = await everything.leases()
            return leases.keys() == held.keys() and all(
                lease.HasField("idle_in") for lease in leases.values()
            )

        async with within(2):
            await until(forgotten)
        for client in lost:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                assert not (await client.answer()).whole
        requests = [seen for engine in everything.prefills for seen in engine.turns[-5:]]
        await until(lambda: sum(seen.gone.is_set() for seen in requests) >= 5, GUARD_S)
        # Decode, too, must notice before it may answer, or it retains the turns of the lost router.
        await until(lambda: sum(seen.gone.is_set() for seen in decoding) >= 4, GUARD_S)
        for engine in (*everything.prefills, *everything.decodes):
            engine.open.set()
        await asyncio.gather(*spared)
        # What was not read yet still is. What a lost turn had read is gone, once.
        await asyncio.gather(*(chat.goes_on(others[1], number=3) for chat in before))
        again = await asyncio.gather(*(chat.turn(others[0]) for chat in during))
        assert {answer.verdict for answer in again} == {"consumed"}
        await asyncio.gather(*(chat.goes_on(others[1], number=4) for chat in during))
        await dying.start()
        for chat in talks:
            await chat.goes_on(dying, number=3 if chat in elsewhere else chat.turns + 2)


async def _reuses(chat: Chat, router: Replica) -> bool:
    return (await chat.turn(router)).verdict == "reused"


def _seen(engines: Sequence[StubEngine]) -> int:
    return sum(len(engine.turns) for engine in engines)


async def test_turns_that_decode_serves_alone_are_told_to_all_routers(tmp_path: Path) -> None:
    """In streams only the grant tells how long a prompt was; some come after their router."""
    async with system(tmp_path, plan="local") as everything:
        stopping, *routers = everything.routers
        for decode in everything.decodes:
            decode.grant_delay_s = 0.05
        talks = chats(6)
        lengths: dict[str, list[int]] = {}

        async def talk(chat: Chat, *through: Replica) -> None:
            for router in through:
                asked = len(tokens_of(chat.next_body()["messages"]))
                answer = await chat.turn(router)
                assert answer.verdict == ("local" if chat.turns > 1 else "first_turn")
                assert answer.headers["x-kvturn-turn"] == str(chat.turns)
                lengths.setdefault(answer.headers["x-kvturn-conversation"], []).append(asked)

        await asyncio.gather(*(talk(chat, routers[0], routers[1]) for chat in talks))
        for decode in everything.decodes:
            decode.grant_delay_s = 0.9
        await asyncio.gather(*(talk(chat, stopping) for chat in talks))
        stopped = asyncio.create_task(stopping.terminate())
        await asyncio.gather(*(talk(chat, routers[0]) for chat in talks))
        await stopped

        async def all_told(name: str, asked: list[int]) -> bool:
            key = conversation(unquote(name))
            request = lease_pb2.ListTurnsRequest(conversation=key)
            told = (await everything.services[0].call("ListTurns", request, GUARD_S)).turns
            known = {turn.turn: turn.prompt_tokens for turn in told}
            # The router that stopped could not wait for what the grant would have told.
            return known == dict(enumerate(asked, 1)) | {3: known.get(3)} and 3 in known

        for name, asked in lengths.items():
            assert len(asked) == 4
            await until(lambda name=name, asked=asked: all_told(name, asked), GUARD_S)


@contextlib.asynccontextmanager
async def restarted(folder: Path) -> AsyncIterator[list[LeaseProcess]]:
    """One lease service, whose leadership ends when it is killed, until it starts again.

    Decode holds what it retains for as long as a busy machine may take for that.
    """
    async with LeaseProcess(folder, "--session-ttl=12") as service:
        yield [service]


@contextlib.asynccontextmanager
async def failed_over(folder: Path) -> AsyncIterator[list[LeaseProcess]]:
    """Two lease services on one etcd, of which the first leads."""
    async with EtcdServer(folder) as etcd, lease_cluster(folder, etcd, OUTLIVING) as services:
        yield services


@pytest.mark.parametrize(
    "lease_services", [restarted, pytest.param(failed_over, marks=pytest.mark.fault)]
)
async def test_all_goes_on_under_another_leader(tmp_path: Path, lease_services: Any) -> None:
    """The leader is killed with turns in flight. No turn fails, and what is held is read after."""
    async with lease_services(tmp_path) as services, running(services) as everything:
        routers = everything.routers
        talks = chats(9)
        ids = [(await chat.turn(routers[0])).headers["x-kvturn-conversation"] for chat in talks]
        in_flight, busy = talks[:3], talks[6:]
        for decode in everything.decodes:
            decode.open.clear()
        pending = [asyncio.create_task(chat.goes_on(routers[1])) for chat in in_flight]
        await until(lambda: _seen(everything.decodes) == 9 + 3, GUARD_S)

        services[0].kill()
        for decode in everything.decodes:
            decode.open.set()
        for router in routers:
            await asyncio.gather(*(chat.turn(router) for chat in busy))
        await asyncio.gather(*pending)
        if len(services) == 1:
            services[0].launch()
        for conversation_id in ids[:6]:
            await lease_of(services, unquote(conversation_id))
        for router in routers:
            await router.until_session()
        for chat in talks[:6]:
            await chat.goes_on(routers[2])
        # What was said while nobody led is of other conversations where the client named none.
        for chat in busy:
            await until(lambda chat=chat: _reuses(chat, routers[2]), GUARD_S)
        for chat in talks:
            await chat.goes_on(routers[0], number=0)


async def test_a_rolling_restart_fails_no_turn(tmp_path: Path) -> None:
    """One router after the other restarts under load; clients try the next where one refuses.

    Grants are under way for a while after each turn, be its router still there or not.
    """
    async with system(tmp_path) as everything:
        routers = everything.routers
        for decode in everything.decodes:
            decode.grant_delay_s = 0.02
        rolled = asyncio.Event()
        tries = itertools.count()

        async def post(body: dict[str, Any]) -> Answer:
            while True:
                with contextlib.suppress(ConnectionRefusedError):
                    return await routers[next(tries) % 3].post(body)

        async def talk(chat: Chat) -> int:
            while not rolled.is_set():
                body = chat.next_body()
                answer = chat.take(body, await post(body))
                told = (answer.verdict, int(answer.headers["x-kvturn-turn"]))
                assert told == ("reused" if chat.turns > 1 else "first_turn", chat.turns)
            return chat.turns

        talking = [asyncio.create_task(talk(chat)) for chat in chats(12)]
        for each in routers:
            served = next(tries)
            await until(lambda served=served: next(tries) > served + 100, GUARD_S)
            await each.terminate()
            await each.start()
        rolled.set()
        assert sum(await asyncio.gather(*talking)) > 300


async def test_a_router_that_ends_serves_what_is_on_its_way() -> None:
    """On a connection that it has not taken yet, and on one that was idle; it takes no others."""
    body = json.dumps(turn_body()).encode()
    async with router("--grace-s=10") as rig:
        kept = await rig.client()
        await kept.send("GET", "/health")
        assert (await kept.answer()).status == 200
        made = socket.create_connection((HOST, rig.server.port))  # behind the event loop's back
        stopping = asyncio.create_task(rig.server.stop())
        untaken = Client(*await asyncio.open_connection(sock=made))
        for client in (kept, untaken):
            await client.send("POST", CHAT, body)
        for client in (kept, untaken):
            answer = await client.answer()
            assert (answer.status, answer.headers["connection"]) == (200, "close")
        with pytest.raises(ConnectionRefusedError):
            await rig.client()
        await stopping


async def test_a_router_refuses_connections_until_it_knows_its_engines() -> None:
    """One of its engines takes its time to say that it is well."""
    engines = [await StubEngine(role).start() for role in ("prefill", "decode", "decode")]
    well = asyncio.Event()

    async def late(seen: Seen, reply: Reply) -> None:
        await well.wait()
        await reply.whole(b"")

    engines[2].script("/health", late)
    flags = [f"--{engine.role}={engine.url}" for engine in engines]
    port = pick_free(_taken)
    async with process(*flags, f"--port={port}", "--no-grpc", "--health-timeout-s=20") as starting:
        await until(lambda: all(engine.seen for engine in engines), GUARD_S)
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(HOST, port)
        well.set()
        await starting.until_listening()
        client = await starting.client()
        await client.send("POST", CHAT, json.dumps(turn_body()).encode())
        assert (await client.answer()).status == 200
        client.close()
    for engine in engines:
        await engine.stop()
