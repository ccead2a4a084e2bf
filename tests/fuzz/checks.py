"""What holds of any body, whatever is in it."""

from __future__ import annotations

import json
from typing import Any, Final

from fuzz.verdict import Pairs, judge, read
from kvturn_router.errors import TurnError
from kvturn_router.request.body import WITHHELD, decode_parts, prefill_parts
from kvturn_router.request.history import ANSWERS_MAX, history_of
from kvturn_router.request.intake import Intake, TurnRequest
from kvturn_router.request.responses import (
    RESPONSES,
    responses_decode_parts,
    responses_prefill_parts,
)

TRANSFER: Final = b'{"do_remote_decode":true}'

_inner_transfer: Final = ("kv_transfer_params", "ec_transfer_params")
_NOT_FOR_PREFILL: Final = frozenset(
    (
        *("stream", "stream_options", "stream_interval", "max_tokens", "max_completion_tokens"),
        *("min_tokens", "stop", "n", "best_of", "return_token_ids", "return_prompt_text"),
    )
)

_NOT_FOR_PREFILL_RESPONDING: Final = frozenset(
    (
        *("background", "enable_response_messages", "max_output_tokens", "metadata", "store"),
        *("stream", "stop"),
    )
)
_ONE_TOKEN: Final[list[tuple[str, Any]]] = [("stream", False), ("max_tokens", "1")]
_ONE_TOKEN_RESPONDING: Final[list[tuple[str, Any]]] = [
    ("stream", False),
    ("store", False),
    ("max_output_tokens", "1"),
]

_intake = Intake(None, lambda scope: f"conv-of-{scope[:40]}")


def check_body(body: bytes, path: str) -> bool:
    """Checks what is said of a body and what engines would get; returns whether it is a turn."""
    judgement = judge(body, path)
    refusal: TurnError | None = None
    try:
        turn = _intake.turn(path, body, {})
    except TurnError as error:
        refusal = error
    if refusal is not None:
        assert judgement.pairs is None, f"refused: {refusal.message}"
        assert refusal.param in judgement.faults, f"{refusal.param} is named: {refusal.message}"
        check_refusal(refusal.status, refusal.body())
        return False
    assert judgement.pairs is not None, f"taken, though {sorted(map(str, judgement.faults))}"
    check_legs(turn, judgement.pairs)
    check_history(turn)
    return True


def check_refusal(status: int, answer: bytes) -> None:
    """Checks that a refusal has OpenAI's shape."""
    error = json.loads(answer)["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"]
    assert len(error["message"]) < 2_000
    assert error["type"] == "invalid_request_error"
    assert error["code"] == status
    assert status == (404 if error["message"].startswith("Response with id") else 400)


def check_legs(turn: TurnRequest, given: Pairs) -> None:
    """Checks that both legs are what came, but for what is taken out and added."""
    kept = Pairs((name, _kept(name, value)) for name, value in given if name not in WITHHELD)
    transfer = ("kv_transfer_params", read(TRANSFER))
    if turn.path == RESPONSES:
        decode = responses_decode_parts(turn.members, TRANSFER, "resp_1")
        prefill = responses_prefill_parts(turn.members, TRANSFER)
        more, limits = [("request_id", "resp_1")], _ONE_TOKEN_RESPONDING
        left_out = _NOT_FOR_PREFILL_RESPONDING
    else:
        decode = decode_parts(turn.members, TRANSFER)
        prefill = prefill_parts(turn.members, TRANSFER)
        more, limits, left_out = [], list(_ONE_TOKEN), _NOT_FOR_PREFILL
        if "max_completion_tokens" in dict(given):
            limits.append(("max_completion_tokens", "1"))
    assert read(b"".join(decode)) == [*kept, *more, transfer]
    shaping = [(name, value) for name, value in kept if name not in left_out]
    assert read(b"".join(prefill)) == [*shaping, *limits, transfer]


def _kept(name: str, value: Any) -> Any:
    if name != "vllm_xargs" or not isinstance(value, Pairs):
        return value
    if not any(inner in dict(value) for inner in _inner_transfer):
        return value
    return Pairs(
        (inner, given) for inner, given in dict(value).items() if inner not in _inner_transfer
    )


def check_history(turn: TurnRequest) -> None:
    """Checks that a history has points within bounds, whatever it is."""
    history = history_of(turn.members, turn.path, turn.key.tenant, turn.key.model, turn.scope)
    assert len(history.points) <= ANSWERS_MAX + 2
    assert len(set(history.points)) == len(history.points)
    assert all(len(point) == 16 for point in history.points)
    assert 0 <= history.new_bytes <= history.prompt_bytes
