"""Scheduler side of the connector on a decode engine. Touches vLLM; see ARCHITECTURE.md.

When a request of a conversation ends, however it ends, its blocks get one more reference in vLLM's
block pool, and the request itself is let go. Stock code instead keeps the request in the scheduler,
which keeps an idle engine stepping a thousand times a second and lets only the worker free the
blocks. With a reference of our own the blocks can go back in the scheduler thread, in the next
step after the lease service has confirmed that nobody reads them.

When requests want more blocks than are free, retentions are given up: `victims.py` says which. What
has been given up counts as on its way only for a short time: a retention that is being read, or a
lease service that does not answer, can take seconds, and others are then given up as well.
"""

from __future__ import annotations

import queue
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.v1.engine import EngineCoreRequestType

from kvturn.clock import boottime_ns
from kvturn.v1 import common_pb2, lease_pb2
from kvturn_connector.config import NS_PER_MS
from kvturn_connector.scheduler import LeasedScheduler
from kvturn_connector.shared_blocks import SharedBlocks
from kvturn_connector.tally import (
    GIVEN_UP,
    OUTLOOKS,
    REASONS,
    RELEASES,
    RETAINED_BLOCKS,
    RETENTIONS,
)
from kvturn_connector.turn import Turn, scope_of
from kvturn_connector.victims import Victims
from kvturn_connector.worker import KvturnWorkerMetadata

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.utils import BlockIds
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlConnectorMetadata
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from kvturn_connector.config import ConnectorConfig
    from kvturn_connector.lease_client import LeaseClient
    from kvturn_connector.metrics import KvturnStats

NOTICES_MAX = 10_000
"""Leases of which some ranks have had notice and some have not; the oldest are forgotten."""
IN_FLIGHT_STEPS = 2
"""Engine steps after which no step that was in flight at the end of a request still writes."""
LATE_NS = 200 * NS_PER_MS
"""A release usually comes within milliseconds; after this long others are given up as well."""
HEADROOM = 16
"""One block in so many is kept free, so that running requests can grow while a release comes."""
HEADROOM_SILENT = 4
"""The same while the lease service is silent: then blocks come back seconds later."""

_RETURNED = (common_pb2.RELEASE_REASON_CONSUMED, common_pb2.RELEASE_REASON_SUPERSEDED)
"""Ends of a retention whose conversation has come back: read, or gone on from in place."""

ConversationName = tuple[str, str, str]
"""Tenant, model and id of a conversation."""


@dataclass(slots=True)
class Held:
    """Blocks held for a retention."""

    conversation: ConversationName
    blocks: list[KVCacheBlock]
    free_from_step: int
    """First step in which they may go back to the pool."""
    outlook: int = lease_pb2.OUTLOOK_NORMAL
    """What the lease service expects of the conversation."""


@dataclass(slots=True)
class Wanted:
    """Blocks that a request has yet to get."""

    conversation: ConversationName | None
    traceparent: str
    """Trace context of its turn."""
    since_ns: int
    """When it came."""
    blocks: int = 0
    found: int = 0
    """Blocks not counted, because they are among those held for its conversation."""


def engine_waker() -> Callable[[], None]:
    """Returns a function, for any thread, that makes the idle engine core take a step.

    Must be called while the engine core constructs its scheduler, and finds the core among the
    callers: vLLM gives a connector no handle on it. `WAKEUP` is vLLM's own message for this. A core
    without an input queue (in-process use of vLLM) frees in its next step instead.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        inbox = getattr(frame.f_locals.get("self"), "input_queue", None)
        if isinstance(inbox, queue.Queue):
            return lambda: inbox.put_nowait((EngineCoreRequestType.WAKEUP, None))
        frame = frame.f_back
    return lambda: None


class DecodeScheduler(LeasedScheduler):
    """NIXL's pull scheduler that retains finished requests' KV under leases."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        engine_id: str,
        kv_cache_config: KVCacheConfig,
        config: ConnectorConfig,
        client: LeaseClient,
        plain_attention: bool,
    ) -> None:
        super().__init__(vllm_config, engine_id, kv_cache_config, config, client, plain_attention)
        self._step = 0
        self._numbers = 0
        self._held: dict[int, Held] = {}
        self._latest: dict[ConversationName, int] = {}
        """The newest of what is held of each conversation."""
        self._victims = Victims()
        self._withdrawn: dict[int, int] = {}
        """Retentions that are held only until their release, with when they were given up."""
        self._late: set[int] = set()
        """Those of them that are not waited for."""
        self._freeing: list[int] = []
        self._arriving: set[str] = set()
        self._wanted: dict[str, Wanted] = {}
        self._retained = SharedBlocks()
        self._told_retained_blocks = 0
        self._notices: dict[str, int] = {}

    def bind_gpu_block_pool(self, pool: BlockPool) -> None:
        """Learns the pool whose blocks are held.

        vLLM resets the pool before it tells the connector, and the reset fails while blocks are
        held: what is retained is given up first, so that the next try succeeds.
        """
        super().bind_gpu_block_pool(pool)
        reset = pool.reset_prefix_cache

        def give_up_and_reset() -> bool:
            self.withdraw_all(common_pb2.RELEASE_REASON_PRESSURE)
            self._return_blocks()
            return bool(reset())

        pool.reset_prefix_cache = give_up_and_reset

    def kv_memory(self) -> lease_pb2.KvMemory:
        """As of every engine, with what is retained."""
        memory = super().kv_memory()
        memory.retained_blocks = len(self._retained)
        return memory

    def on_new_request(self, request: Request) -> None:
        """Notes what the request will need, and gives way to it."""
        super().on_new_request(request)
        self._want(request)
        self._give_way()

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """As stock's; asked on every pass, also of a request that waits again."""
        self._want(request, num_computed_tokens)
        return super().get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """As stock's; a request whose KV is still arriving has nothing to retain."""
        wanted = self._wanted.get(request.request_id)
        if wanted is not None:
            wanted.blocks += wanted.found - sum(len(group) for group in blocks.blocks[:1])
            wanted.found = 0
            if wanted.blocks <= 0:  # Otherwise it was the first chunk of a long prompt.
                del self._wanted[request.request_id]
        if num_external_tokens > 0:
            self._arriving.add(request.request_id)
        super().update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> NixlConnectorMetadata:
        """As stock's; once a step, frees what may go and asks for more if memory is short."""
        self._step += 1
        now_ns = boottime_ns()
        for number, outlook in self._client.take_outlooks():
            if number in self._held:
                self._held[number].outlook = outlook
                self._victims.outlook(number, outlook, now_ns)
        self._return_blocks()
        self._give_way()
        return super().build_connector_meta(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Learns whose KV has arrived, and which leases all readers are done with."""
        super().update_connector_output(connector_output)
        self._arriving.difference_update(connector_output.finished_recving or ())
        meta = connector_output.kv_connector_worker_meta
        if isinstance(meta, KvturnWorkerMetadata):
            for lease_id, ranks in meta.notices.items():
                seen = self._notices.pop(lease_id, 0) + ranks
                if seen < self._ranks:
                    self._notices[lease_id] = seen
                    if len(self._notices) > NOTICES_MAX:
                        del self._notices[next(iter(self._notices))]
                else:
                    self._client.notice(lease_id)

    def request_finished(
        self, request: Request, block_ids: BlockIds
    ) -> tuple[bool, dict[str, Any] | None]:
        """Retains the KV of a request that belongs to a conversation; stock never does here."""
        request_id = request.request_id
        params = request.kv_transfer_params
        arriving = request_id in self._arriving
        self._arriving.discard(request_id)
        self._wanted.pop(request_id, None)
        if not params or params.get("do_remote_decode") or params.get("do_remote_prefill"):
            # A prefill leg, or one that ended before it was scheduled: stock code tells prefill.
            return super().request_finished(request, block_ids)
        local_tokens = self._local_tokens.pop(request_id, 0)
        self._stop_heartbeat(request_id)
        # Stock code put the id on the workers' list of requests that may be read.
        self._reqs_not_processed.add(request_id)
        turn = Turn.of(params)
        if turn.conversation is not None and not arriving:
            self._retain(request, turn, block_ids, local_tokens)
        return False, None

    def has_pending_push_work(self) -> bool:
        """True keeps the engine stepping: blocks wait to go back, or a release is awaited."""
        return bool(
            self._freeing
            or self._client.has_freed
            or self._withdrawn
            or super().has_pending_push_work()
        )

    def withdraw_all(self, reason: int) -> bool:
        """Gives everything up. True if nothing was held."""
        now_ns = boottime_ns()
        for number in self._held.keys() - {*self._withdrawn, *self._freeing}:
            self._withdraw(number, reason, now_ns)
        return not self._held

    def take_stats(self) -> KvturnStats | None:
        """What was counted since the last call; None if nothing."""
        retained_blocks = len(self._retained)
        if retained_blocks != self._told_retained_blocks:
            self._told_retained_blocks = retained_blocks
            self._stats.add(RETAINED_BLOCKS, retained_blocks)
        return super().take_stats()

    def _retain(self, request: Request, turn: Turn, block_ids: BlockIds, local_tokens: int) -> None:
        pool = self._pool
        # Tokens of a step that is still in flight are not there yet.
        computed = request.num_computed_tokens - request.num_in_flight_tokens
        token_count = min(computed, request.num_tokens)
        if not self._reusable(request) or token_count <= 0:
            return
        if pool is None or not self._client.vouching:
            return
        if self._client.silent and pool.get_num_free_blocks() < self._headroom(pool):
            return  # What is offered now would be waited for, and nobody can read it meanwhile.
        ids = list(block_ids[0][: -(-token_count // self.block_size)])
        blocks = [pool.blocks[block_id] for block_id in ids]
        if any(block.is_null for block in blocks):
            return
        self._numbers += 1
        pool.touch(blocks)
        in_flight = request.num_in_flight_tokens > 0
        assert turn.conversation is not None
        name = _name_of(turn.conversation)
        free_from_step = self._step + IN_FLIGHT_STEPS * in_flight
        self._held[self._numbers] = Held(name, blocks, free_from_step)
        self._latest[name] = self._numbers
        self._stats.add(RETENTIONS)
        self._retained.hold(self._numbers, ids)
        self._victims.retained(self._numbers, turn.turn, boottime_ns())
        self._client.retain(
            self._numbers,
            common_pb2.Retention(
                conversation=turn.conversation,
                token_count=token_count,
                block_size=self.block_size,
                groups=[common_pb2.BlockGroup(block_ids=ids)],
                prompt_tokens=request.num_prompt_tokens,
                local_cached_tokens=local_tokens,
                turn=turn.turn,
                history=turn.history,
            ),
            request.all_token_ids[:token_count],
            scope_of(request, turn.conversation, self._model),
            turn.traceparent,
        )

    def _return_blocks(self) -> None:
        now_ns = boottime_ns()
        for freed in self._client.take_freed():
            self._forget(freed.number, freed.reason, now_ns)
        if not self._client.vouching:
            for number in self._held.keys() - set(self._freeing):
                self._forget(number, common_pb2.RELEASE_REASON_ENGINE_LOST, now_ns)
        if not self._freeing:
            return
        assert self._pool is not None
        later = []
        for number in self._freeing:
            held = self._held[number]
            if self._step < held.free_from_step:
                later.append(number)
                continue
            del self._held[number]
            if self._latest.get(held.conversation) == number:
                del self._latest[held.conversation]
            self._retained.let_go(number)
            # In reverse, so that the tail is evicted from the prefix cache first.
            self._pool.free_blocks(reversed(held.blocks))
        self._freeing = later

    def _forget(self, number: int, reason: int, now_ns: int) -> None:
        """A retention has ended; its blocks go back as soon as no step writes to them."""
        self._freeing.append(number)
        self._withdrawn.pop(number, None)
        self._late.discard(number)
        known = reason if reason in REASONS else common_pb2.RELEASE_REASON_REVOKED
        self._stats.add(RELEASES, 1, REASONS[known])
        if reason in _RETURNED:
            self._victims.consumed(number, now_ns)
        else:
            self._victims.ended(number, now_ns)

    def _give_way(self) -> None:
        """Gives retentions up while requests want more blocks than are free or on their way."""
        if not self._held or self._pool is None:
            return
        now_ns = boottime_ns()
        wanted_blocks = sum(wanted.blocks for wanted in self._wanted.values())
        short = wanted_blocks + self._headroom(self._pool) - self._pool.get_num_free_blocks()
        on_their_way = self._on_their_way(now_ns)
        if short <= 0:
            return
        blocks = self._pool.blocks
        freed = self._retained.freed_by(on_their_way, lambda each: int(blocks[each].ref_cnt))
        coming = freed.count
        victims = self._victims.choose(short, now_ns, freed)
        for number in victims:
            self._stats.add_by_name(GIVEN_UP, OUTLOOKS, self._held[number].outlook)
            self._withdraw(number, common_pb2.RELEASE_REASON_PRESSURE, now_ns)
        if victims:
            self._trace(victims, wanted_blocks, freed.count - coming)

    def _headroom(self, pool: BlockPool) -> int:
        share = HEADROOM_SILENT if self._client.silent else HEADROOM
        return int(pool.num_gpu_blocks) // share

    def _on_their_way(self, now_ns: int) -> list[int]:
        """Retentions whose blocks will go back within a step or two."""
        self._late.update(self._withdrawn.keys() & set(self._client.take_reading()))
        for number, withdrawn_ns in self._withdrawn.items():  # The oldest first.
            if now_ns < withdrawn_ns + LATE_NS:
                break
            self._late.add(number)
        return [*(self._withdrawn.keys() - self._late), *self._freeing]

    def _trace(self, victims: list[int], wanted_blocks: int, given_up_blocks: int) -> None:
        """Shows what was given up in the trace of the turn that has waited longest."""
        waiting = next(iter(self._wanted.values()), None)
        outlooks = [self._held[number].outlook for number in victims]
        self._client.gave_way(
            waiting.traceparent if waiting is not None else "",
            {
                "kvturn.blocks_wanted": wanted_blocks,
                "kvturn.blocks_given_up": given_up_blocks,
                **{
                    f"kvturn.given_up_{name}": outlooks.count(outlook)
                    for outlook, name in OUTLOOKS.items()
                },
            },
        )

    def _want(self, request: Request, found_tokens: int | None = None) -> None:
        """Notes how many blocks more than it finds held the request needs.

        `found_tokens` are those of the engine's prefix cache, None while not looked up.
        """
        now_ns = boottime_ns()
        wanted = self._wanted.get(request.request_id)
        if wanted is None:
            turn = Turn.of(request.kv_transfer_params)
            name = None if turn.conversation is None else _name_of(turn.conversation)
            wanted = Wanted(name, turn.traceparent, now_ns)
            self._wanted[request.request_id] = wanted
        blocks = -(-request.num_tokens // self.block_size)
        wanted.found = 0
        # The cache may have found equal blocks that nobody holds, which count as free: one that
        # still waits after a while is taken to need all its blocks.
        if wanted.conversation in self._latest and now_ns < wanted.since_ns + LATE_NS:
            held = len(self._held[self._latest[wanted.conversation]].blocks)
            found = held if found_tokens is None else found_tokens // self.block_size
            wanted.found = min(found, held, blocks)
        wanted.blocks = blocks - wanted.found

    def _withdraw(self, number: int, reason: int, now_ns: int) -> None:
        self._withdrawn[number] = now_ns
        self._victims.ended(number, now_ns)
        self._client.withdraw(number, reason)


def _name_of(conversation: common_pb2.ConversationKey) -> ConversationName:
    return (conversation.tenant, conversation.model, conversation.conversation_id)
