"""Offers stock handles to turns, once each and only where tokens prove the prefix."""

import logging
from collections.abc import Callable
from typing import Final

import msgspec

from kvturn.recognition import Recognition
from kvturn.tracing import Span
from kvturn_router.engines.engine_http import EngineFault
from kvturn_router.engines.fleet import Engine
from kvturn_router.request.body import joined
from kvturn_router.request.conversation import ConversationKey
from kvturn_router.request.history import History
from kvturn_router.request.intake import TurnRequest
from kvturn_router.turn.legs import Legs, whole_body
from kvturn_router.turn.prefill_answer import PrefillAnswer, ReadReport
from kvturn_router.turn.stock import (
    Handle,
    HandleBook,
    StockTap,
    begins_with,
    known_prompt_ids,
    must_equal,
    shows_tokens,
    tokenize_members,
    tokens_of,
    transfer_of,
)
from kvturn_router.verdict import Verdict

logger = logging.getLogger("kvturn.router.stock")

_TOKENIZE_SILENCE_S: Final = 2.0


class StockReuse:
    """The stock mode of one router. `clock_ns` is CLOCK_BOOTTIME."""

    def __init__(
        self,
        handles: HandleBook,
        recognition: Recognition,
        legs: Legs,
        clock_ns: Callable[[], int],
    ) -> None:
        self._handles = handles
        self._recognition = recognition
        self._legs = legs
        self._clock_ns = clock_ns
        self._warned = False

    def name(self, request: TurnRequest, history: History) -> ConversationKey:
        """Returns the conversation that a turn which begins belongs to; `ended` must follow."""
        recognise = request.recognise and history.goes_on
        named = self._recognition.name(request.key, recognise, history.points)
        key = request.key._replace(conversation_id=named.conversation_id)
        self._recognition.began(key, history.points)
        return key

    def ended(self, key: ConversationKey) -> None:
        """Counts out a turn that `name` has counted in."""
        self._recognition.ended(key)

    def offer(self, request: TurnRequest, first: bool) -> Handle | Verdict:
        """Returns the conversation's handle and forgets it, or why there is none."""
        taken = self._handles.take(request.key, self._clock_ns())
        if not isinstance(taken, Handle):
            return Verdict.FIRST_TURN if first and taken is Verdict.NO_LEASE else taken
        if taken.same != must_equal(request) or not shows_tokens(request):
            return Verdict.PREFIX_MISMATCH
        return taken

    async def check(
        self, engine: Engine, request: TurnRequest, handle: Handle, span: Span
    ) -> Verdict | None:
        """Asks prefill for the prompt's tokens; returns None if they begin with the handle's.

        Otherwise returns why the handle is not used.
        """
        ids = known_prompt_ids(request)
        if ids is None:
            ids = await self._prompt_ids(engine, request, span)
        if ids is None:
            return Verdict.NOT_OFFERED
        if not begins_with(ids, handle):
            return Verdict.PREFIX_MISMATCH
        # It was fresh when the turn came, which may have waited in line since.
        return None if self._handles.is_fresh(handle, self._clock_ns()) else Verdict.EXPIRED

    async def _prompt_ids(
        self, engine: Engine, request: TurnRequest, span: Span
    ) -> list[int] | None:
        try:
            exchange = await self._legs.send(
                engine,
                request,
                "/tokenize",
                joined(tokenize_members(request)),
                span,
                silence_s=_TOKENIZE_SILENCE_S,
                again_if_stale=True,
            )
            answer = await whole_body(exchange)
        except EngineFault:
            return None
        return tokens_of(answer) if exchange.status == 200 else None

    def keep(self, key: ConversationKey, tap: StockTap, decode: str) -> None:
        """Remembers what a finished answer brought."""
        handle = tap.handle(decode, self._clock_ns())
        if not tap.saw_handle and not self._warned:
            self._warned = True
            logger.warning(
                "no handle from decode engine %s: its answers carry no kv_transfer_params "
                "(streams carry them from vLLM 0.33 on, with bidirectional_kv_xfer)",
                decode,
            )
        self._handles.keep(key, handle)

    def forget(self, key: ConversationKey) -> None:
        """Drops the handles of a conversation's branches, or of a scope's conversations."""
        tenant, model, name = key
        for branch in self._recognition.branches(tenant, model, name) or [name]:
            one = ConversationKey(tenant, model, branch)
            self._handles.forget(one)
            self._recognition.forget(one)

    @staticmethod
    def keys(handle: Handle) -> list[tuple[str, bytes]]:
        """Returns the stock keys under which prefill reads a handle's KV."""
        return transfer_of(handle)

    @staticmethod
    def judged(handle: Handle, answer: PrefillAnswer) -> tuple[Verdict, PrefillAnswer]:
        """Returns the verdict on a turn served with a handle, and its answer with a report.

        The stock connector reports only the sum of what it read and what it
        had; it reads nothing where that would save less than its threshold.
        """
        cached = answer.cached_tokens
        prompt_tokens = answer.prompt_tokens
        if cached is not None and cached < handle.tokens:
            report = ReadReport(None, prompt_tokens, 0, cached, 0.0, 0)
            return Verdict.BELOW_THRESHOLD, msgspec.structs.replace(answer, report=report)
        local = cached - handle.tokens if cached is not None else 0
        report = ReadReport(None, prompt_tokens, handle.tokens, local, 0.0, 0)
        return Verdict.REUSED, msgspec.structs.replace(answer, report=report)
