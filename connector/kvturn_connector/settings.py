"""How this engine was started, as far as reuse depends on it, for `kvturn doctor`.

Told to the lease service when the engine registers; no rule depends on it. It reads vLLM's
configuration by name and tolerates all that it does not find: an engine never fails to start for
want of something that is only told.
"""

from __future__ import annotations

import contextlib
import hashlib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvturn.v1 import lease_pb2

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kvturn_connector.config import ConnectorConfig

NAME_BYTES_MAX = 64
NAMES_MAX = 64
_COUNT_MAX = (1 << 32) - 1
_RANKS_MAX = 65_536
_NIXL = ("nixl", "nixl-cu13", "nixl-cu12")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NETWORK = Path("/proc/self/ns/net")
_RDMA = Path("/sys/class/infiniband")


def engine_settings(
    vllm_config: object, config: ConnectorConfig, *, plain_attention: bool
) -> lease_pb2.EngineSettings:
    """Returns what is known; fields stay unset where vLLM's configuration does not tell."""
    settings = lease_pb2.EngineSettings(
        dtype=_text(vllm_config, "model_config.dtype").removeprefix("torch."),
        kv_cache_dtype=_text(vllm_config, "cache_config.cache_dtype"),
        tensor_parallel_size=_ranks(vllm_config, "parallel_config.tensor_parallel_size"),
        pipeline_parallel_size=_ranks(vllm_config, "parallel_config.pipeline_parallel_size"),
        max_model_len=_count(vllm_config, "model_config.max_model_len"),
        bidirectional_kv_xfer=config.bidirectional,
        kv_load_failure_policy=_text(vllm_config, "kv_transfer_config.kv_load_failure_policy"),
        kv_recompute_threshold=config.recompute_threshold_tokens,
        kv_buffer_device=_text(vllm_config, "kv_transfer_config.kv_buffer_device"),
        nixl_backends=_backends(vllm_config),
        nixl_version=nixl_version(),
        traced=bool(_text(vllm_config, "observability_config.otlp_traces_endpoint")),
        machine=machine(),
        network=network(),
        rdma_devices=rdma_devices(),
        plain_attention=plain_attention,
        secret_check=secret_check(config.secret),
    )
    settings.question_deadline.FromNanoseconds(config.question_deadline_ns)
    caching = _read(vllm_config, "cache_config.enable_prefix_caching")
    if isinstance(caching, bool):
        settings.prefix_caching = caching
    if _read(vllm_config, "kv_transfer_config.kv_role") != "kv_producer":
        settings.decoder_kv_blocks_ttl.FromNanoseconds(config.max_hold_ns)
    return settings


# --- vLLM's configuration ------------------------------------------------------------------------


def _read(root: object, path: str) -> Any:
    """Returns what lies at a path of attributes, None where it ends early."""
    for name in path.split("."):
        root = getattr(root, name, None)
    return root


def _text(root: object, path: str) -> str:
    value = _read(root, path)
    return "" if value is None else _shown(str(getattr(value, "value", value)))


def _shown(text: str) -> str:
    """Returns a text as the lease service takes it: printable, and not too long."""
    printable = "".join(character for character in text if character.isprintable())
    return printable.encode()[:NAME_BYTES_MAX].decode(errors="ignore")


def _count(root: object, path: str, most: int = _COUNT_MAX) -> int:
    value = _read(root, path)
    return value if type(value) is int and 0 <= value <= most else 0


def _ranks(root: object, path: str) -> int:
    return _count(root, path, _RANKS_MAX)


def _backends(root: object) -> list[str]:
    extra = _read(root, "kv_transfer_config.kv_connector_extra_config")
    asked = extra.get("backends", ["UCX"]) if isinstance(extra, dict) else ()
    return _names(map(str, asked)) if isinstance(asked, list | tuple) else []


def _names(texts: Iterable[str]) -> list[str]:
    return [shown for shown in map(_shown, texts) if shown][:NAMES_MAX]


# --- The machine ---------------------------------------------------------------------------------


def nixl_version() -> str:
    """Returns NIXL's version, "" if it is not installed as a package."""
    for name in _NIXL:
        with contextlib.suppress(PackageNotFoundError):
            return _shown(version(name))
    return ""


def machine() -> str:
    """Names this running machine, "" where the kernel does not tell."""
    return _identity(lambda: _BOOT_ID.read_text().strip())


def network() -> str:
    """Names the network interfaces that this process sees, "" where the kernel does not tell.

    Containers of one machine see their own, unless they share the host's.
    """
    return _identity(lambda: f"{_BOOT_ID.read_text().strip()} {_NETWORK.stat().st_ino}")


def _identity(read: Callable[[], str]) -> str:
    # Hashed: a machine's own ids are nobody's business.
    try:
        return hashlib.blake2b(read().encode(), digest_size=8, person=b"kvturn").hexdigest()
    except OSError:
        return ""


def rdma_devices() -> list[str]:
    """Returns the names of the machine's RDMA devices, with their drivers.

    A name alone does not tell what it is: udev names EFA's by their place, as rdmap16s27.
    """
    try:
        return _names(sorted(map(_with_driver, _RDMA.iterdir())))
    except OSError:
        return []


def _with_driver(device: Path) -> str:
    driver = device / "device" / "driver"
    return f"{device.name} ({driver.resolve().name})" if driver.exists() else device.name


def secret_check(secret: bytes) -> int:
    """Returns a number that differs where secrets do, 1 to 65,535, and 0 for no secret.

    So short that it tells next to nothing of the secret.
    """
    if not secret:
        return 0
    digest = hashlib.blake2b(key=secret, digest_size=2, person=b"check").digest()
    return int.from_bytes(digest) or 1
