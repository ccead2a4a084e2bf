"""Run by a vLLM environment's Python: the scheduler sides on vLLM's own code, without an engine.

Requests, the block pool and the stock pull scheduler are vLLM's; only the lease client is a
stand-in that notes what it is told.
"""

import copy
import functools
import sys
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import prometheus_client
import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.request import Request, RequestStatus

from kvturn.metrics import Family
from kvturn.v1 import common_pb2, lease_pb2
from kvturn_connector.config import SWITCHES
from kvturn_connector.connector import BothScheduler, KvturnConnector
from kvturn_connector.decode import LATE_NS, DecodeScheduler
from kvturn_connector.metrics import KvturnStats
from kvturn_connector.prefill import PrefillScheduler
from kvturn_connector.retention import Freed
from kvturn_connector.tally import DIGEST, FAMILIES, QUESTION, labels_of

BLOCK_SIZE = 16
POOL_BLOCKS = 128
ROLES = {
    PrefillScheduler: "kv_producer",
    DecodeScheduler: "kv_consumer",
    BothScheduler: "kv_both",
}
HANDLE = {
    "remote_block_ids": [[1, 2, 3, 4]],
    "remote_engine_id": "e",
    "remote_request_id": "x",
    "remote_host": "h",
    "remote_port": 1,
    "tp_size": 1,
}
HOSTILE = (
    "text",
    [1],
    5,
    {"do_remote_decode": True, "kvturn": [1]},
    {"do_remote_prefill": True},
    {"do_remote_prefill": True, "do_remote_decode": True},
    {"do_remote_prefill": True, "remote_block_ids": [[1]]},
    {"do_remote_prefill": True, **HANDLE, "remote_engine_id": ["e"]},
    {"do_remote_prefill": True, **HANDLE, "remote_request_id": {}},
    {"do_remote_prefill": True, **HANDLE, "remote_request_id": "kvturn:a.1.1"},
    {"do_remote_prefill": True, **HANDLE, "remote_block_ids": 7},
    {"do_remote_prefill": True, **HANDLE, "remote_block_ids": []},
    {"do_remote_decode": True, **HANDLE, "remote_num_tokens": "7"},
    {"do_remote_decode": True, **HANDLE, "remote_request_id": "kvturn:a.1.1"},
    {"do_remote_decode": True, "_remote_blocks_processed": True},
    {"kvturn": {"conversation": "c", "model": "m", "turn": 2**40, "tenant": 5}},
)


class Client:
    """Notes what the scheduler side says to the lease client."""

    def __init__(self) -> None:
        self.vouching, self.withdrawn, self.freed = True, [], []  # type: ignore[var-annotated]
        self.retained: list[common_pb2.Retention] = []
        self.silent = False
        self.outlooks: list[tuple[int, int]] = []
        self.reading: list[int] = []
        self.gave: list[dict[str, int]] = []
        self.registered = True
        self.timings: list[tuple[Family, float]] = []
        self.spans: list[tuple[str, int]] = []

    def take_timings(self) -> list[tuple[Family, float]]:
        timings, self.timings = self.timings, []
        return timings

    def take_spans(self) -> list[tuple[str, int]]:
        spans, self.spans = self.spans, []
        return spans

    def take_outlooks(self) -> list[tuple[int, int]]:
        outlooks, self.outlooks = self.outlooks, []
        return outlooks

    def take_reading(self) -> list[int]:
        reading, self.reading = self.reading, []
        return reading

    def gave_way(self, traceparent: str, attributes: dict[str, int]) -> None:
        self.gave.append({"traceparent": traceparent, **attributes})

    @property
    def has_freed(self) -> bool:
        return bool(self.freed)

    def take_freed(self) -> list[Freed]:
        freed, self.freed = self.freed, []
        return freed

    def take_answers(self) -> list[Any]:
        return []

    def ask(self, question: Any) -> None:
        pass

    def end_read(self, *end: Any) -> None:
        pass

    def retain(self, number: int, offer: common_pb2.Retention, *_: Any) -> None:
        self.retained.append(offer)

    def withdraw(self, number: int, reason: int) -> None:
        self.withdrawn.append(number)

    def release(self) -> None:
        """The lease service confirms all withdrawals."""
        reason = common_pb2.RELEASE_REASON_PRESSURE
        self.freed += [Freed(number, reason) for number in self.withdrawn]
        self.withdrawn = []


def scheduler(side: type[Any], client: Client, plain_attention: bool = True) -> Any:
    """A scheduler side as vLLM would make it."""
    transfer = SimpleNamespace(
        get_from_extra_config=lambda key, default: {"bidirectional_kv_xfer": True}.get(
            key, default
        ),
        kv_buffer_device="cpu",
        kv_role=ROLES[side],
    )
    spec = FullAttentionSpec(BLOCK_SIZE, num_kv_heads=1, head_size=8, dtype=torch.bfloat16)
    group = SimpleNamespace(kv_cache_spec=spec)
    cache = SimpleNamespace(
        kv_cache_groups=[group],
        transfer_groups=[group],
        has_mamba_layers=False,
        select_transfer_block_ids=lambda block_ids: block_ids,
    )
    sizes = dict.fromkeys(
        ("tensor_parallel_size", "decode_context_parallel_size", "pipeline_parallel_size"), 1
    )
    config = SimpleNamespace(
        cache_config=SimpleNamespace(block_size=BLOCK_SIZE, mamba_cache_mode="none"),
        parallel_config=SimpleNamespace(data_parallel_index=0, world_size=1, **sizes),
        kv_transfer_config=transfer,
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=True),
        model_config=SimpleNamespace(model="m"),
        num_prefill_lookahead_tokens=0,
    )
    settings = SimpleNamespace(question_deadline_ns=50_000_000, recompute_threshold_tokens=16)
    return side(config, "engine", cache, settings, client, plain_attention)


def request(request_id: str, blocks: int, params: Any) -> Request:
    """A request whose prompt fills `blocks` blocks."""
    sampling = SamplingParams(max_tokens=4, extra_args={"kv_transfer_params": params})
    return Request(request_id, list(range(1, blocks * BLOCK_SIZE + 1)), sampling, None)


def allocated(pool: BlockPool, side: Any, one: Request, blocks: int) -> list[Any]:
    """vLLM gives a request its blocks."""
    taken = pool.get_new_blocks(blocks)
    side.update_state_after_alloc(one, KVCacheBlocks((taken,)), 0)
    return taken


def finished(pool: BlockPool, side: Any, one: Request, taken: list[Any]) -> None:
    """vLLM ends a request and takes its own reference of the blocks back."""
    one.status = RequestStatus.FINISHED_STOPPED
    one.num_computed_tokens = one.num_tokens
    side.request_finished(one, ([block.block_id for block in taken],))
    pool.free_blocks(reversed(taken))


def check_no_request_can_raise_in_the_scheduler_thread() -> None:
    for side in ROLES:
        for params in HOSTILE:
            pool = BlockPool(POOL_BLOCKS + 1, True, BLOCK_SIZE)
            one = request("r", 4, copy.deepcopy(params))
            tested = scheduler(side, Client())
            tested.bind_gpu_block_pool(pool)
            tested.on_new_request(one)
            tokens, waits = tested.get_num_new_matched_tokens(one, 0)
            assert (tokens, waits) == (0, False), f"{side.__name__} would read under {params}"
            taken = allocated(pool, tested, one, 4)
            meta = tested.build_connector_meta(SimpleNamespace())
            assert not meta.reqs_to_recv, f"{side.__name__} would post under {params}"
            finished(pool, tested, one, taken)
            tested.build_connector_meta(SimpleNamespace())


def retaining(pool_blocks: int, sizes: tuple[int, ...]) -> tuple[BlockPool, Any, Client]:
    """A decode side that retains one finished request of each size, in blocks."""
    pool, client = BlockPool(pool_blocks + 1, True, BLOCK_SIZE), Client()
    decode = scheduler(DecodeScheduler, client)
    decode.bind_gpu_block_pool(pool)
    for index, blocks in enumerate(sizes):
        said = {"conversation": f"c{index}", "model": "m", "tenant": "", "turn": 1}
        one = request(f"old{index}", blocks, {"kvturn": said})
        decode.on_new_request(one)
        finished(pool, decode, one, allocated(pool, decode, one, blocks))
    assert [offer.token_count for offer in client.retained] == [n * BLOCK_SIZE for n in sizes]
    assert pool.get_num_free_blocks() == pool_blocks - sum(sizes)
    return pool, decode, client


def check_model_without_plain_attention_is_not_reused_and_says_so() -> None:
    said = {"conversation": "c", "model": "m", "tenant": "", "turn": 2, "lease_id": "a.1.1"}
    pool, client = BlockPool(POOL_BLOCKS + 1, True, BLOCK_SIZE), Client()
    decode = scheduler(DecodeScheduler, client, plain_attention=False)
    decode.bind_gpu_block_pool(pool)
    one = request("d", 4, {"kvturn": dict(said)})
    decode.on_new_request(one)
    finished(pool, decode, one, allocated(pool, decode, one, 4))
    assert not client.retained
    assert pool.get_num_free_blocks() == POOL_BLOCKS
    prefill = scheduler(PrefillScheduler, client, plain_attention=False)
    two = request("p", 4, {"do_remote_decode": True, "kvturn": dict(said)})
    prefill.on_new_request(two)
    assert prefill.get_num_new_matched_tokens(two, 0) == (0, False)
    allocated(pool, prefill, two, 4)
    two.status = RequestStatus.FINISHED_LENGTH_CAPPED
    _, returned = prefill.request_finished(two, ([1, 2, 3, 4],))
    assert returned["kvturn"]["verdict"] == "unsupported_model"


def check_retentions_give_way_to_a_new_request() -> None:
    pool, decode, client = retaining(POOL_BLOCKS, (40, 40))
    decode.on_new_request(request("new", 60, None))
    assert client.withdrawn == [1], "the oldest, and no more than needed"
    assert decode.has_pending_push_work(), "an engine that waits for memory must step"
    client.release()
    decode.build_connector_meta(SimpleNamespace())
    assert pool.get_num_free_blocks() == POOL_BLOCKS - 40


def check_retentions_give_way_to_a_request_that_waits_again() -> None:
    pool, decode, client = retaining(POOL_BLOCKS, ())
    preempted = request("again", 60, None)
    decode.on_new_request(preempted)
    pool.free_blocks(reversed(allocated(pool, decode, preempted, 60)))  # vLLM preempts it.
    for index in (1, 2):
        said = {"conversation": f"c{index}", "model": "m", "tenant": "", "turn": 1}
        one = request(f"late{index}", 40, {"kvturn": said})
        decode.on_new_request(one)
        finished(pool, decode, one, allocated(pool, decode, one, 40))
    decode.get_num_new_matched_tokens(preempted, 0)  # vLLM asks on each scheduling pass.
    decode.build_connector_meta(SimpleNamespace())
    assert client.withdrawn == [1]


def check_rest_of_a_chunked_prompt_is_still_wanted() -> None:
    pool, decode, client = retaining(POOL_BLOCKS, (40, 40))
    long = request("long", 40, None)
    decode.on_new_request(long)
    allocated(pool, decode, long, 8)  # Its first chunk.
    decode.build_connector_meta(SimpleNamespace())
    assert not client.withdrawn, "32 blocks are wanted, 40 are free, 8 must stay so"
    pool.get_new_blocks(8)  # Another request grows.
    decode.build_connector_meta(SimpleNamespace())
    assert client.withdrawn, "32 blocks are still wanted, and 32 are free"


def check_what_is_on_its_way_is_counted_for_a_moment_only() -> None:
    pool, decode, client = retaining(POOL_BLOCKS, (40, 40))
    decode.on_new_request(request("new", 60, None))
    for _ in range(3):
        decode.build_connector_meta(SimpleNamespace())
    assert client.withdrawn == [1], "its blocks will be there in a step or two"
    decode._withdrawn[1] -= LATE_NS
    decode.build_connector_meta(SimpleNamespace())
    assert client.withdrawn == [1, 2], "waits for one release while others could be had"
    client.release()
    decode.build_connector_meta(SimpleNamespace())
    assert pool.get_num_free_blocks() == POOL_BLOCKS
    assert not decode.has_pending_push_work()


def check_what_is_being_read_is_not_waited_for() -> None:
    _, decode, client = retaining(POOL_BLOCKS, (40, 40))
    decode.on_new_request(request("new", 60, None))
    client.reading = [1]
    decode.build_connector_meta(SimpleNamespace())
    assert client.withdrawn == [1, 2]


def check_idle_conversations_give_way_first_and_expected_ones_last() -> None:
    _, decode, client = retaining(POOL_BLOCKS, (20, 20, 20))
    client.outlooks = [(1, lease_pb2.OUTLOOK_EXPECTED), (3, lease_pb2.OUTLOOK_IDLE)]
    decode.build_connector_meta(SimpleNamespace())
    decode.on_new_request(request("new", 100, None))
    assert client.withdrawn == [3, 2]


def check_silent_lease_service_makes_decode_give_way_earlier() -> None:
    _, decode, client = retaining(POOL_BLOCKS, (40, 40))
    decode.on_new_request(request("new", 32, None))
    assert not client.withdrawn, "32 wanted, 48 free: more than the 8 to be kept"
    client.silent = True
    decode.build_connector_meta(SimpleNamespace())
    assert client.withdrawn == [1], "what is given up now comes back seconds later"


def check_nothing_is_offered_to_a_silent_lease_service_when_memory_is_short() -> None:
    pool, decode, client = retaining(POOL_BLOCKS, (40,))
    client.silent = True
    said = {"conversation": "c", "model": "m", "tenant": "", "turn": 1}
    one = request("short", 60, {"kvturn": said})
    decode.on_new_request(one)
    finished(pool, decode, one, allocated(pool, decode, one, 60))
    assert len(client.retained) == 1, "held while 28 of 128 blocks are free"
    assert pool.get_num_free_blocks() == POOL_BLOCKS - 40


def shown(
    stats: KvturnStats, extra: Mapping[str, object] | None = None
) -> prometheus_client.CollectorRegistry:
    """Returns what vLLM would show of statistics."""
    registry = prometheus_client.CollectorRegistry()
    kinds = {
        kind: functools.partial(kind, registry=registry)
        for kind in (
            prometheus_client.Gauge,
            prometheus_client.Counter,
            prometheus_client.Histogram,
        )
    }
    transfer = None if extra is None else SimpleNamespace(kv_connector_extra_config=extra)
    config = SimpleNamespace(kv_transfer_config=transfer)
    metrics = KvturnConnector.build_prom_metrics(config, kinds, ["engine"], {0: ["0"]})
    metrics.observe(KvturnConnector.build_kv_connector_stats(stats.data).data)
    return registry


def check_all_metrics_are_there_from_the_start() -> None:
    """With every value of their labels, and with the meanings that the documents give."""
    metrics = {family.name: family for family in shown(KvturnStats()).collect()}
    for family in FAMILIES:
        found = metrics[family.name.removesuffix("_total")]
        assert (found.type, found.documentation) == (family.kind, family.about)
        given = {sample.labels.get(label) for sample in found.samples for label in family.labels}
        assert given >= set(filter(None, labels_of(family)))


def check_metrics_tell_what_turns_the_connector_off() -> None:
    """Also those of one that does nothing."""
    endpoint, both = {"kvturn_lease_endpoint": "127.0.0.1:1"}, {"bidirectional_kv_xfer": True}
    for extra in ({}, endpoint, both, {**endpoint, **both}):
        value = shown(KvturnStats(), extra).get_sample_value
        for setting in SWITCHES:
            told = value("kvturn_connector_off", {"engine": "0", "setting": setting})
            assert told == (setting not in extra)


def check_prefill_counts_reads_verdicts_and_times() -> None:
    client = Client()
    prefill = scheduler(PrefillScheduler, client)
    client.timings = [(QUESTION, 0.002), (DIGEST, 0.25)]
    client.spans = [("sent", 7), ("dropped", 2)]
    for outcome in (lease_pb2.READ_OUTCOME_COMPLETED, lease_pb2.READ_OUTCOME_NOT_READ):
        end = lease_pb2.EndReadRequest(outcome=outcome, read_bytes=1 << 20)
        end.read_time.FromMilliseconds(20)
        prefill._count_read(end)
    value = shown(prefill.take_stats()).get_sample_value
    engine = {"engine": "0"}
    for outcome in ("completed", "not_read"):
        assert value("kvturn_connector_reads_total", {**engine, "outcome": outcome}) == 1
    assert value("kvturn_connector_read_seconds_count", engine) == 1
    assert value("kvturn_connector_read_seconds_sum", engine) == 0.02
    assert value("kvturn_connector_read_bytes_sum", engine) == 1 << 20
    assert value("kvturn_connector_question_seconds_sum", engine) == 0.002
    assert value("kvturn_connector_digest_seconds_sum", engine) == 0.25
    assert value("kvturn_connector_session_up", engine) == 1
    for outcome, count in (("sent", 7), ("dropped", 2)):
        assert value("kvturn_connector_spans_total", {**engine, "outcome": outcome}) == count
    assert prefill.take_stats() is None
    client.registered = False
    assert shown(prefill.take_stats()).get_sample_value("kvturn_connector_session_up", engine) == 0


def check_pressure_shows_in_trace_and_metrics() -> None:
    _, decode, client = retaining(POOL_BLOCKS, (40, 40))
    client.outlooks = [(2, lease_pb2.OUTLOOK_IDLE)]
    decode.build_connector_meta(SimpleNamespace())
    traceparent = f"00-{1:032x}-{1:016x}-01"
    said = {"conversation": "c", "model": "m", "traceparent": traceparent}
    decode.on_new_request(request("new", 60, {"kvturn": said}))
    assert client.gave == [
        {
            "traceparent": traceparent,
            "kvturn.blocks_wanted": 60,
            "kvturn.blocks_given_up": 40,
            "kvturn.given_up_normal": 0,
            "kvturn.given_up_expected": 0,
            "kvturn.given_up_idle": 1,
        }
    ]
    client.release()
    decode.build_connector_meta(SimpleNamespace())
    stats = KvturnStats().aggregate(decode.take_stats())
    assert decode.take_stats() is None
    value = shown(stats).get_sample_value
    assert value("kvturn_connector_retained_blocks", {"engine": "0"}) == 40
    ended = {"engine": "0", "reason": "pressure"}
    assert value("kvturn_connector_releases_total", ended) == 1
    assert value("kvturn_connector_given_up_total", {"engine": "0", "outlook": "idle"}) == 1
    assert stats.reduce()["kvturn given up idle"] == 1


def check_every_side_tells_its_memory() -> None:
    """What requests hold is active on prefill too; what is retained is told by decode."""
    for side in ROLES:
        pool = BlockPool(POOL_BLOCKS + 1, True, BLOCK_SIZE)
        tested = scheduler(side, Client())
        assert tested.kv_memory().total_blocks == 0, "there is a pool before vLLM has made it"
        tested.bind_gpu_block_pool(pool)
        one = request("r", 4, None)
        tested.on_new_request(one)
        allocated(pool, tested, one, 4)
        told = tested.kv_memory()
        assert (told.total_blocks, told.free_blocks) == (POOL_BLOCKS, POOL_BLOCKS - 4)
        assert told.retained_blocks == 0
    _, decode, _ = retaining(POOL_BLOCKS, (40,))
    told = decode.kv_memory()
    assert (told.free_blocks, told.retained_blocks) == (POOL_BLOCKS - 40, 40)


def check_cache_reset_gives_retentions_up_and_then_succeeds() -> None:
    pool, decode, client = retaining(POOL_BLOCKS, (40,))
    assert not pool.reset_prefix_cache(), "blocks that may be being read were taken away"
    assert client.withdrawn == [1]
    client.release()
    assert pool.reset_prefix_cache()
    assert pool.get_num_free_blocks() == POOL_BLOCKS
    assert not decode.has_pending_push_work()


if __name__ == "__main__":
    checks = {name: check for name, check in list(globals().items()) if name.startswith("check_")}
    for name in sys.argv[1:] or checks:
        checks[name]()
        print("ok", name)
