"""The health of one engine as last seen, and when to ask after it next. Sans-IO.

An engine is out until its first good answer. It is taken out after a few bad
answers in a row, or at once when it refuses a connection, and comes back with
its next good answer. One that answers questions after its health well but fails
turn after turn is out for a while all the same, each time for twice as long.
Engines that are out are asked less and less often, down to a bound.
"""

from typing import Final

_BACKOFF_MAX: Final = 10
"""Longest time between questions to an engine that is out, in usual intervals."""


class Health:
    """What is known of one engine.

    `phase` from 0 to 1 is the part of an interval by which its second question
    is put off, so that many engines are not asked all at once. `failures_max`
    bad answers in a row take it out, `faults_max` failed turns in a row.
    """

    def __init__(
        self, *, interval_ns: int, failures_max: int, faults_max: int, phase: float, now_ns: int
    ) -> None:
        self.usable = False
        """Whether the engine may be given requests."""
        self.reason = "it has not been asked yet"
        """Why it is out, in one line; empty while it is usable."""
        self.due_ns = now_ns
        """When to ask after it next."""
        self.asked = False
        """Whether anything is known of it."""
        self._interval_ns = interval_ns
        self._failures_max = failures_max
        self._faults_max = faults_max
        self._phase_ns = round(phase * interval_ns)
        self._failures = 0
        self._faults = 0
        self._ejections = 0

    def answered_well(self, now_ns: int) -> None:
        """Takes a good answer to the question after its health."""
        self.usable = True
        self.reason = ""
        self._failures = 0
        # Only the first: from then on every engine has its own time in the interval.
        self.due_ns = now_ns + (self._interval_ns if self.asked else self._phase_ns)
        self.asked = True

    def answered_badly(self, why: str, now_ns: int) -> None:
        """Takes a bad answer to the question after its health, or none."""
        self._failures += 1
        if self._failures >= self._failures_max or not self.asked:
            self._take_out(why)
        self.asked = True
        over = max(self._failures - self._failures_max, 0)
        self.due_ns = now_ns + self._backoff_ns(over)

    def ask_now(self, now_ns: int) -> None:
        """There is news of it: if it is out, asks after it at once."""
        if not self.usable:
            self.due_ns = now_ns

    def refused(self, why: str, now_ns: int) -> None:
        """Takes it out at once: it cannot even be connected to."""
        if self.usable:
            self._failures = self._failures_max
            self._take_out(why)
            self.due_ns = now_ns + self._interval_ns

    def failed(self, why: str, now_ns: int) -> bool:
        """Takes a turn that it failed; returns whether that takes it out."""
        self._faults += 1
        if not self.usable or self._faults < self._faults_max:
            return False
        # One more is enough next time, unless it has served a turn well by then.
        self._faults = self._faults_max - 1
        self._take_out(why)
        self.due_ns = now_ns + self._backoff_ns(self._ejections)
        self._ejections += 1
        return True

    def served_well(self) -> None:
        """Takes a turn that it served well."""
        self._faults = self._ejections = 0

    def _take_out(self, why: str) -> None:
        self.usable = False
        self.reason = why

    def _backoff_ns(self, times: int) -> int:
        return self._interval_ns * min(1 << min(times, 10), _BACKOFF_MAX)
