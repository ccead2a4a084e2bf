"""API keys of clients and of operators: who may call the router, and in whose name."""

from collections.abc import Mapping
from typing import Final

import msgspec

from kvturn.keys import Keys, bearer_of
from kvturn.watched import Watched
from kvturn_router.errors import TurnError


class KeyRefused(TurnError):
    """A request without a key that is known, in the shape that OpenAI's clients know."""

    def __init__(self, message: str, challenge: bytes) -> None:
        super().__init__(401, message, reason="KEY_INVALID")
        self._challenge = challenge

    def body(self) -> bytes:
        """Returns the error in OpenAI's JSON shape."""
        error = {
            "message": self.message,
            "type": "invalid_request_error",
            "param": None,
            "code": "invalid_api_key",
        }
        return msgspec.json.encode({"error": error})

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Returns the headers of an HTTP answer that carries the error."""
        return [*super().headers(), (b"www-authenticate", self._challenge)]


_MISSING: Final = "No API key was given; send one as Authorization: Bearer KEY."
_WRONG: Final = "The API key is not known here."


class ApiKeys:
    """The keys of a file, as it is now."""

    def __init__(self, keys: Watched[Keys]) -> None:
        self._keys = keys

    def name_of(self, headers: Mapping[str, str], whose: str = "") -> str:
        """Returns the name of the key that a request brings: the tenant, or the operator.

        `headers` have lower-case names. Raises KeyRefused, which begins with `whose`: what key
        it takes.
        """
        key = bearer_of(headers.get("authorization", ""))
        if not key:
            raise KeyRefused(whose + _MISSING, b"Bearer")
        name = self._keys.value.name_of(key)
        if name is None:
            raise KeyRefused(whose + _WRONG, b'Bearer error="invalid_token"')
        return name

    def knows(self, headers: Mapping[str, str]) -> bool:
        """Tells whether a request brings one of these keys."""
        key = bearer_of(headers.get("authorization", ""))
        return bool(key) and self._keys.value.name_of(key) is not None


def operator_of(admin_keys: ApiKeys | None, headers: Mapping[str, str]) -> str:
    """Returns who calls an admin route.

    Raises TurnError: 403 where nobody is an operator, 401 for whoever shows to be none.
    """
    if admin_keys is None:
        raise TurnError(
            403,
            "This takes an operator's key, and this router was started without --admin-keys-file.",
            reason="ADMIN_DISABLED",
        )
    return admin_keys.name_of(headers, "This takes an operator's key, of --admin-keys-file. ")
