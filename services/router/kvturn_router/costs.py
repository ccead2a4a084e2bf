"""What each way to serve a turn costs, learned from the turns that were served.

Every duration is a sum of rates times features: so many ms for a leg, so many
for each token. Each is fitted online (`fit.py`), per engine or per pair of
engines, and begins with a stated prior or with what an engine of the kind has
taught. No clock: the time comes in.
"""

from typing import Final, NamedTuple

ENGINES_MAX: Final = 4096
"""Fits kept of each kind, by engine or pair; the longest unused are forgotten."""
MODELS_MAX: Final = 1024
"""Models whose bytes per token are kept."""
RUNNING_PENALTY: Final = 0.1
"""What a local turn costs each request that runs on its engine, as a share of its own compute."""
EXPLORED_FIRST: Final = 8
"""Turns of a decode engine that may go a way only because little is known of it, to begin with."""
EXPLORED_SHARE: Final = 16
"""After that one turn in so many may."""


class Priors(NamedTuple):
    """Where learning begins: ms of a leg, and ms of a token of it.

    Stated for an 8-billion-parameter model on one GPU and a fast network. What
    is learned on one engine is the prior of the next.
    """

    prefill: tuple[float, float] = (20.0, 0.1)
    """Prefill: a leg, a token that it computes."""
    read: tuple[float, float] = (15.0, 0.02)
    """The read of KV from decode: a read, a token read."""
    handover: tuple[float, float] = (15.0, 0.02)
    """Decode's fetch of prefill's KV, to the first token: a leg, a token fetched."""
    local: tuple[float, float] | None = None
    """Decode computing a prompt itself: a leg, a token; None: as prefill."""
    missed: tuple[float, float] = (16.0, 0.01)
    """Retained tokens that decode's prefix cache does not find: of any turn, of each token."""
    size: tuple[float, float] = (4.0, 0.25)
    """Tokens of what is new in a turn: of any turn, of each byte."""
    generated: float = 20.0
    """ms of a generated token; counts where an answer is not streamed."""


class Forecast(NamedTuple):
    """What was expected of a turn when it was planned. Tokens are estimates.

    `holder` is the address of the engine that holds KV for the turn, "" if none
    does; `decode` that of the engine that will generate; `prefill` is "" if no
    prefill engine is usable. The loads are requests in flight.
    """

    model: str
    new_bytes: int
    new_tokens: float
    held_tokens: float
    """Tokens of the prompt that the retention has, as far as is known."""
    extends: bool
    """True if the prompt is known to begin with all that is retained."""
    holder: str
    prefill: str
    prefill_in_flight: int
    decode: str
    decode_in_flight: int


class Estimate(NamedTuple):
    """What one way costs, in ms to the first token, and what it may cost at best.

    `best_ms` is less the less is known.
    """

    ms: float
    best_ms: float


class Estimates(NamedTuple):
    """What each way costs."""

    pull: Estimate
    local: Estimate
    recompute: Estimate


class Took(NamedTuple):
    """What a turn told of its costs, when it is over. 0 where not known.

    `cached_tokens` are those that the engine that computed the prompt found in
    its own prefix cache, prefill or, where there was no prefill leg, decode.
    `decode_ms` lasts from the decode leg's sending to the first byte of the
    answer's body, or, where it was not streamed, to its end; `generated_tokens`
    are those of that time: 0 if streamed.
    """

    prompt_tokens: int
    reused_tokens: int
    cached_tokens: int
    prefill_ms: float
    decode_ms: float
    generated_tokens: int
    read_failed: bool = False
    """True if a read began and brought nothing."""


class Costs:
    """Learned rates of all engines. Not for several threads."""

    def __init__(self, priors: Priors | None = None) -> None: ...

    def new_tokens(self, model: str, new_bytes: int) -> float:
        """Returns how many tokens that many bytes of messages are expected to be."""
        raise NotImplementedError

    def estimates(self, forecast: Forecast, now_ns: int) -> Estimates:
        """Returns what each way would cost. `now_ns` is CLOCK_BOOTTIME."""
        raise NotImplementedError

    def may_explore(self, decode: str) -> bool:
        """Tells whether a turn of that decode engine may go a way that is only possibly better.

        Counts the turn, and if True, what it may cost: of n turns at most
        EXPLORED_FIRST + n / EXPLORED_SHARE explore.
        """
        raise NotImplementedError

    def learn(self, kind: str, forecast: Forecast, took: Took, now_ns: int) -> None:
        """Learns from a turn that was served as planned, without a fault.

        `kind` is that of the plan: "pull", "local" or "recompute". To be called
        once a turn, when all that `took` has is known.
        """
        raise NotImplementedError
