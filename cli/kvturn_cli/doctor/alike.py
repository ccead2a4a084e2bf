"""What must be equal on prefill and decode, and what must not be off on either."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from kvturn_cli.doctor.facts import EngineFacts, Facts
from kvturn_cli.doctor.finding import Finding, counted, listed, ok, problem, warning


class _Equal(NamedTuple):
    """A setting in which prefill and decode must be equal."""

    check: str
    what: str
    read: Callable[[EngineFacts], str]
    """Returns the setting, "" if it is not known."""
    why: str
    fix: str


def _setting(name: str) -> Callable[[EngineFacts], str]:
    def read(engine: EngineFacts) -> str:
        value = getattr(engine.settings, name, None) or ""
        return ",".join(value) if not isinstance(value, str | int | bool) else str(value)

    return read


def _flag(name: str) -> Callable[[EngineFacts], str]:
    """Returns a reader of a switch that is always told with the settings."""

    def read(engine: EngineFacts) -> str:
        return "" if engine.settings is None else str(getattr(engine.settings, name)).lower()

    return read


def _model(engine: EngineFacts) -> str:
    return engine.session.description.model if engine.session is not None else ""


_HANDSHAKE = "Engines that differ in it refuse each other's KV, in both directions."

EQUAL = (
    _Equal(
        "alike.model",
        "model",
        _model,
        "Digests cover the engine's model: under two names no prompt is the same"
        " (prefix_mismatch).",
        "start all engines with the same --model, path and all",
    ),
    _Equal("alike.dtype", "dtype", _setting("dtype"), _HANDSHAKE, "give both the same --dtype"),
    _Equal(
        "alike.kv_cache_dtype",
        "KV cache dtype",
        lambda engine: (
            _setting("kv_cache_dtype")(engine)
            or (engine.probe.cache.cache_dtype if engine.probe else "")
        ),
        _HANDSHAKE,
        "give both the same --kv-cache-dtype",
    ),
    _Equal(
        "alike.block_size",
        "block size",
        lambda engine: engine.block_size,
        "KV is read in whole blocks of equal size (unsupported_model).",
        "give both the same --block-size",
    ),
    _Equal(
        "alike.secret",
        "check number of kvturn_secret_file",
        _flag("secret_check"),
        "Digests are keyed by it: under two secrets no prompt is the same (prefix_mismatch).",
        "give all engines a kvturn_secret_file with the same content",
    ),
    _Equal(
        "alike.kv_buffer_device",
        "kv_buffer_device",
        _setting("kv_buffer_device"),
        "KV is transferred between equal kinds of memory.",
        "give both the same kv_buffer_device in --kv-transfer-config",
    ),
)

UNEQUAL_COSTS = (
    _Equal(
        "alike.tensor_parallel_size",
        "tensor-parallel size",
        _setting("tensor_parallel_size"),
        "Each rank then reads parts from several ranks; it works, slower, and a failed read of"
        " vLLM 0.29.0 is told before its other parts have ended.",
        "give both the same --tensor-parallel-size unless you mean it",
    ),
    _Equal(
        "alike.max_model_len",
        "longest context",
        _setting("max_model_len"),
        "A prompt that one takes the other refuses.",
        "give both the same --max-model-len",
    ),
)


def findings(facts: Facts) -> Iterator[Finding]:
    """Compares prefill with decode, then looks at each engine for itself."""
    engines = facts.engines
    if not engines:
        return
    for equal, judge in ((EQUAL, problem), (UNEQUAL_COSTS, warning)):
        for one in equal:
            yield from _compared(one, engines, judge)
    for engine in engines:
        yield from _alone(engine)


def _compared(
    equal: _Equal, engines: list[EngineFacts], judge: Callable[[str, str, str, str], Finding]
) -> Iterator[Finding]:
    by_value: dict[str, list[str]] = {}
    for engine in engines:
        if value := equal.read(engine):
            by_value.setdefault(value, []).append(engine.name)
    if len(by_value) > 1:
        seen = "; ".join(f"{value}: {listed(names)}" for value, names in sorted(by_value.items()))
        yield judge(equal.check, f"{equal.what} differs: {seen}", equal.why, equal.fix)
    elif by_value:
        [(value, names)] = by_value.items()
        if len(names) > 1:
            shown = "equal" if equal.check == "alike.secret" else value
            yield ok(equal.check, f"{equal.what}: {shown} on {counted(len(names), 'engine')}")


def _alone(engine: EngineFacts) -> Iterator[Finding]:
    decodes, prefills = engine.role in ("decode", "both"), engine.role in ("prefill", "both")
    if decodes and engine.prefix_caching is False:
        yield warning(
            "alike.prefix_caching",
            f"{engine.name}: prefix caching is off on decode",
            "It cannot serve a short suffix by itself (plan local), the fastest way there is.",
            "start it without --no-enable-prefix-caching",
        )
    settings = engine.settings
    if settings is None:
        return
    policy = settings.kv_load_failure_policy
    if prefills and policy and policy != "recompute":
        yield problem(
            "alike.kv_load_failure_policy",
            f"{engine.name}: kv_load_failure_policy is {policy}",
            "A read that fails then fails the turn in place of recomputing it.",
            'set "kv_load_failure_policy": "recompute" in its --kv-transfer-config',
        )
    if decodes and policy and policy != "recompute":
        yield warning(
            "alike.kv_load_failure_policy",
            f"{engine.name}: kv_load_failure_policy is {policy}",
            "When KV from prefill does not arrive the turn fails in place of being recomputed.",
            'set "kv_load_failure_policy": "recompute" in its --kv-transfer-config',
        )
    if settings.HasField("plain_attention") and not settings.plain_attention:
        yield problem(
            "alike.plain_attention",
            f"{engine.name}: its model's KV is not full attention in one KV cache group",
            "Nothing of such a model is retained or read (first_turn, no_lease).",
            "serve a model with full attention in every layer; others are served without reuse",
        )
