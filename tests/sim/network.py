"""Messages between nodes: lost, late, doubled, out of order; streams in order, but cut short."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sim.world import MS

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeAlias

    from sim.weather import Weather
    from sim.world import Node, World

    Asker: TypeAlias = tuple[Node, int, int, Callable[[Any], None]]


class Network:
    """All links. A blocked direction of a link holds messages back, or loses them."""

    def __init__(self, world: World, weather: Weather) -> None:
        self.world = world
        self._random = world.random
        self._blocked: dict[tuple[str, str], int] = {}
        self.calm = False
        self.fixed_ns: int | None = None
        """Every message's delay, where a scenario sets it."""
        self._weather = weather

    def block(self, source: Node, target: Node, span_ns: int) -> None:
        """Blocks one direction of a link for a while."""
        link = (source.name, target.name)
        until_ns = self.world.now_ns + span_ns
        self._blocked[link] = max(self._blocked.get(link, 0), until_ns)

    def heal(self) -> None:
        """Opens all links for good: short delays, no loss, no doubles."""
        self.calm = True
        self._blocked.clear()

    def blocked_until_ns(self, source: Node, target: Node) -> int:
        """Returns until when the direction is blocked; in the past if it is not."""
        return self._blocked.get((source.name, target.name), 0)

    def is_open(self, one: Node, other: Node) -> bool:
        """True if neither direction between the two is blocked."""
        now_ns = self.world.now_ns
        return (
            self.blocked_until_ns(one, other) <= now_ns
            and self.blocked_until_ns(other, one) <= now_ns
        )

    def delay_ns(self) -> int:
        """Draws the delay of one message."""
        weather = self._weather
        if self.fixed_ns is not None:
            return self.fixed_ns
        if self.calm:
            return MS + int(self._random.random() * 2 * MS)
        if weather.spike and self._random.random() < weather.spike:
            return int(self._random.random() * weather.spike_ns)
        return int(self._random.expovariate(1.0) * weather.delay_ns) + 100_000

    def send(self, source: Node, target: Node, action: Callable[..., Any], *args: Any) -> None:
        """Sends one message by itself: `action(*args)` is its arrival at `target`, if it does."""
        world, random = self.world, self._random
        arrival_ns = world.now_ns + self.delay_ns()
        until_ns = self.blocked_until_ns(source, target)
        if not self.calm:
            weather = self._weather
            if weather.loss and random.random() < weather.loss:
                return
            if weather.doubles and random.random() < weather.doubles:
                world.push(world.now_ns + 3 * self.delay_ns(), target, action, *args)
        if until_ns > world.now_ns:
            if random.random() < 0.5:
                return
            arrival_ns += until_ns - world.now_ns
        world.push(arrival_ns, target, action, *args)

    def ask(
        self,
        source: Node,
        target: Node,
        serve: Callable[[], object],
        on_answer: Callable[[Any], None],
        within_ns: int = 1 << 60,
    ) -> None:
        """Asks a question: `serve` runs at `target`, `on_answer` at `source`, each if it arrives.

        Either may run twice. A source that has restarted meanwhile hears nothing, nor does one
        whose answer takes longer than `within_ns`.
        """
        until_ns = self.world.now_ns + within_ns
        asker = (source, source.epoch, until_ns, on_answer)
        self.send(source, target, self._serve, asker, target, serve)

    def _serve(self, asker: Asker, target: Node, serve: Callable[[], object]) -> None:
        self.send(target, asker[0], self._answer, asker, serve())

    def _answer(self, asker: Asker, answer: object) -> None:
        source, epoch, until_ns, on_answer = asker
        if source.epoch == epoch and self.world.now_ns <= until_ns:
            on_answer(answer)


class Stream:
    """A bidirectional stream: each direction in order, and what was last sent may be lost.

    Each end learns by itself, or never, that the other has closed; what arrives at a closed end
    is dropped.
    """

    def __init__(self, network: Network, client: Node, server: Node) -> None:
        self.network = network
        self.client: Any = client
        self.server: Any = server
        self.session_id: Any = None
        """The server's to set."""
        self.client_open = True
        self.server_open = True
        self.cut = False
        self._server_epoch = server.epoch
        self._up_ns = 0
        self._down_ns = 0
        self._up_lost_ns = 1 << 62
        self._down_lost_ns = 1 << 62

    def send_up(self, action: Callable[..., Any], *args: Any) -> None:
        """Sends to the server; `action(self, *args)` is the arrival."""
        self._up_ns = self._arrival_ns(self._up_ns, self.client, self.server)
        if not self.cut and self.server.epoch == self._server_epoch:
            self.network.world.push(self._up_ns, self.server, self._arrive_up, action, args)

    def send_down(self, action: Callable[..., Any], *args: Any) -> None:
        """Sends to the client; `action(self, *args)` is the arrival."""
        self._down_ns = self._arrival_ns(self._down_ns, self.server, self.client)
        if not self.cut:
            self.network.world.push(self._down_ns, self.client, self._arrive_down, action, args)

    def break_off(self, up_ns: int, down_ns: int) -> None:
        """Cuts the connection: what would arrive later than so long from now is lost."""
        now_ns = self.network.world.now_ns
        self.cut = True
        self._up_lost_ns = now_ns + up_ns
        self._down_lost_ns = now_ns + down_ns

    def close_client(self, on_close: Callable[..., Any], told: bool) -> None:
        """The client is done with it. The server hears of it if `told`, after what was sent."""
        self.client_open = False
        if told:
            self.send_up(on_close)

    def close_server(self, on_close: Callable[..., Any], told: bool, flushed: bool) -> None:
        """The server is done with it. Unless `flushed`, what is under way is lost."""
        self.server_open = False
        if not flushed:
            self._down_lost_ns = min(self._down_lost_ns, self.network.world.now_ns)
        if told and not self.cut:
            arrival_ns = self._arrival_ns(self._down_ns, self.server, self.client)
            self.network.world.push(arrival_ns, self.client, on_close, self)

    def _arrival_ns(self, last_ns: int, source: Node, target: Node) -> int:
        network = self.network
        start_ns = max(network.world.now_ns, network.blocked_until_ns(source, target))
        return max(last_ns, start_ns + network.delay_ns())

    def _arrive_up(self, action: Callable[..., Any], args: Any) -> None:
        if self.server_open and self.network.world.now_ns <= self._up_lost_ns:
            action(self, *args)

    def _arrive_down(self, action: Callable[..., Any], args: Any) -> None:
        if self.client_open and self.network.world.now_ns <= self._down_lost_ns:
            action(self, *args)
