"""What both scheduler sides share. Touches vLLM; see ARCHITECTURE.md."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_scheduler import (
    NixlPullConnectorScheduler,
)

from kvturn.v1 import lease_pb2
from kvturn_connector.handle import sane_params
from kvturn_connector.metrics import KvturnStats
from kvturn_connector.tally import SESSION_UP, SPANS

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.utils import BlockIds
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

    from kvturn_connector.config import ConnectorConfig
    from kvturn_connector.lease_client import LeaseClient


class LeasedScheduler(NixlPullConnectorScheduler):
    """NIXL's pull scheduler with a lease client. `prefill.py` and `decode.py` extend it."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        engine_id: str,
        kv_cache_config: KVCacheConfig,
        config: ConnectorConfig,
        client: LeaseClient,
        plain_attention: bool,
    ) -> None:
        super().__init__(vllm_config, engine_id, kv_cache_config)
        self._config = config
        self._client = client
        self._plain_attention = plain_attention
        """False: nothing is retained or read, see `connector.py`."""
        transfer = vllm_config.kv_transfer_config
        assert transfer is not None
        self._decodes = transfer.kv_role != "kv_producer"
        self._model = str(vllm_config.model_config.model)
        self._ranks: int = vllm_config.parallel_config.world_size
        self._stats = KvturnStats()
        self._told_up: bool | None = None
        self._pool: BlockPool | None = None
        self._local_tokens: dict[str, int] = {}
        """Tokens found in the engine's own prefix cache, by request, until it finishes."""

    def bind_gpu_block_pool(self, pool: BlockPool) -> None:
        """Learns the engine's KV memory."""
        self._pool = pool

    def kv_memory(self) -> lease_pb2.KvMemory:
        """The engine's KV memory now. Called by the lease client's thread; reads counters only."""
        if self._pool is None:
            return lease_pb2.KvMemory()
        return lease_pb2.KvMemory(
            total_blocks=self._pool.num_gpu_blocks - 1,  # One is vLLM's null block.
            free_blocks=self._pool.get_num_free_blocks(),
        )

    def on_new_request(self, request: Request) -> None:
        """As stock's, after what the request says has been made sane."""
        request.kv_transfer_params = sane_params(
            request.kv_transfer_params, reads_from_prefill=self._decodes
        )
        super().on_new_request(request)

    def take_stats(self) -> KvturnStats | None:
        """What was counted since the last call; None if nothing."""
        for family, seconds in self._client.take_timings():
            self._stats.add(family, seconds)
        for outcome, count in self._client.take_spans():
            self._stats.add(SPANS, count, outcome)
        up = self._client.registered
        if up is not self._told_up:
            self._told_up = up
            self._stats.add(SESSION_UP, int(up))
        if self._stats.is_empty():
            return None
        stats, self._stats = self._stats, KvturnStats()
        return stats

    def _reusable(self, request: Request) -> bool:
        """True if all that the request's KV depends on is in its tokens and its scope."""
        return bool(
            self._plain_attention
            and request.prompt_token_ids
            and getattr(request, "prompt_embeds", None) is None
        )

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """As stock's; notes the local prefix-cache hit of the first pass."""
        self._local_tokens.setdefault(request.request_id, num_computed_tokens)
        return super().get_num_new_matched_tokens(request, num_computed_tokens)

    def request_finished(
        self, request: Request, block_ids: BlockIds
    ) -> tuple[bool, dict[str, Any] | None]:
        """As stock's."""
        self._local_tokens.pop(request.request_id, None)
        return super().request_finished(request, block_ids)
