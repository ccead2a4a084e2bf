"""What each way to serve a turn costs, learned from the turns that were served.

Every duration is a sum of rates times features: so many ms for a leg, so many
for each token. Each is fitted online (`fit.py`), per engine or per pair of
engines, and begins with a stated prior or with what an engine of the kind has
taught. No clock: the time comes in.
"""

from collections import OrderedDict
from collections.abc import Sequence
from math import hypot, sqrt
from typing import Final, NamedTuple

import msgspec

from kvturn_router.choice.fit import Fit

ENGINES_MAX: Final = 4096
"""Fits kept of each kind, by engine or pair; the longest unused are forgotten."""
MODELS_MAX: Final = 1024
"""Models whose bytes per token are kept."""
RUNNING_PENALTY: Final = 0.1
"""What a local turn costs each request that runs on its engine, as a share of its own compute."""
EXPLORED_FIRST: Final = 6
"""Turns of a decode engine that may go a way only because little is known of it, to begin with."""
EXPLORED_SHARE: Final = 64
"""After that one turn in so many may."""
HOPE: Final = 1.5
"""How far a way may be better than its estimate, in doubts (`Fit.doubt`).

One that nothing is known of 7x, and one that was not taken for an hour up to 100x: what was learned
of an engine while it stood still must not keep turns off it for ever.
"""

BLOCK_TOKENS: Final = 16
"""Tokens of a block on decode, until local turns have shown it."""
BLOCK_TOKENS_MAX: Final = 256
SHARE_STEP: Final = 0.2
"""How fast the share that an engine's prefix cache finds is learned."""
LEG_STEP: Final = 0.1
"""How fast the tokens of a usual prefill leg are learned."""
TAUGHT_MIN: Final = 3
"""Turns that a quantity must have been learned from before it is told to anybody."""
SPREAD_MAX: Final = 0.5
"""How far off it may be then, as a share of it."""


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
    size: tuple[float, float] = (4.0, 0.25)
    """Tokens of what is new in a turn: of any turn, of each byte."""
    generation: tuple[float, float] = (1.0, 20.0)
    """The rest of an answer that is not streamed: an answer, a token of it."""


class Forecast(msgspec.Struct, frozen=True):
    """What was expected of a turn when it was planned. Tokens are estimates.

    `holder` is the address of the engine that holds KV for the turn, "" if none
    does; `decode` that of the engine that will generate; `prefill` is "" if no
    prefill engine is usable. The loads are requests in flight.
    """

    model: str
    new_bytes: int
    new_tokens: float
    held_tokens: int
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


class Took(msgspec.Struct, frozen=True):
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

    def __init__(self, priors: Priors | None = None) -> None:
        priors = priors or Priors()
        self._size = _Fits(priors.size, MODELS_MAX)
        self._prefill = _Fits(priors.prefill)
        self._read = _Fits(priors.read)
        self._handover = _Fits(priors.handover)
        self._local = _Fits(priors.local)
        self._generation = _Fits(priors.generation)
        self._decode_cache = _Recent(1.0, SHARE_STEP)
        self._prefill_cache = _Recent(0.0, SHARE_STEP)
        self._blocks = _Blocks()
        self._leg_tokens = _Recent(0.0, LEG_STEP)
        self._explored: OrderedDict[str, list[int]] = OrderedDict()

    def learned(self) -> Priors:
        """Returns the rates that a new engine would begin with."""
        return Priors(
            prefill=self._prefill.taught_rates,
            read=self._read.taught_rates,
            handover=self._handover.taught_rates,
            local=self._local.taught_rates if self._local.taught else None,
            size=self._size.taught_rates,
            generation=self._generation.taught_rates,
        )

    def new_tokens(self, model: str, new_bytes: int) -> float:
        """Returns how many tokens that many bytes of messages are expected to be."""
        return self._size.of(model).value(new_bytes)

    def estimates(self, forecast: Forecast, now_ns: int) -> Estimates:
        """Returns what each way would cost. `now_ns` is CLOCK_BOOTTIME."""
        held = forecast.held_tokens
        new = forecast.new_tokens
        ahead = self._ahead(forecast)
        unfound = held * (1.0 - self._prefill_cache.of(forecast.prefill))
        missed = self._missed(forecast.decode, held)
        fetched = self._fetched(forecast, held + new)
        prefill = self._prefill.of(forecast.prefill)
        handover = _estimate(
            self._handover.of(f"{forecast.prefill} {forecast.decode}"),
            fetched,
            now_ns,
        )
        suffix = _estimate(prefill, new + ahead, now_ns)
        whole = _estimate(prefill, unfound + new + ahead, now_ns)
        reading = self._read.of(f"{forecast.holder} {forecast.prefill}")
        read = _estimate(reading, unfound, now_ns)
        local = self._local_fit(forecast.decode)
        # Decode computes at least one token itself.
        computed = max(new + missed, 1.0)
        alone = _estimate(local, computed, now_ns)
        penalty = RUNNING_PENALTY * forecast.decode_in_flight * local.each * computed
        return Estimates(
            pull=_sum(suffix, read, handover),
            local=Estimate(alone.ms + penalty, alone.best_ms + penalty),
            recompute=_sum(whole, handover),
        )

    def explores(self, decode: str, *, wanted: bool) -> bool:
        """Tells whether a turn of that decode engine may go a way that is only possibly better.

        Counts the turn: of n turns at most EXPLORED_FIRST + n / EXPLORED_SHARE
        explore.
        """
        counts = self._explored.setdefault(decode, [0, 0])
        self._explored.move_to_end(decode)
        if len(self._explored) > ENGINES_MAX:
            self._explored.popitem(last=False)
        counts[0] += 1
        if not wanted or counts[1] >= EXPLORED_FIRST + counts[0] // EXPLORED_SHARE:
            return False
        counts[1] += 1
        return True

    def learn(self, kind: str, forecast: Forecast, took: Took, now_ns: int) -> None:
        """Learns from a turn that was served as planned, without a fault.

        `kind` is that of the plan: "pull", "local" or "recompute". To be called
        once a turn, when all that `took` has is known. Without `prompt_tokens`
        it teaches nothing.
        """
        if took.prompt_tokens <= 0:
            return
        new = took.prompt_tokens - forecast.held_tokens
        if forecast.extends and new > 0:
            self._size.kept(forecast.model).learn(forecast.new_bytes, new, now_ns)
        if kind == "local":
            self._learn_local(forecast, took, now_ns)
            return
        self._learn_prefill(kind == "pull", forecast, took, now_ns)
        if took.decode_ms > 0:
            fit = self._handover.kept(f"{forecast.prefill} {forecast.decode}")
            self._learn_decode(
                fit, self._fetched(forecast, took.prompt_tokens), forecast, took, now_ns
            )

    def saved_ms(self, kind: str, forecast: Forecast, took: Took) -> float | None:
        """Returns how much later the first token would have come had all been computed.

        That is what computing the whole prompt is expected to take on the engines that were
        planned with, under the load that they had then, less what the turn took; 0 if that is no
        less. None if nothing was reused, or if too little is known: each quantity that is reckoned
        with must have been learned from TAUGHT_MIN turns of those very engines, to within
        SPREAD_MAX. To be called before `learn`; `kind` is as there.
        """
        if took.prompt_tokens <= 0 or not forecast.prefill:
            return None
        prefill = self._prefill.of(forecast.prefill)
        if kind == "pull":
            # Decode's fetch of prefill's KV is the same either way.
            if took.reused_tokens <= 0 or took.prefill_ms <= 0:
                return None
            units = took.prompt_tokens - took.cached_tokens + self._ahead(forecast)
            expected = _known(prefill, units)
            return None if expected is None else max(expected - took.prefill_ms, 0.0)
        if kind != "local" or took.cached_tokens <= 0 or took.decode_ms <= 0:
            return None
        held = min(forecast.held_tokens, took.prompt_tokens)
        found = held * self._prefill_cache.of(forecast.prefill)
        whole = _known(prefill, took.prompt_tokens - found + self._ahead(forecast))
        handover = _known(
            self._handover.of(f"{forecast.prefill} {forecast.decode}"),
            self._fetched(forecast, took.prompt_tokens),
        )
        alone: float | None = took.decode_ms
        if took.generated_tokens > 0:  # It lasted until the whole answer was there.
            computed = max(took.prompt_tokens - took.cached_tokens, 1)
            alone = _known(self._local_fit(forecast.decode), computed)
        if whole is None or handover is None or alone is None:
            return None
        return max(whole + handover - alone, 0.0)

    def _learn_local(self, forecast: Forecast, took: Took, now_ns: int) -> None:
        held = min(forecast.held_tokens, took.prompt_tokens)
        decode = forecast.decode
        if took.cached_tokens > 0:
            self._blocks.found(decode, held, took.cached_tokens)
        whole = held - held % self._blocks.of(decode)
        if whole > 0:
            self._decode_cache.saw(decode, min(took.cached_tokens / whole, 1.0))
        if took.decode_ms <= 0:
            return
        fit = self._local_fit(forecast.decode)
        self._local.keep(forecast.decode, fit)
        computed = float(max(took.prompt_tokens - took.cached_tokens, 1))
        self._learn_decode(fit, computed, forecast, took, now_ns)

    def _learn_decode(
        self, fit: Fit, units: float, forecast: Forecast, took: Took, now_ns: int
    ) -> None:
        if took.generated_tokens <= 0:
            fit.learn(units, took.decode_ms, now_ns)
            return
        generation = self._generation.kept(forecast.decode)
        parts = ((fit, units), (generation, float(took.generated_tokens)))
        _learn_together(parts, took.decode_ms, now_ns)

    def _learn_prefill(self, pull: bool, forecast: Forecast, took: Took, now_ns: int) -> None:
        """Learns from a prefill leg: what computing took, and what the read did."""
        if took.prefill_ms <= 0:
            return
        computed = float(max(took.prompt_tokens - took.reused_tokens - took.cached_tokens, 1))
        units = computed + self._ahead(forecast)
        prefill = self._prefill.kept(forecast.prefill)
        self._leg_tokens.saw(forecast.prefill, computed)
        if forecast.extends:
            found = min(took.cached_tokens / forecast.held_tokens, 1.0)
            self._prefill_cache.saw(forecast.prefill, found)
        read_tokens = float(took.reused_tokens or (forecast.held_tokens if took.read_failed else 0))
        if not pull or read_tokens <= 0:
            prefill.learn(units, took.prefill_ms, now_ns)
            return
        read = self._read.kept(f"{forecast.holder} {forecast.prefill}")
        if took.read_failed:
            read.learn(read_tokens, max(took.prefill_ms - prefill.value(units), 0.0), now_ns)
        else:
            _learn_together(((prefill, units), (read, read_tokens)), took.prefill_ms, now_ns)

    def _local_fit(self, decode: str) -> Fit:
        if self._local.taught:
            return self._local.of(decode)
        # Until a local turn has taught better, decode computes as prefill does.
        return Fit(self._prefill.taught_rates)

    def _fetched(self, forecast: Forecast, prompt_tokens: float) -> float:
        """Tokens whose KV decode fetches from prefill: those that it has not in its own cache."""
        if forecast.decode != forecast.holder:
            return prompt_tokens
        held = forecast.held_tokens
        return max(prompt_tokens - held + self._missed(forecast.decode, held), 1.0)

    def _ahead(self, forecast: Forecast) -> float:
        """Tokens that prefill has to compute before it comes to the turn's."""
        legs = max(forecast.prefill_in_flight - 0.5, 0.0)
        return legs * self._leg_tokens.of(forecast.prefill)

    def _missed(self, decode: str, held: int) -> float:
        """Retained tokens that decode computes again: a begun block, and what its cache lost."""
        begun = held % self._blocks.of(decode)
        return begun + (held - begun) * (1.0 - self._decode_cache.of(decode))


class _Recent:
    """A number per engine: the mean of the latest ones seen. A new engine begins with the last."""

    def __init__(self, prior: float, step: float) -> None:
        self._means: OrderedDict[str, float] = OrderedDict()
        self._last = prior
        self._step = step

    def of(self, engine: str) -> float:
        """Returns an engine's number."""
        return self._means.get(engine, self._last)

    def saw(self, engine: str, number: float) -> None:
        """Takes in a number."""
        mean = self._means.get(engine, number)
        self._last = self._means[engine] = mean + self._step * (number - mean)
        self._means.move_to_end(engine)
        if len(self._means) > ENGINES_MAX:
            self._means.popitem(last=False)


class _Blocks:
    """Tokens of a block, per decode engine. A new engine begins with what the last one showed.

    A block's size is a power of two. What decode's prefix cache finds is whole blocks, so it is a
    divisor of that; and it is more than what the cache left of the history, unless blocks were
    lost. Between the two the smaller is taken: who expects too little of decode alone would never
    learn better.
    """

    def __init__(self) -> None:
        self._bounds: OrderedDict[str, tuple[int, int]] = OrderedDict()
        self._last = BLOCK_TOKENS

    def of(self, engine: str) -> int:
        """Returns an engine's block size."""
        bounds = self._bounds.get(engine)
        return self._last if bounds is None else bounds[0]

    def found(self, engine: str, held_tokens: int, cached_tokens: int) -> None:
        """Takes in what the cache found of a history."""
        least, most = self._bounds.get(engine, (1, BLOCK_TOKENS_MAX))
        most = min(most, cached_tokens & -cached_tokens)
        left = max(held_tokens - cached_tokens, 0)
        above = 1 << left.bit_length()
        if above <= most:
            least = max(least, above)
        self._last = min(least, most)
        self._bounds[engine] = self._last, most
        self._bounds.move_to_end(engine)
        if len(self._bounds) > ENGINES_MAX:
            self._bounds.popitem(last=False)


class _Fits:
    """Fits of one kind, by engine, pair or model. A new one begins with what the kind last taught.

    `prior` is None if the kind has none of its own: then `of` needs `taught`.
    """

    def __init__(self, prior: tuple[float, float] | None, fits_max: int = ENGINES_MAX) -> None:
        self._fits: OrderedDict[str, Fit] = OrderedDict()
        self._fits_max = fits_max
        self._taught = None if prior is None else Fit(prior)

    @property
    def taught(self) -> bool:
        """True if there is a prior or anything was learned."""
        return self._taught is not None

    @property
    def taught_rates(self) -> tuple[float, float]:
        """Rates where a new fit begins."""
        assert self._taught is not None
        return self._taught.fixed, self._taught.each

    def of(self, key: str) -> Fit:
        """Returns the fit of a key, not to be changed."""
        return self._fits.get(key) or Fit(self.taught_rates)

    def kept(self, key: str) -> Fit:
        """Returns the fit of a key, to learn."""
        fit = self._fits.get(key)
        if fit is None:
            fit = Fit(self.taught_rates)
            self.keep(key, fit)
        else:
            self._taught = fit
            self._fits.move_to_end(key)
        return fit

    def keep(self, key: str, fit: Fit) -> None:
        """Keeps a fit, and forgets the longest unused if there are too many."""
        self._fits[key] = self._taught = fit
        self._fits.move_to_end(key)
        if len(self._fits) > self._fits_max:
            self._fits.popitem(last=False)


def _estimate(fit: Fit, units: float, now_ns: int) -> Estimate:
    ms = fit.value(units)
    return Estimate(ms, ms / (1.0 + HOPE * fit.doubt(units, now_ns)))


def _known(fit: Fit, units: float) -> float | None:
    """Returns what is to be expected, None if too little is known to tell it."""
    known = fit.taught >= TAUGHT_MIN and fit.spread(units) <= SPREAD_MAX
    return fit.value(units) if known else None


def _sum(*parts: Estimate) -> Estimate:
    ms = best_ms = 0.0
    for part_ms, part_best_ms in parts:
        ms += part_ms
        best_ms += part_best_ms
    return Estimate(ms, best_ms)


def _learn_together(parts: Sequence[tuple[Fit, float]], observed_ms: float, now_ns: int) -> None:
    """Learns from one duration that tells of several things: each from what the others leave."""
    values = [fit.value(units) for fit, units in parts]
    blurs = [
        value * hypot(fit.deviation(units, now_ns), fit.scatter())
        for value, (fit, units) in zip(values, parts, strict=True)
    ]
    whole, blur = sum(values), hypot(*blurs)
    for value, own, (fit, units) in zip(values, blurs, parts, strict=True):
        rest = max(observed_ms - (whole - value), 0.0)
        fit.learn(units, rest, now_ns, sqrt(max(blur * blur - own * own, 0.0)))
