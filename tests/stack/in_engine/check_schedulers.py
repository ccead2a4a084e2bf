"""Run by a vLLM environment's Python: the scheduler sides on vLLM's own code, without an engine.

Requests, the block pool and the stock pull scheduler are vLLM's; only the lease client is a
stand-in that notes what it is told.
"""

import copy
import sys
from types import SimpleNamespace
from typing import Any

import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.request import Request, RequestStatus

from kvturn.v1 import common_pb2
from kvturn_connector.connector import BothScheduler
from kvturn_connector.decode import DecodeScheduler
from kvturn_connector.prefill import PrefillScheduler
from kvturn_connector.retention import Freed

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
            if hasattr(tested, "bind_gpu_block_pool"):
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
    long = request("long", 44, None)
    decode.on_new_request(long)
    client.withdrawn.clear()
    for held in decode._held.values():
        held.withdrawn = False
    allocated(pool, decode, long, 8)  # Its first chunk.
    decode.build_connector_meta(SimpleNamespace())
    assert client.withdrawn, "36 blocks are still wanted, 40 are free, 8 must stay so"


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
