"""The keys of `kv_transfer_params` that make stock code read, and what of them may reach it.

Engines may be reachable by others than the router, and stock code takes what a request says at its
word: it would read, or tell decode to free, blocks that nobody allowed it to touch, and a value of
a wrong type raises in the scheduler thread, which ends the engine.
"""

from __future__ import annotations

from typing import Any

HANDLE_KEYS = (
    "remote_block_ids",
    "remote_engine_id",
    "remote_request_id",
    "remote_host",
    "remote_port",
    "remote_num_tokens",
    "remote_blocks_expiry_time",
    "tp_size",
    "dcp_size",
    "pp_size",
)
"""What names blocks on another engine."""
STOCK_STATE_KEYS = ("_remote_blocks_processed", "_p_side_truncated")
"""Where stock code notes what it has done; never a request's to set."""
NOTICE_PREFIX = "kvturn:"
"""What a remote request id begins with when it names a lease."""


def notice_name(lease_id: str) -> str:
    """The remote request id under which a lease's blocks are read."""
    return NOTICE_PREFIX + lease_id


def strip_handle(params: dict[str, Any]) -> None:
    """Takes the handle away: stock code has nothing to read from."""
    for key in HANDLE_KEYS:
        params.pop(key, None)


def sane_params(params: Any, reads_from_prefill: bool) -> dict[str, Any] | None:
    """What of a request's `kv_transfer_params` may reach stock code. Changes a dict in place.

    A prefill leg never brings a handle: it is made here, under a grant. A decode leg may bring
    prefill's, if this engine decodes and the handle is whole; it may not name a lease.

    Args:
        reads_from_prefill: whether this engine serves decode legs.
    """
    if not isinstance(params, dict):
        return None
    for key in STOCK_STATE_KEYS:
        params.pop(key, None)
    served = reads_from_prefill and _is_whole(params)
    if params.get("do_remote_decode") or not (params.get("do_remote_prefill") and served):
        params["do_remote_prefill"] = False
        strip_handle(params)
    return params


def _is_whole(params: dict[str, Any]) -> bool:
    texts = (params.get(key) for key in ("remote_engine_id", "remote_request_id", "remote_host"))
    sizes = (params.get("remote_port"), params.get("tp_size"))
    more_sizes = (params.get(key, 1) for key in ("dcp_size", "pp_size"))
    return (
        all(isinstance(text, str) for text in texts)
        and all(_is_count(size) for size in (*sizes, *more_sizes))
        and not params["remote_request_id"].startswith(NOTICE_PREFIX)
        and _are_block_groups(params.get("remote_block_ids"))
        and (params.get("remote_num_tokens") is None or _is_count(params["remote_num_tokens"]))
        and isinstance(params.get("remote_blocks_expiry_time"), int | float | None)
    )


def _are_block_groups(groups: Any) -> bool:
    return (
        isinstance(groups, list | tuple)
        and len(groups) > 0
        and all(isinstance(group, list | tuple) for group in groups)
        and all(_is_count(block_id) for group in groups for block_id in group)
    )


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
