"""How records look in etcd: keys and values, and back.

PREFIX leader                                   H:P of the lease service that leads
PREFIX sessions/ENGINE                          the engine's newest session
PREFIX conversations/FINGERPRINT/TAG            who holds the conversation, or why nobody does

The tag is a keyed hash of tenant, model and conversation id: who can read etcd learns no name and
cannot try names out. The fingerprint tells under which cluster secret the tags were made.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

from kvturn_lease.store import ConversationRecord, SessionRecord
from kvturn_lease.verdict import ReleaseReason

if TYPE_CHECKING:
    from kvturn_lease.conversation import ConversationKey

_TAG_BYTES = 16
_FINGERPRINT_BYTES = 8
_HELD = "held"
_UNREADABLE = (ValueError, KeyError, TypeError, OverflowError, RecursionError)
"""What JSON of somebody else's may raise: numbers without an end and nesting without one, too."""


class Keys:
    """The names of our keys under one prefix and one cluster secret."""

    def __init__(self, prefix: str, secret: bytes) -> None:
        """`secret` is the same for all lease services of a cluster, any length above 0."""
        assert secret
        root = prefix.encode()
        self._secret = hashlib.blake2b(secret, digest_size=64).digest()
        fingerprint = self._hash(b"fingerprint", _FINGERPRINT_BYTES).hex()
        self.leader = root + b"leader"
        self.sessions = root + b"sessions/"
        self.any_conversations = root + b"conversations/"
        """Prefix of the conversations under whatever secret."""
        self.conversations = self.any_conversations + fingerprint.encode() + b"/"
        """Prefix of the conversations under this secret."""

    def session(self, engine_id: str) -> bytes:
        """Returns the key of an engine's session."""
        return self.sessions + engine_id.encode()

    def conversation(self, key: ConversationKey) -> bytes:
        """Returns the key of a conversation."""
        return self.conversations + self.tag(key).hex().encode()

    def tag(self, key: ConversationKey) -> bytes:
        """Returns what stands for the conversation's names."""
        parts = [part.encode() for part in key]
        # Lengths first, so that no two different keys give the same text.
        text = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
        return self._hash(b"conversation" + text, _TAG_BYTES)

    def tag_of(self, name: bytes) -> bytes | None:
        """Returns the tag in a conversation's key, None if there is none."""
        try:
            tag = bytes.fromhex(name.removeprefix(self.conversations).decode())
        except ValueError:
            return None
        return tag if len(tag) == _TAG_BYTES else None

    def _hash(self, text: bytes, size: int) -> bytes:
        return hashlib.blake2b(text, digest_size=size, key=self._secret).digest()


def session_value(record: SessionRecord) -> bytes:
    """Returns the value of an engine's session."""
    body: dict[str, object] = {
        "engine": record.engine_id,
        "incarnation": record.incarnation,
        "session": record.session_number,
        "fenced": list(record.fenced),
    }
    if record.draining:
        body["draining"] = True
    return _dump(body)


def session_record(value: bytes) -> SessionRecord | None:
    """Returns the session that a value tells of, None for a value that is none of ours."""
    try:
        body = json.loads(value)
        record = SessionRecord(
            str(body["engine"]),
            str(body["incarnation"]),
            int(body["session"]),
            tuple(str(each) for each in body["fenced"]),
            body.get("draining") is True,
        )
    except _UNREADABLE:
        return None
    return record if record.engine_id and record.session_number > 0 else None


def conversation_value(record: ConversationRecord) -> bytes:
    """Returns the value of a conversation."""
    held = record.end_reason == ReleaseReason.NONE
    state = _HELD if held else record.end_reason.name.lower()
    return _dump({"engine": record.engine_id, "state": state})


def conversation_record(value: bytes) -> ConversationRecord | None:
    """Returns what a value tells of a conversation, None for a value that is none of ours."""
    try:
        body = json.loads(value)
        state = str(body["state"])
        held = state == _HELD
        reason = ReleaseReason.NONE if held else ReleaseReason[state.upper()]
        return ConversationRecord(str(body["engine"]), reason)
    except _UNREADABLE:
        return None


def _dump(body: dict[str, object]) -> bytes:
    return json.dumps(body, separators=(",", ":")).encode()
