"""The class that vLLM loads: `kv_connector_module_path: kvturn_connector.connector`.

A facade. What it does is in `prefill.py` and `decode.py` (scheduler process) and `worker.py` (one
per rank). Without `kvturn_lease_endpoint`, or with `bidirectional_kv_xfer: false`, it is the stock
`NixlPullConnector` and nothing else.
"""

from __future__ import annotations

import logging
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import (
    NixlBaseConnector,
    NixlPullConnector,
)
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import FullAttentionSpec

from kvturn.v1 import common_pb2, lease_pb2
from kvturn_connector.config import NAME_BYTES_MAX, ConfigError, ConnectorConfig
from kvturn_connector.decode import DecodeScheduler, engine_waker
from kvturn_connector.lease_client import LeaseClient
from kvturn_connector.metrics import KvturnPromMetrics, KvturnStats
from kvturn_connector.prefill import PrefillScheduler
from kvturn_connector.retention import Retentions
from kvturn_connector.scheduler import LeasedScheduler
from kvturn_connector.session import EngineSession
from kvturn_connector.settings import engine_settings
from kvturn_connector.worker import KvturnWorker, KvturnWorkerMetadata, nixl_progress_delay

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.kv_cache_interface import KVCacheConfig

ROLES = {
    "kv_producer": common_pb2.ENGINE_ROLE_PREFILL,
    "kv_consumer": common_pb2.ENGINE_ROLE_DECODE,
    "kv_both": common_pb2.ENGINE_ROLE_BOTH,
}

logger = logging.getLogger("vllm.kvturn")


class BothScheduler(PrefillScheduler, DecodeScheduler):
    """An engine that serves both legs (`kv_both`)."""


SCHEDULERS: dict[str, type[PrefillScheduler | DecodeScheduler]] = {
    "kv_producer": PrefillScheduler,
    "kv_consumer": DecodeScheduler,
    "kv_both": BothScheduler,
}


class KvturnConnector(NixlPullConnector):
    """NIXL's pull connector with leases on decode-held KV."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        transfer = vllm_config.kv_transfer_config
        assert transfer is not None
        config = ConnectorConfig.from_extra(transfer.kv_connector_extra_config)
        self._client: LeaseClient | None = None
        if not config.active:
            if config.lease_endpoints and role == KVConnectorRole.SCHEDULER:
                logger.warning(
                    "kvturn: kvturn_lease_endpoint is set and bidirectional_kv_xfer is not: nothing"
                    " is retained and nothing read; set it to true in kv_connector_extra_config"
                )
            with nixl_progress_delay(config.nixl_progress_delay_us):
                super().__init__(vllm_config, role, kv_cache_config)
            return
        _check(transfer)
        _name_incarnation(vllm_config)
        # Past the stock pull connector, which would build the stock halves.
        NixlBaseConnector.__init__(self, vllm_config, role, kv_cache_config)
        if role == KVConnectorRole.SCHEDULER:
            self.connector_scheduler = self._scheduler(vllm_config, config, kv_cache_config)
        else:
            with nixl_progress_delay(config.nixl_progress_delay_us):
                self.connector_worker = KvturnWorker(vllm_config, self.engine_id, kv_cache_config)

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        """Hands the scheduler side the pool: the memory there is, whose blocks decode holds."""
        if isinstance(self.connector_scheduler, LeasedScheduler):
            self.connector_scheduler.bind_gpu_block_pool(gpu_block_pool)

    def build_connector_worker_meta(self) -> KvturnWorkerMetadata | None:
        """What this rank has to tell the scheduler side."""
        if isinstance(self.connector_worker, KvturnWorker):
            return self.connector_worker.worker_metadata()
        return None

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """Stock's of this rank, or what the scheduler side counted."""
        if isinstance(self.connector_scheduler, LeasedScheduler):
            return self.connector_scheduler.take_stats()
        return super().get_kv_connector_stats()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats:
        """Statistics as they came from an engine, or empty ones."""
        return KvturnStats(data=data) if data is not None else KvturnStats()

    @classmethod
    def build_prom_metrics(cls, *args: Any, **kwargs: Any) -> KvturnPromMetrics:
        """What `/metrics` shows of them."""
        return KvturnPromMetrics(*args, **kwargs)

    def reset_cache(self) -> bool | None:
        """Gives up all retentions. False while their release is awaited: call again."""
        if isinstance(self.connector_scheduler, DecodeScheduler):
            return self.connector_scheduler.withdraw_all(common_pb2.RELEASE_REASON_PRESSURE)
        return super().reset_cache()

    def shutdown(self) -> None:
        """Ends the session, then stock's halves."""
        if self._client is not None:
            self._client.shutdown()
        super().shutdown()

    def _scheduler(
        self, vllm_config: VllmConfig, config: ConnectorConfig, kv_cache_config: KVCacheConfig
    ) -> PrefillScheduler | DecodeScheduler:
        transfer = self.kv_transfer_config
        engine_name = _engine_name(vllm_config, config, self.engine_id)
        plain = _plain_attention(kv_cache_config)
        description = _describe(vllm_config, config, engine_name, self.engine_id)
        description.settings.CopyFrom(engine_settings(vllm_config, config, plain_attention=plain))
        retentions = Retentions(description.incarnation, config.retentions_max, config.max_hold_ns)
        scheduler: PrefillScheduler | DecodeScheduler | None = None

        def memory() -> lease_pb2.KvMemory:
            return lease_pb2.KvMemory() if scheduler is None else scheduler.kv_memory()

        client = self._client = LeaseClient(
            config,
            engine_name,
            EngineSession(description, retentions, memory),
            wake_engine=engine_waker(),
        )
        side = SCHEDULERS[str(transfer.kv_role)]
        scheduler = side(vllm_config, self.engine_id, kv_cache_config, config, client, plain)
        return scheduler


def _check(transfer: KVTransferConfig) -> None:
    """Refuses what would break a promise, with one line that names the fix."""
    reads = transfer.kv_role in ("kv_producer", "kv_both")
    if reads and transfer.kv_buffer_device == "cpu" and current_platform.device_type != "cpu":
        raise ConfigError(
            "kv_buffer_device: with host buffers NIXL cannot read from decode; set it to the "
            "engine's device, or set bidirectional_kv_xfer to false"
        )
    if reads and transfer.kv_load_failure_policy != "recompute":
        raise ConfigError(
            f"kv_load_failure_policy: {transfer.kv_load_failure_policy!r} would turn a failed read "
            'into a failed request; set "kv_load_failure_policy": "recompute" on prefill engines'
        )


def _name_incarnation(vllm_config: VllmConfig) -> None:
    """Makes NIXL's engine id contain the incarnation.

    An engine id that the operator fixed outlives a restart; what is read under it must not.
    vLLM's `instance_id` is drawn anew at each start and is the same in all processes of an engine.
    """
    transfer = vllm_config.kv_transfer_config
    assert transfer is not None
    suffix = f"-{vllm_config.instance_id}"
    if not str(transfer.engine_id).endswith(suffix):
        transfer.engine_id = f"{transfer.engine_id}{suffix}"


def _engine_name(vllm_config: VllmConfig, config: ConnectorConfig, nixl_engine_id: str) -> str:
    """Each data-parallel rank is an engine of its own; they share one configuration."""
    if not config.engine_name:
        return nixl_engine_id
    index = vllm_config.parallel_config.data_parallel_index
    name = f"{config.engine_name}-dp{index}" if index else config.engine_name
    if len(name.encode()) > NAME_BYTES_MAX:
        raise ConfigError(
            f"kvturn_engine_name: {name!r}, the name of this data-parallel rank, is longer than"
            f" {NAME_BYTES_MAX} bytes; shorten it"
        )
    return name


def _describe(
    vllm_config: VllmConfig, config: ConnectorConfig, engine_name: str, nixl_engine_id: str
) -> lease_pb2.EngineDescription:
    from vllm import __version__ as vllm_version
    from vllm import envs

    transfer, parallel = vllm_config.kv_transfer_config, vllm_config.parallel_config
    assert transfer is not None
    return lease_pb2.EngineDescription(
        engine_id=engine_name,
        incarnation=nixl_engine_id[-64:].replace(".", "-"),
        role=ROLES[str(transfer.kv_role)],
        http_address=config.http_address,
        nixl=common_pb2.NixlAddress(
            nixl_engine_id=nixl_engine_id,
            host=envs.VLLM_NIXL_SIDE_CHANNEL_HOST,
            port=envs.VLLM_NIXL_SIDE_CHANNEL_PORT + parallel.data_parallel_index,
            tp_size=parallel.tensor_parallel_size,
            dcp_size=parallel.decode_context_parallel_size,
            pp_size=parallel.pipeline_parallel_size,
        ),
        model=str(vllm_config.model_config.model),
        vllm_version=vllm_version,
        connector_version=_connector_version(),
        kv_blocks=vllm_config.cache_config.num_gpu_blocks or 0,
        block_size=vllm_config.cache_config.block_size,
    )


def _plain_attention(kv_cache_config: KVCacheConfig) -> bool:
    """True if all KV is full attention (MLA counts) in one group.

    Only then can a read be cut at any token and a failed one recomputed: vLLM does not report the
    blocks of a failed read for other cache groups, so prefill would go on with what is in them.
    """
    groups = kv_cache_config.kv_cache_groups
    return len(groups) == 1 and isinstance(groups[0].kv_cache_spec, FullAttentionSpec)


def _connector_version() -> str:
    try:
        return version("kvturn-connector")
    except PackageNotFoundError:
        return "unknown"
