"""Why a turn reused KV or did not: one word per turn, as in common.proto.

The router's own modules use these names; protobuf numbers appear only where a
message is read or written (`lease_client.py`, `session_turns.py`, `turn_report.py`).
"""

from enum import StrEnum


class Verdict(StrEnum):
    """A verdict by its lower-case proto name. common.proto defines each."""

    REUSED = "reused"
    PARTIAL_PREFIX = "partial_prefix"
    LOCAL = "local"
    FIRST_TURN = "first_turn"
    NO_LEASE = "no_lease"
    ENDED = "ended"
    RELEASED = "released"
    EXPIRED = "expired"
    CONSUMED = "consumed"
    READ_IN_PROGRESS = "read_in_progress"
    READ_FAILED = "read_failed"
    READ_TOO_LONG = "read_too_long"
    PREFIX_MISMATCH = "prefix_mismatch"
    BELOW_THRESHOLD = "below_threshold"
    CHEAPER_TO_COMPUTE = "cheaper_to_compute"
    UNSUPPORTED_MODEL = "unsupported_model"
    ENGINE_LOST = "engine_lost"
    LEASE_SERVICE_UNREACHABLE = "lease_service_unreachable"
    STORE_UNAVAILABLE = "store_unavailable"
    TURNED_OFF = "turned_off"
    NOT_OFFERED = "not_offered"


def verdict_named(name: str) -> Verdict | None:
    """Returns the verdict of that lower-case name, or None if it is none."""
    try:
        return Verdict(name)
    except ValueError:
        return None
