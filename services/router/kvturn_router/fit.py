"""One learned quantity: a sum of rates times features, fitted online. No I/O.

Recursive least squares on relative errors, so that a leg of 10 ms teaches as
much as one of 10 s. What is known fades with every observation and with time:
the rates stay, but doubt grows back to that of a prior. One observation moves
the rates by no more than `OUTLIER` times what was to be expected.
"""

from collections.abc import Sequence
from math import sqrt
from typing import Final

PRIOR_DEVIATION: Final = 2.0
"""How far off a rate may be that nothing is known of, as a share of it."""
MEMORY: Final = 0.95
"""Weight of what was known before an observation, after it."""
HALF_LIFE_NS: Final = 600 * 10**9
"""Time in which what is known counts for half."""
NOISE_FIRST: Final = 0.5
"""Scatter of observations, as a share of them, until it is learned."""
NOISE_MIN: Final = 0.05
NOISE_STEP: Final = 0.1
"""How fast the scatter is learned."""
OUTLIER: Final = 3.0
"""Deviations beyond which an observation counts as no further off."""
RATE_MIN: Final = 1 / 1024
"""Least a rate can become, as a share of its prior; rates are positive."""

_AGE_HALVINGS_MAX = 64.0


class Fit:
    """Rates of a few features, with how well they are known.

    `prior` holds a positive rate for each feature.
    """

    __slots__ = ("_covariance", "_known_ns", "_noise", "_prior", "rates")

    def __init__(self, prior: Sequence[float]) -> None:
        assert all(rate > 0 for rate in prior)
        self.rates = list(prior)
        self._prior = tuple(prior)
        # Of the rates as shares of their priors. None of the numbers here has a unit but those.
        self._covariance = [
            [PRIOR_DEVIATION**2 if row == column else 0.0 for column in range(len(prior))]
            for row in range(len(prior))
        ]
        self._noise = NOISE_FIRST**2
        self._known_ns: int | None = None

    def value(self, features: Sequence[float]) -> float:
        """Returns what the features amount to."""
        return sum(rate * feature for rate, feature in zip(self.rates, features, strict=True))

    def deviation(self, features: Sequence[float], now_ns: int) -> float:
        """Returns how far off `value` may be, as a share of it, up to PRIOR_DEVIATION."""
        shares, _ = self._shares(features)
        variance = sum(
            one * sum(cell * other for cell, other in zip(row, shares, strict=True))
            for one, row in zip(shares, self._covariance, strict=True)
        )
        unknown = sum((share * self._limit(index)) ** 2 for index, share in enumerate(shares))
        return sqrt(min(max(variance, 0.0) * self._fading(now_ns), unknown))

    def scatter(self) -> float:
        """Returns how far observations lie from what is expected, as a share of it."""
        return sqrt(self._noise)

    def learn(
        self, features: Sequence[float], observed: float, now_ns: int, blur: float = 0.0
    ) -> None:
        """Takes in one observation.

        `blur` is the deviation of what was subtracted to obtain it, in its own
        unit.
        """
        self._fade(self._fading(now_ns) / MEMORY)
        self._known_ns = now_ns
        shares, expected = self._shares(features)
        reach = [
            sum(cell * share for cell, share in zip(row, shares, strict=True))
            for row in self._covariance
        ]
        known = sum(share * each for share, each in zip(shares, reach, strict=True))
        blurred = (blur / expected) ** 2
        variance = known + self._noise + blurred
        bound = OUTLIER * sqrt(variance)
        error = min(max(observed / expected - 1.0, -bound), bound)
        gains = [each / variance for each in reach]
        for index, prior in enumerate(self._prior):
            rate = self.rates[index] + gains[index] * error * prior
            self.rates[index] = max(rate, RATE_MIN * prior)
        for gain, row in zip(gains, self._covariance, strict=True):
            for column, each in enumerate(reach):
                row[column] -= gain * each
        if blurred < self._noise:
            noise = max(error * error - known - blurred, NOISE_MIN**2)
            self._noise += NOISE_STEP * (noise - self._noise)

    def _shares(self, features: Sequence[float]) -> tuple[list[float], float]:
        """Returns each prior rate's part of the value as a share of it, and the value."""
        value = self.value(features)
        assert value > 0
        return [
            prior * feature / value for prior, feature in zip(self._prior, features, strict=True)
        ], value

    def _limit(self, index: int) -> float:
        """Returns the deviation of a rate that nothing is known of, as a share of its prior."""
        return PRIOR_DEVIATION * self.rates[index] / self._prior[index]

    def _fading(self, now_ns: int) -> float:
        if self._known_ns is None:
            return 1.0
        halvings = max(now_ns - self._known_ns, 0) / HALF_LIFE_NS
        return float(2.0 ** min(halvings, _AGE_HALVINGS_MAX))

    def _fade(self, factor: float) -> None:
        """Lets doubt grow by a factor, for each rate up to where nothing is known of it."""
        covariance = self._covariance
        growth = [
            sqrt(
                min(
                    factor, max(self._limit(index) ** 2 / max(covariance[index][index], 1e-12), 1.0)
                )
            )
            for index in range(len(covariance))
        ]
        for row, one in zip(covariance, growth, strict=True):
            for column, other in enumerate(growth):
                row[column] *= one * other
