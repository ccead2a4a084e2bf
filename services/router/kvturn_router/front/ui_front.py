"""The page at `/ui`: files that come with the router, and hold nothing that is secret.

What they show they fetch from the routes under `/kvturn/v1/`, which judge who asks.
"""

import hashlib
from pathlib import Path
from typing import Final, NamedTuple

from kvturn_router.errors import TurnError
from kvturn_router.front.http_wire import HttpAnswer, HttpRequest

UI: Final = "/ui"

_FOLDER: Final = Path(__file__).parent / "ui"
_INDEX: Final = "index.html"
_TYPES: Final = {
    ".css": b"text/css; charset=utf-8",
    ".html": b"text/html; charset=utf-8",
    ".js": b"text/javascript; charset=utf-8",
    ".svg": b"image/svg+xml",
}
_HEADERS: Final = (
    # Nothing from elsewhere, nothing inline, in no frame of another page.
    (
        b"content-security-policy",
        b"default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    # Kept, and asked after each time: so it is never older than the router.
    (b"cache-control", b"no-cache"),
)


class _File(NamedTuple):
    media_type: bytes
    body: bytes
    etag: bytes


class UiFront:
    """Serves the page. Reads its files when it is made."""

    def __init__(self) -> None:
        self._files = {
            file.name: _file(file) for file in _FOLDER.iterdir() if file.suffix in _TYPES
        }

    def serve(self, answer: HttpAnswer, request: HttpRequest, path: str) -> None:
        """Answers a request for `/ui` or a file below it. Raises TurnError."""
        if path == f"{UI}/":
            # Relative, so that it holds behind a proxy that adds a prefix.
            answer.whole(308, ((b"location", b"../ui"),), b"")
            return
        name = path.removeprefix(UI).removeprefix("/") or _INDEX
        file = self._files.get(name)
        if file is None:
            raise TurnError(404, f"The page at {UI} has no such file.", reason="PATH_UNKNOWN")
        headers = [*_HEADERS, (b"etag", file.etag)]
        if _names(request.headers.get("if-none-match", ""), file.etag.decode()):
            # The length is that of the body which is not sent.
            answer.begin(304, headers, len(file.body), None)
            answer.write(b"", True)
            return
        answer.whole(200, [*headers, (b"content-type", file.media_type)], file.body)


def _file(file: Path) -> _File:
    body = file.read_bytes()
    return _File(
        _TYPES[file.suffix], body, b'"%b"' % hashlib.sha256(body).hexdigest()[:16].encode()
    )


def _names(condition: str, etag: str) -> bool:
    given = [one.strip().removeprefix("W/") for one in condition.split(",")]
    return etag in given or "*" in given
