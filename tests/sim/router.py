"""A router and its clients: conversations whose turns go through prefill and decode."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvturn_lease.conversation import ConversationKey
from kvturn_lease.lessor import Resolution
from sim.checkers import Kept, common_prefix
from sim.decode import Job
from sim.prefill import BLOCK_SIZE, THRESHOLD_TOKENS, Prefill, Request
from sim.world import MS, Node, S, Violation

if TYPE_CHECKING:
    from collections.abc import Callable

    from sim.decode import Decode
    from sim.lease_service import LeaseService
    from sim.simulation import Simulation

TOKENS_MAX = 96
VOCABULARY = 3  # few, so that histories that were changed still have much in common
LEASES_REMEMBERED = 4


class Conversation:
    """A client's conversation: a turn, a pause to think, the next turn."""

    def __init__(self, sim: Simulation, tenant: str, conversation_id: str) -> None:
        self.sim = sim
        self.key = ConversationKey(tenant, "m", conversation_id)
        self.named = (tenant, conversation_id)
        self.history: list[int] = []
        self.turn = 0
        self.leases: list[str] = []
        """Lease ids it was offered, the newest last."""
        self.attempt = 0
        """Counts turns; what belongs to an older one is not for it any more."""
        self.busy = False
        self.stopped = False
        self._says_so = False

    def stop(self, *, says_so: bool) -> None:
        """Takes no more turns, and ends the conversation after the one that is on."""
        self.stopped = True
        self._says_so = says_so
        if says_so and not self.busy:
            self.sim.router.end(self)

    def think(self) -> None:
        """Waits, then takes the next turn."""
        if self.stopped:
            if self._says_so:
                self.sim.router.end(self)
            return
        random = self.sim.random
        if self.sim.checkers.calm_from_ns is not None:
            span_ns = 300 * MS + int(random.random() * 500 * MS)
        elif self.sim.calm:
            span_ns = S + int(random.random() * 4 * S)
        else:
            span_ns = int(random.expovariate(1.0) * self.sim.weather.think_ns) + 50 * MS
        if self.sim.chance(0.1):
            self.sim.router.keep_alive(self, self.sim.random.choice((None, 3 * S, 10 * S)))
        self.sim.world.push(self.sim.world.now_ns + span_ns, None, self.take_turn)

    def take_turn(self) -> None:
        """Says something, unless the last turn is still on."""
        if self.busy or self.stopped:
            return
        self.busy = True
        self.attempt += 1
        self.turn += 1
        Turn(self.sim.router, self, self.next_prompt()).begin()
        span_ns = 3 * self.sim.checkers.hold_ns + 10 * S
        self.sim.world.push(
            self.sim.world.now_ns + span_ns, None, self._give_up, self.attempt, self.sim.calm
        )

    def next_prompt(self) -> list[int]:
        """Returns the history, at times edited or compacted, and what the user adds."""
        random = self.sim.random
        prompt = list(self.history)
        if len(prompt) > TOKENS_MAX - 32:
            prompt = prompt[:16] + prompt[-16:]
        elif prompt and self.sim.mishap(0.15):
            cut = random.randrange(len(prompt))
            prompt = [*prompt[:cut], random.randrange(VOCABULARY), *prompt[cut + 1 :]]
        return prompt + [random.randrange(VOCABULARY) for _ in range(random.randrange(1, 16))]

    def answered(self, attempt: int, tokens: list[int]) -> None:
        """The turn's answer is complete."""
        if attempt == self.attempt and self.busy:
            self.busy = False
            self.history = tokens
            self.sim.checkers.count["turns"] += 1
            self.think()

    def _give_up(self, attempt: int, begun_calm: bool) -> None:
        if attempt == self.attempt and self.busy:
            if begun_calm:
                raise Violation("S7", f"turn {self.turn} of {self.named} was never answered")
            self.busy = False
            self.think()


class Router(Node):
    """One router: asks who holds a conversation, and tells of turns in flight."""

    def __init__(self, sim: Simulation, name: str, drift_ppm: int, offset_ns: int) -> None:
        super().__init__(sim.world, name, drift_ppm, offset_ns)
        self.sim = sim
        self.lead = 0

    def tell(self, serve: Callable[[Any], object]) -> None:
        """Sends something whose answer changes nothing."""
        service = self.sim.leader_of(self)
        self.sim.network.send(self, service, serve, service)

    def ask(
        self, service: Any, serve: Callable[[], object], on_answer: Callable[[Any], None]
    ) -> None:
        """Asks, and learns from the answer who leads."""

        def answered(answer: object) -> None:
            if isinstance(answer, Exception):
                self.sim.follow(self, service, answer)
            on_answer(answer)

        within_ns = self.sim.weather.question_ns
        self.sim.network.ask(self, service, serve, answered, within_ns)

    def keep_alive(self, conversation: Conversation, absence_ns: int | None) -> None:
        """Passes on that a client will be back."""
        if self.up:
            self.tell(lambda service: service.keep_alive(conversation.key, absence_ns))

    def end(self, conversation: Conversation) -> None:
        """Passes on that a client ended its conversation."""
        kept = self.sim.latest(conversation.named)

        def serve(service: Any) -> object:
            answer = service.end_conversation(conversation.key)
            if answer == 1 and kept is not None:
                self.sim.checkers.ended(kept)
            return answer

        self.tell(serve)


class Turn:
    """One turn on its way through the router."""

    def __init__(self, router: Router, conversation: Conversation, prompt: list[int]) -> None:
        self._router = router
        self._sim = router.sim
        self._conversation = conversation
        self._prompt = prompt
        self._attempt = conversation.attempt
        self._resolved = False
        self._prefilled = False
        self._engine_id = ""
        self._expected: Kept | None = None

    def begin(self) -> None:
        """Reports the turn and asks for the conversation's lease."""
        router, key = self._router, self._conversation.key
        if not router.up:
            return
        self._expected = self._sim.expected(self._conversation.named, self._prompt)
        router.tell(lambda service: service.touch(key, 1))
        service = self._sim.leader_of(router)
        router.ask(service, lambda: service.resolve(key), self._on_resolution)
        router.after(self._sim.weather.question_ns, self._on_deadline, service)

    def _on_deadline(self, service: LeaseService) -> None:
        if not self._resolved:
            self._sim.follow(self._router, service, None)
            self._on_resolution(None)

    def _on_resolution(self, resolution: object) -> None:
        if self._resolved:
            return
        self._resolved = True
        lease_id = ""
        if isinstance(resolution, Resolution):
            self._engine_id = resolution.engine_id
            if resolution.lease_id is not None:
                lease_id = str(resolution.lease_id)
                leases = self._conversation.leases
                leases.append(lease_id)
                del leases[:-LEASES_REMEMBERED]
        if self._sim.mishap(self._sim.weather.stale_leases):
            anyone = self._sim.random.choice(self._sim.conversations)
            if anyone.leases:
                lease_id = self._sim.random.choice(anyone.leases)
        self._send_prefill(lease_id)

    def _send_prefill(self, lease_id: str) -> None:
        sim = self._sim
        prefills = [each for each in sim.prefills if each.up]
        if not prefills:
            self._send_decode()
            return
        prefill = sim.random.choice(prefills)
        sim.requests += 1
        request = Request(
            f"r{sim.requests}", self._conversation.named, self._prompt, lease_id, self._on_prefilled
        )
        sim.world.push(sim.world.now_ns + MS, prefill, prefill.submit, request)
        weather = sim.weather
        if lease_id:
            span_ns = int(weather.longest_read_ns * 1.05) + 100 * MS
            self._router.after(span_ns, self._read_again, prefill, request)
        if sim.mishap(weather.aborts):
            span_ns = int(sim.random.random() * weather.longest_read_ns)
            if sim.chance(0.5):
                span_ns //= 20
            self._router.after(span_ns, self._read_again, prefill, request)

    def _read_again(self, prefill: Prefill, request: Request) -> None:
        """The read takes too long: the turn goes on under a new request id, without a lease."""
        if self._prefilled or request.done != self._on_prefilled:
            return
        request.done = _nobody
        sim = self._sim
        sim.world.push(sim.world.now_ns + MS, prefill, prefill.abort, request)
        self._send_prefill("")

    def _on_prefilled(self, reused_tokens: int, verdict: int) -> None:
        if self._prefilled:
            return
        self._prefilled = True
        self._sim.world.note(
            "turn", "%s reused %d, verdict %d", self._conversation.named, reused_tokens, verdict
        )
        kept = self._expected
        if kept is not None:
            if reused_tokens:
                self._sim.checkers.count["calm reuses"] += 1
            elif kept.withdrawn_ns is None:
                raise Violation("L2", f"{kept} was not read, verdict {verdict}", str(kept))
        # The answer goes back to the router, which may be gone by now.
        self._router.after(MS, self._send_decode)

    def _send_decode(self) -> None:
        sim = self._sim
        decodes: list[Decode] = [each for each in sim.decodes if each.up]
        if not decodes:
            self._router.after(S, self._send_decode)
            return
        holders = [each for each in decodes if each.engine_id == self._engine_id]
        decode = sim.random.choice(holders if holders and sim.chance(0.8) else decodes)
        reply = [sim.random.randrange(VOCABULARY) for _ in range(sim.random.randrange(1, 16))]
        tokens = self._prompt + reply
        job = Job(
            self._conversation.named,
            tokens,
            self._conversation.turn,
            -(-len(tokens) // BLOCK_SIZE),
            20 * MS + int(sim.random.random() * 300 * MS),
            lambda: self._on_decoded(tokens),
        )
        sim.world.push(sim.world.now_ns + MS, decode, decode.submit, job)

    def _on_decoded(self, tokens: list[int]) -> None:
        self._router.after(MS, self._settle, tokens)

    def _settle(self, tokens: list[int]) -> None:
        key = self._conversation.key
        self._router.tell(lambda service: service.touch(key, -1))
        self._conversation.answered(self._attempt, tokens)


def _nobody(reused_tokens: int, verdict: int) -> None:
    """Takes the result of a leg that nobody waits for."""


def is_readable(prompt: list[int], kept: Kept) -> bool:
    """True if enough of the retention is a prefix of the prompt for a read."""
    return common_prefix(prompt, kept.tokens) >= THRESHOLD_TOKENS + BLOCK_SIZE
