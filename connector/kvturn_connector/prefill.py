"""Scheduler side of the connector on a prefill engine. Touches vLLM; see ARCHITECTURE.md.

A request that carries a lease id asks the lease service as soon as it arrives and is passed over
by the scheduler until the answer is there or the question deadline has passed. With a grant, the
handle that stock code reads from (`remote_*` keys) is made here, cut to the exact common prefix.
Without one, no such key reaches stock code: it would read, or tell decode to free, blocks that
nobody allowed it to touch.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from kvturn.clock import boottime_ns
from kvturn.v1 import common_pb2, lease_pb2
from kvturn_connector.config import NS_PER_MS, NS_PER_S
from kvturn_connector.handle import notice_name, strip_handle
from kvturn_connector.lease_client import LeaseClient, Question
from kvturn_connector.reader import Read, Reader, State
from kvturn_connector.scheduler import LeasedScheduler
from kvturn_connector.tally import OUTCOMES, READ, READ_BYTES, READS, VERDICTS, VERDICTS_GIVEN
from kvturn_connector.turn import Turn, scope_of
from kvturn_connector.worker import (
    KvturnMetadata,
    KvturnWorkerMetadata,
    RankRead,
    ReadLimit,
    boot_id,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.utils import BlockIds
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlConnectorMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from kvturn_connector.config import ConnectorConfig


class PrefillScheduler(LeasedScheduler):
    """NIXL's pull scheduler that reads decode-held KV under a lease."""

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
        self._boot_id = boot_id()
        self._reader = Reader(
            config.question_deadline_ns, config.recompute_threshold_tokens, self.block_size
        )
        self._verdicts: dict[str, int] = {}
        self._posting: dict[str, Request] = {}
        self._rank_reads: dict[str, RankRead] = {}

    def on_new_request(self, request: Request) -> None:
        """Asks for the lease that the request carries, if any. Returns at once."""
        super().on_new_request(request)  # First: what the request says is made sane there.
        params = request.kv_transfer_params
        if params is not None and params.get("do_remote_decode"):
            self._ask(request, Turn.of(params))

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """(None, False) while the lease service may still answer; else what is to be read."""
        self._take_answers()
        if self._reader.get(request.request_id) is None:
            return super().get_num_new_matched_tokens(request, num_computed_tokens)
        self._local_tokens.setdefault(request.request_id, num_computed_tokens)
        read = self._reader.decide(request.request_id, num_computed_tokens, boottime_ns())
        self._send_ends()
        if read is None:
            return None, False
        if read.state is not State.GRANTED:
            return 0, False
        assert read.answer is not None
        return read.answer.common_tokens - num_computed_tokens, True

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Hands a granted read to stock code, once."""
        read = self._reader.get(request.request_id)
        if read is not None and read.state is State.GRANTED:
            if num_external_tokens > 0:
                assert request.kv_transfer_params is not None
                request.kv_transfer_params.update(_handle(read))
                self._reader.posted(request.request_id, num_external_tokens, time.time_ns())
                self._posting[request.request_id] = request
            else:
                self._reader.decline(request.request_id, common_pb2.VERDICT_BELOW_THRESHOLD)
                self._send_ends()
        super().update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> NixlConnectorMetadata:
        """Stock's metadata with the limits of the reads that start in this step."""
        self._take_answers()  # Also those that came too late for their request.
        stock = super().build_connector_meta(scheduler_output)
        posting, self._posting = self._posting, {}
        limits: dict[str, ReadLimit] = {}
        for request_id, request in posting.items():
            read = self._reader.get(request_id)
            assert read is not None
            assert read.answer is not None
            limits[request_id] = ReadLimit(
                read.asked_ns, read.answer.longest_read_ns, self._boot_id
            )
            # One grant is one post: a preempted request must not find the handle again.
            strip_handle(request.kv_transfer_params or {})
        return KvturnMetadata.extend(stock, limits)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Learns which reads have ended on all ranks, and how."""
        super().update_connector_output(connector_output)
        meta = connector_output.kv_connector_worker_meta
        if not isinstance(meta, KvturnWorkerMetadata):
            return
        for request_id, rank_read in meta.reads.items():
            whole = self._rank_reads.setdefault(request_id, rank_read)
            if whole is not rank_read:
                whole.add(rank_read)
            if whole.ranks == self._ranks:
                del self._rank_reads[request_id]
                self._reader.ended(request_id, whole.outcome, whole.read_ns, whole.read_bytes)
        self._send_ends()

    def request_finished(
        self, request: Request, block_ids: BlockIds
    ) -> tuple[bool, dict[str, Any] | None]:
        """Stock's, with the report of how the turn's KV was got."""
        params = request.kv_transfer_params
        report = self._report(request)
        if "verdict" in report:
            self._stats.add(VERDICTS_GIVEN, 1, str(report["verdict"]))
        delay_free, returned = super().request_finished(request, block_ids)
        if params is not None and params.get("do_remote_decode"):
            if returned is not None:
                returned["kvturn"] = report
            self._verdicts.pop(request.request_id, None)
            self._reader.gone(request.request_id)
            self._send_ends()
        return delay_free, returned

    def _ask(self, request: Request, turn: Turn) -> None:
        if turn.conversation is None:
            return
        if not self._reusable(request):
            # Said also without a lease: decode, with the same model, will never have granted one.
            self._verdicts[request.request_id] = common_pb2.VERDICT_UNSUPPORTED_MODEL
            return
        if not turn.lease_id:
            return
        asked_ns = boottime_ns()
        self._reader.ask(
            request.request_id,
            turn.lease_id,
            request.num_prompt_tokens,
            turn.traceparent,
            asked_ns,
        )
        self._client.ask(
            Question(
                request_id=request.request_id,
                lease_id=turn.lease_id,
                conversation=turn.conversation,
                prompt_ids=request.prompt_token_ids,
                scope=scope_of(request, turn.conversation, self._model),
                traceparent=turn.traceparent,
                asked_ns=asked_ns,
            )
        )

    def _take_answers(self) -> None:
        for question, answer in self._client.take_answers():
            request_id, asked_ns = question.request_id, question.asked_ns
            if isinstance(answer, int):
                self._reader.unanswered(request_id, asked_ns, answer)
            else:
                self._reader.answered(request_id, question.lease_id, asked_ns, answer)
        self._send_ends()

    def _send_ends(self) -> None:
        for end in self._reader.take_ends():
            self._count_read(end.request)
            self._client.end_read(end)

    def _count_read(self, end: lease_pb2.EndReadRequest) -> None:
        self._stats.add_by_name(READS, OUTCOMES, end.outcome)
        if end.outcome == lease_pb2.READ_OUTCOME_COMPLETED:
            self._stats.add(READ, end.read_time.ToNanoseconds() / NS_PER_S)
            self._stats.add(READ_BYTES, end.read_bytes)

    def _report(self, request: Request) -> dict[str, str | int | float]:
        read = self._reader.get(request.request_id)
        verdict = self._verdicts.get(request.request_id, read.verdict if read is not None else 0)
        report: dict[str, str | int | float] = {
            "prompt_tokens": request.num_prompt_tokens,
            "reused_tokens": read.reused_tokens if read is not None else 0,
            "local_tokens": self._local_tokens.get(request.request_id, 0),
            "read_ms": round(read.read_ns / NS_PER_MS, 3) if read is not None else 0.0,
            "read_bytes": read.read_bytes if read is not None else 0,
        }
        if verdict in VERDICTS:
            report["verdict"] = VERDICTS[verdict]
        return report


def _handle(read: Read) -> dict[str, Any]:
    """The keys that make stock code read the common prefix, and not one token more.

    Stock code keeps the *last* remote blocks when there are more than it needs, so the block ids
    are cut together with the token count.
    """
    assert read.answer is not None
    retention, nixl = read.answer.retention, read.answer.nixl
    blocks = -(-read.answer.common_tokens // retention.block_size)
    return {
        "remote_block_ids": tuple(list(group.block_ids[:blocks]) for group in retention.groups),
        "remote_num_tokens": read.answer.common_tokens,
        "remote_engine_id": nixl.nixl_engine_id,
        "remote_request_id": notice_name(read.lease_id),
        "remote_host": nixl.host,
        "remote_port": nixl.port,
        "tp_size": nixl.tp_size,
        "dcp_size": nixl.dcp_size,
        "pp_size": nixl.pp_size,
    }
