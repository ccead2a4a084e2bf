"""The world of directed scenarios: the same roles without chaos, moved by a script."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from kvturn_lease.conversation import ConversationKey
from sim.cores import Cores, installed
from sim.decode import Job
from sim.prefill import Request
from sim.simulation import Simulation
from sim.weather import Weather
from sim.world import MS, S

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from sim.checkers import Kept
    from sim.decode import Decode
    from sim.lease_service import LeaseService

KEY = ConversationKey("a", "m", "c0")
NAMED = (KEY.tenant, KEY.conversation_id)
PROMPT = [1] * 48
TRIP_NS = 2 * MS
"""A message's delay, unless the script says otherwise."""


class Stage(Simulation):
    """One decode engine, one prefill engine of one rank; lease services that lead for ever.

    Nothing is lost and all timers are on time. Clocks run by `drifts`, in parts per million.
    """

    def __init__(self, cores: Cores, weather: Weather, drifts: dict[str, int]) -> None:
        self._drifts = drifts
        self.post_ns = MS
        self.span_ns = 10 * MS
        self.unlucky = False
        """While it is true, nobody hears of a closed stream."""
        super().__init__(0, weather, cores)
        self.network.fixed_ns = TRIP_NS
        self.decode: Decode = self.decodes[0]
        self.decode.lead = 0
        self.first: LeaseService = self.services[0]
        self.second: LeaseService = self.services[-1]

    def clock(self, name: str) -> tuple[int, int]:
        return self._drifts.get(name, 0), 1000 * S

    def mishap(self, probability: float) -> bool:
        return self.unlucky

    def post_delay_ns(self) -> int:
        return self.post_ns

    def transfer_ns(self) -> int:
        return self.span_ns

    # ---- time ----------------------------------------------------------------------------

    def wait(self, span_ns: int) -> None:
        """Lets the world go on."""
        self.world.run(self.world.now_ns + span_ns)

    def wait_until_ns(self, t_ns: int) -> None:
        """Lets the world go on until a true time."""
        self.world.run(t_ns)

    def wait_for(self, condition: Callable[[], object]) -> None:
        """Lets the world go on, a millisecond at a time, until something is so."""
        end_ns = self.world.now_ns + 60 * S
        while not condition():
            assert self.world.now_ns < end_ns, "the script waits for what does not come"
            self.wait(MS)

    # ---- decode --------------------------------------------------------------------------

    def connect(self) -> int:
        """Waits until decode's session is answered; returns when its heartbeat was sent."""
        self.wait_for(lambda: self.decode.session.registered)
        heartbeat_ns = self.world.now_ns
        self.wait(2 * TRIP_NS)
        return heartbeat_ns

    def retain(self) -> Kept:
        """Lets a request of the conversation finish on decode, and its Grant arrive."""
        tokens = [*PROMPT, 2]
        self.decode.submit(Job(NAMED, tokens, 1, 4, 20 * MS, lambda: None))
        self.wait_for(lambda: self.latest(NAMED))
        self.wait(3 * TRIP_NS)
        kept = self.latest(NAMED)
        assert kept is not None
        return kept

    def leave(self, target: LeaseService) -> None:
        """Decode's session breaks, and only decode hears of it; it turns to `target`."""
        stream = self.decode.stream
        assert stream is not None
        stream.break_off(0, 0)
        self.decode.lead = self.services.index(target)
        self.decode.on_server_closed(stream)

    def part(self, service: LeaseService, span_ns: int = 600 * S) -> None:
        """Decode and a lease service hear nothing of each other."""
        self.network.block(self.decode, service, span_ns)
        self.network.block(service, self.decode, span_ns)

    def lease_id(self, kept: Kept) -> str:
        """Returns the retention's lease id of the current session."""
        ids = [one.offer.lease_id for one in self.decode.session.retentions]
        return next(each for each in ids if each.startswith(f"{kept}."))

    # ---- readers and clients -------------------------------------------------------------

    def ask(self, lease_id: str, service: LeaseService) -> Request:
        """A turn's prefill leg comes with a lease id; its question goes to `service`."""
        prefill = self.prefills[0]
        prefill.lead = self.services.index(service)
        self.requests += 1
        prompt = [*PROMPT, 2, 2]
        request = Request(
            f"r{self.requests}", NAMED, prompt, lease_id, lambda tokens, verdict: None
        )
        prefill.submit(request)
        return request

    def offered(self, service: LeaseService) -> list[str]:
        """Returns the leases that a lease service knows of."""
        views = service.answer(
            lambda lessor, now_ns: lessor.list_leases(
                engine_id="", key=None, after="", count_max=9, now_ns=now_ns
            )
        )
        assert isinstance(views, list)
        return [str(view.lease_id) for view in views]

    def end(self, service: LeaseService) -> None:
        """The client ends the conversation, at one of the lease services."""
        self.network.send(self.router, service, service.end_conversation, KEY)


@contextlib.contextmanager
def stage(cores: Cores, drifts: dict[str, int] | None = None, **settings: Any) -> Iterator[Stage]:
    """Builds a stage; `settings` are the weather's."""
    calm: dict[str, Any] = {
        "decodes": 1,
        "prefills": 1,
        "ranks": 1,
        "conversations": 0,
        "lateness_ns": 0,
    }
    hold: dict[str, Any] = {"max_hold_ns": 60 * S, "idle_ns": 30 * S, "elected": False}
    weather = Weather(**{**calm, **hold, **settings})
    with installed(cores, weather):
        yield Stage(cores, weather, drifts or {})
