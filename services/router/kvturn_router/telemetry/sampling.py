"""Which turns' traces are recorded, as OpenTelemetry's own samplers would choose. No I/O."""

from collections.abc import Mapping
from typing import Final, NamedTuple

from kvturn.otlp import WrongSetting

SAMPLER_VARIABLE: Final = "OTEL_TRACES_SAMPLER"
RATIO_VARIABLE: Final = "OTEL_TRACES_SAMPLER_ARG"

_ALL: Final = 1 << 64
_LOW: Final = _ALL - 1

_PARENT_BASED: Final = "parentbased_"
_ROOTS: Final = ("always_on", "always_off", "traceidratio")
NAMES: Final = (*_ROOTS, *(_PARENT_BASED + name for name in _ROOTS))


class Sampler(NamedTuple):
    """Decides when a trace begins.

    A trace that a client began is recorded if the client's is, with
    `follows_clients`. Of all others those are whose ids end below `bound`,
    of 1 << 64: each process with the same ratio decides alike.
    """

    follows_clients: bool = True
    bound: int = _ALL

    def samples(self, trace_id: int, client: bool | None) -> bool:
        """Tells whether a trace is recorded; `client`: whether its client does, None without."""
        if client is not None and self.follows_clients:
            return client
        return trace_id & _LOW < self.bound


def sampler_of(ratio: float | None, environment: Mapping[str, str]) -> Sampler:
    """Returns the sampler that a flag's ratio asks for, else the standard's variables.

    `ratio` is 0 to 1: of the turns whose client brings no trace so many are recorded. Raises
    WrongSetting.
    """
    if ratio is not None:
        return Sampler(bound=round(ratio * _ALL))
    name = environment.get(SAMPLER_VARIABLE, "").strip().lower() or "parentbased_always_on"
    if name not in NAMES:
        raise WrongSetting(SAMPLER_VARIABLE, f"must be one of {', '.join(NAMES)}, not {name!r}")
    root = name.removeprefix(_PARENT_BASED)
    share = {"always_on": 1.0, "always_off": 0.0}.get(root)
    if share is None:
        share = _ratio(environment.get(RATIO_VARIABLE, "").strip())
    return Sampler(name.startswith(_PARENT_BASED), round(share * _ALL))


def _ratio(text: str) -> float:
    try:
        ratio = float(text or "1")
    except ValueError:
        ratio = -1.0
    if not 0.0 <= ratio <= 1.0:
        raise WrongSetting(RATIO_VARIABLE, f"must be a number from 0 to 1, not {text!r}")
    return ratio
