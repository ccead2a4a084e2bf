"""Files of keys: who may call, by the secret that they bring.

One key per line, and after it, if given, a name:

    # everything after a "#" at the start of a line or after a space is a comment
    4f0d9c1f6a3be2c8
    92b1e6f07d5a4c3e  team-a

Several keys may have one name; so keys are rotated: the new one is added, clients change over,
the old one is removed.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from typing import TYPE_CHECKING

from kvturn.watched import FileFault, Watched, read_file

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

KEY_BYTES_MIN = 8
KEY_BYTES_MAX = 512
NAME_BYTES_MAX = 128
KEYS_MAX = 10_000

_visible = re.compile(rb"[\x21-\x7e]+")
_comment = re.compile(rb"(^|\s)#.*")


class Keys:
    """Keys and their names.

    A key is looked for by a digest of it that is keyed anew in each process: the time that takes
    tells nothing about the keys there are, and no key is kept.
    """

    def __init__(self, names: Mapping[bytes, str]) -> None:
        """`names` is the name of each key, "" for none."""
        self._secret = secrets.token_bytes(32)
        self._names = {self._digest(key): name for key, name in names.items()}

    def find(self, key: bytes) -> str | None:
        """Returns the key's name, "" if it has none; None if there is no such key."""
        return self._names.get(self._digest(key)) if len(key) <= KEY_BYTES_MAX else None

    def name_of(self, key: bytes) -> str | None:
        """Returns the key's name, `unnamed(key)` if it has none; None if there is no such key."""
        name = self.find(key)
        return unnamed(key) if name == "" else name

    def _digest(self, key: bytes) -> bytes:
        return hashlib.blake2b(key, key=self._secret, digest_size=32).digest()


def unnamed(key: bytes) -> str:
    """Returns what stands for the name of a key without one: a digest, the same everywhere."""
    return "key-" + hashlib.sha256(key).hexdigest()[:16]


def parse_keys(setting: str, file: Path) -> Keys:
    """Reads a file of keys. Raises FileFault, which names lines and never shows keys."""
    names: dict[bytes, str] = {}
    for number, line in enumerate(read_file(setting, file).splitlines(), 1):
        fields = _comment.sub(b"", line).split()
        if not fields:
            continue
        where = f"{setting} {file}: line {number}"
        key, *rest = fields
        if len(rest) > 1 or not all(map(_visible.fullmatch, fields)):
            raise FileFault(f"{where} must be KEY or KEY NAME, both of visible ASCII")
        if not KEY_BYTES_MIN <= len(key) <= KEY_BYTES_MAX:
            raise FileFault(f"{where}: a key must have {KEY_BYTES_MIN} to {KEY_BYTES_MAX} bytes")
        name = rest[0].decode() if rest else ""
        if len(name) > NAME_BYTES_MAX:
            raise FileFault(f"{where}: a name must have at most {NAME_BYTES_MAX} bytes")
        if key in names:
            raise FileFault(f"{where} repeats the key of an earlier line")
        names[key] = name
        if len(names) > KEYS_MAX:
            raise FileFault(f"{setting} {file}: more than {KEYS_MAX} keys")
    if not names:
        raise FileFault(f"{setting} {file}: holds no key")
    return Keys(names)


def watched_keys(setting: str, file: Path) -> Watched[Keys]:
    """Returns the keys of a file, read again when it changes. Raises FileFault."""
    return Watched((file,), lambda: parse_keys(setting, file))


def bearer_of(authorization: str) -> bytes:
    """Returns the key of an Authorization header's value; empty if it is no bearer's."""
    scheme, _, key = authorization.partition(" ")
    return key.strip().encode("latin-1", "replace") if scheme.lower() == "bearer" else b""
