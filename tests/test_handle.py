"""What of a request's kv_transfer_params may reach stock code."""

from __future__ import annotations

from typing import Any

import pytest

from kvturn_connector.handle import HANDLE_KEYS, notice_name, sane_params

HANDLE: dict[str, Any] = {
    "remote_block_ids": [[1, 2]],
    "remote_engine_id": "prefill",
    "remote_request_id": "request-7",
    "remote_host": "127.0.0.1",
    "remote_port": 5600,
    "remote_num_tokens": 20,
    "tp_size": 1,
}


def test_a_decode_leg_keeps_prefills_handle() -> None:
    """The P->D leg goes on as stock code expects it."""
    params = {"do_remote_prefill": True, **HANDLE, "kvturn": {"conversation": "c"}}
    assert sane_params(dict(params), reads_from_prefill=True) == params


def test_a_prefill_leg_brings_no_handle() -> None:
    """It is made by the connector, under a grant, or not at all."""
    params = sane_params({"do_remote_decode": True, **HANDLE}, reads_from_prefill=True)
    assert params == {"do_remote_decode": True, "do_remote_prefill": False}


def test_a_prefill_engine_reads_for_no_decode_leg() -> None:
    """Only an engine that decodes pulls from prefill."""
    params = sane_params({"do_remote_prefill": True, **HANDLE}, reads_from_prefill=False)
    assert params == {"do_remote_prefill": False}


def test_no_request_may_name_a_lease() -> None:
    """Its notice would free blocks that the lease's reader still reads."""
    named = {**HANDLE, "remote_request_id": notice_name("a.1.1")}
    params = sane_params({"do_remote_prefill": True, **named}, reads_from_prefill=True)
    assert params == {"do_remote_prefill": False}


@pytest.mark.parametrize("key", [key for key in HANDLE_KEYS if key in HANDLE])
@pytest.mark.parametrize("value", [{}, ["x"], -1, True, 1.5, None])
def test_a_handle_with_a_wrong_value_is_no_handle(key: str, value: object) -> None:
    """Stock code would raise in the scheduler thread, which ends the engine."""
    if key == "remote_num_tokens" and value is None:
        return  # Absent: stock code reads all blocks.
    params = sane_params({"do_remote_prefill": True, **HANDLE, key: value}, reads_from_prefill=True)
    assert params == {"do_remote_prefill": False}


@pytest.mark.parametrize("params", ["text", [1], 5, True, None])
def test_what_is_no_object_counts_as_absent(params: object) -> None:
    """Engines take any JSON there."""
    assert sane_params(params, reads_from_prefill=True) is None


def test_stock_codes_own_notes_are_not_a_requests_to_set() -> None:
    """`_remote_blocks_processed` would let a request wait for ever for a read nobody posts."""
    params = sane_params(
        {"do_remote_decode": True, "_remote_blocks_processed": True}, reads_from_prefill=False
    )
    assert params == {"do_remote_decode": True, "do_remote_prefill": False}
