"""Asks engines from here: health, version, metrics; and tries their side channels."""

import asyncio
import json
import re
import ssl
from collections.abc import Sequence

from kvturn.address import is_loopback, is_unspecified
from kvturn.v1 import lease_pb2
from kvturn_cli.doctor.facts import CacheConfig, EngineProbe, SideChannel
from kvturn_cli.doctor.probes.http import Answer, Question, Unanswered, ask

ENGINES_MAX = 64
"""Engines that are asked; of a larger fleet the first ones."""
_OURS = "kvturn_connector_retained_blocks"
_NUMBER = r"([0-9]{1,20}(?:\.[0-9]+)?(?:e[+-][0-9]{2})?)"
_RELEASED = re.compile(rf"^kvturn_connector_releases_total\{{(.*)\}} {_NUMBER}$", re.MULTILINE)
_OFF = re.compile(rf"^kvturn_connector_off\{{(.*)\}} {_NUMBER}$", re.MULTILINE)
_CACHE = re.compile(r"^vllm:cache_config_info\{(.*)\} ", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


async def probe_engine(url: str, tls: ssl.SSLContext | None, timeout_s: float) -> EngineProbe:
    """Asks one engine all at once; none of it needs a key."""

    async def get(path: str) -> Answer:
        return await ask(Question(url + path, timeout_s=timeout_s, tls=tls))

    health, version, metrics = await asyncio.gather(
        get("/health"), get("/version"), get("/metrics"), return_exceptions=True
    )
    if isinstance(health, BaseException):
        if not isinstance(health, Unanswered):
            raise health
        return EngineProbe(url, str(health))
    if health.status != 200:
        return EngineProbe(url, f"/health answers HTTP {health.status}")
    text = _text(metrics)
    return EngineProbe(
        url,
        vllm_version=_version(version),
        connector_loaded=_OURS in text if text else None,
        cache=cache_config(text),
        turned_off_by=turned_off_by(text),
        released=released(text),
        clock=health.clock,
    )


def _text(answer: Answer | BaseException) -> str:
    if isinstance(answer, BaseException) or answer.status != 200:
        return ""
    return answer.body.decode(errors="replace")


def _version(answer: Answer | BaseException) -> str:
    try:
        return str(json.loads(_text(answer) or "{}").get("version", ""))
    except (ValueError, AttributeError):
        return ""


def released(metrics: str) -> dict[str, int]:
    """Returns from an engine's metrics the retentions that were freed, by reason."""
    counts: dict[str, int] = {}
    for labels, value in _RELEASED.findall(metrics):
        reason = dict(_LABEL.findall(labels)).get("reason", "")
        counts[reason] = counts.get(reason, 0) + int(float(value))
    return counts


def turned_off_by(metrics: str) -> list[str] | None:
    """Returns for want of which settings an engine's connector does nothing.

    None of one that does not tell.
    """
    told = {
        dict(_LABEL.findall(labels)).get("setting", ""): v for labels, v in _OFF.findall(metrics)
    }
    return sorted(setting for setting, value in told.items() if float(value)) if told else None


def cache_config(metrics: str) -> CacheConfig:
    """Returns from an engine's metrics how its KV cache is set up."""
    found = _CACHE.search(metrics)
    labels = dict(_LABEL.findall(found[1])) if found else {}
    caching = {"True": True, "False": False}.get(labels.get("enable_prefix_caching", ""))
    return CacheConfig(labels.get("block_size", ""), labels.get("cache_dtype", ""), caching)


async def probe_side_channels(
    engines: Sequence[lease_pb2.Engine], network: str, timeout_s: float
) -> list[SideChannel]:
    """Tries to connect to each announced side channel. `network` is the one that we see."""
    described = [one.description for one in engines if one.description.HasField("nixl")]
    return list(await asyncio.gather(*(_try(one, network, timeout_s) for one in described)))


async def _try(engine: lease_pb2.EngineDescription, network: str, timeout_s: float) -> SideChannel:
    host, port = engine.nixl.host, engine.nixl.port
    here = bool(network) and engine.settings.network == network
    if is_unspecified(host) or (is_loopback(host) and not here):
        return SideChannel(engine.engine_id, host, port, tried=False)
    try:
        async with asyncio.timeout(timeout_s):
            _, writer = await asyncio.open_connection(host, port)
    except TimeoutError:
        why = f"no connection within {timeout_s:g} s"
        return SideChannel(engine.engine_id, host, port, tried=True, problem=why)
    except OSError as error:
        why = error.strerror or str(error)
        return SideChannel(engine.engine_id, host, port, tried=True, problem=why)
    writer.close()
    return SideChannel(engine.engine_id, host, port, tried=True)
