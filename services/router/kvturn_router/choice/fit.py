"""One learned quantity: a fixed part and so much for each unit, fitted online. No I/O.

Recursive least squares on relative errors, so that a leg of 10 ms teaches as
much as one of 10 s. What is known fades with every observation and with time:
the rates stay, but doubt grows back to that of a prior. An observation that is
far off counts as less far off, and lets doubt grow, so that one moves little
and several in a row are believed.
"""

from math import copysign, sqrt
from typing import Final

PRIOR_DEVIATION: Final = 2.0
"""How far off a rate may be that nothing is known of, as a share of it."""
DOUBT_FEW: Final = 2.0
"""How far off a rate may be after n observations: this times x + x^4, where x = 1 / (1 + n).

A prior may be worse than the one that was reckoned with, and any of a few observations an outlier.
"""
DOUBT_MAX: Final = 64.0
"""How far off one may be that was known once and has not been observed for long."""
PRIOR_CORRELATION: Final = 0.5
"""How far the two are off together: an engine is first of all fast or slow."""
MEMORY: Final = 0.93
"""Weight of what was known before an observation, after it."""
HALF_LIFE_NS: Final = 120 * 10**9
"""Time in which what is known counts for half."""
NOISE_FIRST: Final = 0.25
"""Scatter of observations, as a share of them, until it is learned."""
NOISE_MIN: Final = 0.1
NOISE_STEP: Final = 0.1
"""How fast the scatter is learned."""
OUTLIER: Final = 2.0
"""Deviations beyond which an observation counts as no further off."""
OUTLIER_DOUBT: Final = 4.0
"""Growth of doubt, as a variance, after one that is further off."""
RATE_MIN: Final = 1 / 1024
"""Least a rate can become, as a share of its prior; rates are positive."""

_HALVINGS_MAX = 64.0


class Fit:
    """`fixed + each * units`, with how well the two are known. Both are positive.

    `prior` is where they begin.
    """

    __slots__ = (
        "_both",
        "_each_var",
        "_fixed_var",
        "_known_ns",
        "_noise",
        "_observed",
        "_prior",
        "each",
        "fixed",
        "taught",
    )

    def __init__(self, prior: tuple[float, float]) -> None:
        assert min(prior) > 0
        self._prior = prior
        self.fixed, self.each = prior
        # Covariance of the two as shares of their priors.
        self._fixed_var = PRIOR_DEVIATION**2
        self._each_var = PRIOR_DEVIATION**2
        self._both = PRIOR_CORRELATION * PRIOR_DEVIATION**2
        self._noise = NOISE_FIRST**2
        self._known_ns: int | None = None
        # Observations, each halved with what is known.
        self._observed = 0.0
        self.taught = 0
        """Observations that it has taken in."""

    def value(self, units: float) -> float:
        """Returns what is to be expected."""
        return self.fixed + self.each * units

    def deviation(self, units: float, now_ns: int) -> float:
        """Returns how far off `value` may be, as a share of it, up to PRIOR_DEVIATION."""
        return self._deviation(units, self._fading(now_ns))

    def doubt(self, units: float, now_ns: int) -> float:
        """Returns how far off `value` may be, as a share of it, for all that time may have changed.

        Unlike `deviation`, which is what observations scatter by, it reckons with few of them being
        all outliers, and with all that were seen having been taken while something stood still:
        what nobody has looked at for long may be anything, up to DOUBT_MAX.
        """
        fading = self._fading(now_ns)
        share = fading / (fading + self._observed)
        few = DOUBT_FEW * (share + share**4)
        return min(max(self._deviation(units, fading), few) * sqrt(fading), DOUBT_MAX)

    def _deviation(self, units: float, fading: float) -> float:
        value = self.fixed + self.each * units
        prior_fixed, prior_each = self._prior
        fixed = prior_fixed / value
        each = prior_each * units / value
        variance = fading * (
            fixed * fixed * self._fixed_var
            + 2 * fixed * each * self._both
            + each * each * self._each_var
        )
        return min(sqrt(variance), PRIOR_DEVIATION) if variance > 0.0 else 0.0

    def spread(self, units: float) -> float:
        """Returns how far off `value` may be as of the last observation, as a share of it.

        Unlike `deviation` it does not grow with time: what was learned of an engine is taken to
        hold until it is learned anew.
        """
        return self._deviation(units, 1.0)

    def scatter(self) -> float:
        """Returns how far observations lie from what is expected, as a share of it."""
        return sqrt(self._noise)

    def learn(self, units: float, observed: float, now_ns: int, blur: float = 0.0) -> None:
        """Takes in one observation.

        `blur` is the deviation of what was subtracted to obtain it, in its own
        unit.
        """
        fading = self._fading(now_ns)
        self._fade(fading / MEMORY)
        self._observed = self._observed / fading + 1.0
        self._known_ns = now_ns
        self.taught += 1
        value = self.fixed + self.each * units
        prior_fixed, prior_each = self._prior
        fixed = prior_fixed / value
        each = prior_each * units / value
        fixed_reach = self._fixed_var * fixed + self._both * each
        each_reach = self._both * fixed + self._each_var * each
        known = fixed * fixed_reach + each * each_reach
        blurred = (blur / value) ** 2
        variance = known + self._noise + blurred
        bound = OUTLIER * sqrt(variance)
        off = observed / value - 1.0
        error = off if -bound <= off <= bound else copysign(bound, off)
        step = error / variance
        self.fixed += fixed_reach * step * prior_fixed
        self.each += each_reach * step * prior_each
        self._fixed_var = max(self._fixed_var - fixed_reach**2 / variance, 0.0)
        self._each_var = max(self._each_var - each_reach**2 / variance, 0.0)
        self._both -= fixed_reach * each_reach / variance
        if min(self.fixed / prior_fixed, self.each / prior_each) < RATE_MIN:
            self._keep_positive(units)
        if error != off:
            self._fade(OUTLIER_DOUBT)
        if known + blurred < self._noise:
            noise = max(error * error - known - blurred, NOISE_MIN**2)
            self._noise += NOISE_STEP * (noise - self._noise)

    def _keep_positive(self, units: float) -> None:
        """Moves a rate that became too small to its least, and takes what that adds off the other.

        Else what was learned at these units would be lost, again with every observation.
        """
        least_fixed, least_each = RATE_MIN * self._prior[0], RATE_MIN * self._prior[1]
        value = self.fixed + self.each * units
        if self.fixed < least_fixed:
            self.fixed = least_fixed
            self.each = (value - least_fixed) / units if units > 0 else self.each
        if self.each < least_each:
            self.each = least_each
            self.fixed = max(value - least_each * units, least_fixed)

    def _fading(self, now_ns: int) -> float:
        if self._known_ns is None or now_ns <= self._known_ns:
            return 1.0
        halvings = (now_ns - self._known_ns) / HALF_LIFE_NS
        return float(2.0 ** min(halvings, _HALVINGS_MAX))

    def _fade(self, factor: float) -> None:
        """Lets doubt grow by a factor, of each part up to where nothing is known of it."""
        prior_fixed, prior_each = self._prior
        fixed = _growth(self._fixed_var, self.fixed / prior_fixed, factor)
        each = _growth(self._each_var, self.each / prior_each, factor)
        self._fixed_var *= fixed
        self._each_var *= each
        self._both *= fixed if fixed == each else sqrt(fixed * each)


def _growth(variance: float, rate: float, factor: float) -> float:
    """Returns how much of a factor a variance may grow by; `rate` as a share of its prior."""
    unknown = (PRIOR_DEVIATION * rate) ** 2
    if variance * factor <= unknown:
        return factor
    return unknown / variance if unknown > variance else 1.0
