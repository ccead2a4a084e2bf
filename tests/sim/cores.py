"""Which classes a world runs: the real cores and the roles around them, or mutants of one."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import kvturn_connector.session
import kvturn_lease.config
from kvturn_connector.reader import Reader
from kvturn_connector.retention import Retentions
from kvturn_connector.session import EngineSession
from kvturn_lease.lessor import Lessor
from sim.decode import Decode
from sim.lease_service import LeaseService
from sim.prefill import Prefill

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sim.weather import Weather


@dataclass(frozen=True)
class Cores:
    """Classes to build a world from."""

    lessor: type[Lessor] = Lessor
    session: type[EngineSession] = EngineSession
    retentions: type[Retentions] = Retentions
    reader: type[Reader] = Reader
    decode: type[Decode] = Decode
    prefill: type[Prefill] = Prefill
    service: type[LeaseService] = LeaseService
    drift_margin: bool = True
    """False: the cores know of no drift."""


@contextlib.contextmanager
def installed(cores: Cores, weather: Weather) -> Iterator[None]:
    """Sets the constants that the cores have no parameter for, and puts them back."""
    drift = Fraction(weather.drift_percent, 100) if cores.drift_margin else Fraction(0)
    session: Any = kvturn_connector.session
    config: Any = kvturn_lease.config
    changed = [
        (config, "CLOCK_DRIFT", drift),
        (session, "DRIFT_MARGIN", float((1 + drift) / (1 - drift))),
        # What engines go by before the lease service has told them.
        (session, "DEFAULT_SESSION_TTL_NS", weather.ttl_ns),
        (session, "DEFAULT_LONGEST_READ_NS", weather.longest_read_ns),
    ]
    before = [(module, name, getattr(module, name)) for module, name, _ in changed]
    for module, name, value in changed:
        setattr(module, name, value)
    try:
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)
