"""What an engine tells of how it was started, and what of it the lease service takes."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from kvturn.v1 import common_pb2, lease_pb2
from kvturn_connector.config import ConnectorConfig
from kvturn_connector.settings import (
    engine_settings,
    machine,
    network,
    rdma_devices,
    secret_check,
)
from kvturn_lease import wire
from kvturn_lease.errors import InvalidArgument

CONFIG = ConnectorConfig.from_extra(
    {
        "bidirectional_kv_xfer": True,
        "kvturn_lease_endpoint": "127.0.0.1:7600",
        "decoder_kv_blocks_ttl": 90,
        "kv_recompute_threshold": 32,
        "kvturn_question_deadline_ms": 80,
    }
)


def vllm_config(role: str = "kv_consumer", **extra: object) -> SimpleNamespace:
    """Returns the parts of vLLM's configuration that are read, shaped as in 0.29.0 and 0.32.0."""
    return SimpleNamespace(
        model_config=SimpleNamespace(dtype="torch.bfloat16", max_model_len=8192),
        cache_config=SimpleNamespace(cache_dtype="auto", enable_prefix_caching=False),
        parallel_config=SimpleNamespace(tensor_parallel_size=2, pipeline_parallel_size=1),
        kv_transfer_config=SimpleNamespace(
            kv_role=role,
            kv_load_failure_policy="recompute",
            kv_buffer_device="cpu",
            kv_connector_extra_config=extra,
        ),
        observability_config=SimpleNamespace(otlp_traces_endpoint="http://127.0.0.1:4317"),
    )


def description(settings: lease_pb2.EngineSettings) -> lease_pb2.EngineDescription:
    """Returns an engine's description that is in order but for what a test makes of it."""
    return lease_pb2.EngineDescription(
        engine_id="p", incarnation="i", role=common_pb2.ENGINE_ROLE_PREFILL, settings=settings
    )


def test_an_engine_tells_how_it_was_started() -> None:
    """All that vLLM's configuration says, in the words of the flags."""
    config = vllm_config(backends=["LIBFABRIC"])
    told = engine_settings(config, CONFIG, plain_attention=True)
    assert (told.dtype, told.kv_cache_dtype) == ("bfloat16", "auto")
    assert (told.tensor_parallel_size, told.pipeline_parallel_size) == (2, 1)
    assert told.max_model_len == 8192
    assert told.HasField("prefix_caching")
    assert not told.prefix_caching
    assert (told.bidirectional_kv_xfer, told.kv_recompute_threshold) == (True, 32)
    assert told.decoder_kv_blocks_ttl.ToSeconds() == 90
    assert told.question_deadline.ToMilliseconds() == 80
    assert (told.kv_load_failure_policy, told.kv_buffer_device) == ("recompute", "cpu")
    assert list(told.nixl_backends) == ["LIBFABRIC"]
    assert told.traced
    assert (told.machine, told.network) == (machine(), network())
    assert len({told.machine, told.network, ""}) == 3
    wire.engine_info(description(told))


def test_an_engine_that_retains_nothing_tells_no_hold_and_the_default_backend() -> None:
    """A prefill engine; NIXL's backend is UCX unless another one is asked for."""
    told = engine_settings(vllm_config("kv_producer"), CONFIG, plain_attention=False)
    assert not told.HasField("decoder_kv_blocks_ttl")
    assert list(told.nixl_backends) == ["UCX"]
    assert told.HasField("plain_attention")
    assert not told.plain_attention


@pytest.mark.parametrize("missing", list(vars(vllm_config())))
def test_what_a_vllm_does_not_have_is_not_told(missing: str) -> None:
    """Each part of the configuration may be gone; the rest is told all the same."""
    config = vllm_config()
    delattr(config, missing)
    told = engine_settings(config, CONFIG, plain_attention=True)
    assert told.kv_recompute_threshold == 32
    assert told.HasField("prefix_caching") == (missing != "cache_config")
    assert bool(told.nixl_backends) == (missing != "kv_transfer_config")
    assert engine_settings(object(), CONFIG, plain_attention=True).dtype == ""


def test_values_of_other_types_and_lengths_are_told_as_the_lease_service_takes_them() -> None:
    """A later vLLM may say anything: no word of it may cost the engine its session."""
    config = vllm_config(backends=["a\nb" * 100, "", 7])
    config.model_config = SimpleNamespace(dtype="\x00" * 9 + "ü" * 99, max_model_len=-1)
    config.parallel_config = SimpleNamespace(
        tensor_parallel_size=1 << 20, pipeline_parallel_size="2"
    )
    config.cache_config.enable_prefix_caching = None
    told = engine_settings(config, CONFIG, plain_attention=True)
    assert told.dtype == "ü" * 32
    assert (told.tensor_parallel_size, told.pipeline_parallel_size, told.max_model_len) == (0, 0, 0)
    assert not told.HasField("prefix_caching")
    wire.engine_info(description(told))


def test_secrets_that_differ_show_and_are_not_told() -> None:
    """Two bytes: enough to see a difference, too few to find a secret by."""
    one, other = secret_check(b"0123456789abcdef"), secret_check(b"0123456789abcdeX")
    assert one != other
    assert {one, other} <= set(range(1, 1 << 16))
    assert secret_check(b"") == 0


def test_rdma_devices_are_told_with_their_drivers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """udev names EFA's by their place, so that only the driver tells what they are."""
    monkeypatch.setattr("kvturn_connector.settings._RDMA", tmp_path / "infiniband")
    assert rdma_devices() == []
    for device, driver in (("rdmap16s27", "efa"), ("mlx5_0", "mlx5_core")):
        (tmp_path / driver).mkdir()
        place = tmp_path / "infiniband" / device / "device"
        place.mkdir(parents=True)
        (place / "driver").symlink_to(tmp_path / driver)
    (tmp_path / "infiniband" / "rxe0").mkdir()
    assert rdma_devices() == ["mlx5_0 (mlx5_core)", "rdmap16s27 (efa)", "rxe0"]


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"dtype": "x" * 65}, "dtype"),
        ({"machine": "a\nb"}, "machine"),
        ({"nixl_backends": ["UCX"] * 65}, "nixl_backends"),
        ({"rdma_devices": [""]}, r"rdma_devices\[0\]"),
        ({"tensor_parallel_size": 65_537}, "tensor_parallel_size"),
        ({"secret_check": 65_536}, "secret_check"),
        ({"decoder_kv_blocks_ttl": {"seconds": -1}}, "decoder_kv_blocks_ttl"),
        ({"question_deadline": {"seconds": -1}}, "question_deadline"),
    ],
)
def test_settings_out_of_bounds_are_refused_by_name(
    settings: dict[str, object], field: str
) -> None:
    """By name: the lease service keeps them and tells them to every router."""
    message = lease_pb2.EngineSettings(**settings)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match=rf"register\.engine\.settings\.{field} "):
        wire.engine_info(description(message))
