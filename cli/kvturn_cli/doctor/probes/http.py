"""One HTTP question: no proxies, one deadline for all of it, a bounded answer.

On a thread: asyncio has no HTTP client, and a few questions need none that is fast.
"""

import asyncio
import contextlib
import email.utils
import functools
import http.client
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeVar
from urllib.parse import urlsplit

from kvturn_cli.doctor.facts import Clock

BODY_BYTES_MAX = 8 << 20
DATE_AGE_MAX_S = 2.0
"""How old a Date header may be: uvicorn makes one a second, later on a busy machine."""
_CHUNK_BYTES = 1 << 16

T = TypeVar("T")


class Unanswered(Exception):
    """There was no answer; the message says why, in words that follow an address."""


@dataclass(frozen=True)
class Question:
    """A request."""

    url: str
    """http:// or https://, with the path."""
    headers: Mapping[str, str] = field(default_factory=dict)
    method: str = "GET"
    body: bytes | None = None
    timeout_s: float = 3.0
    """For all of it, from the connection to the last byte."""
    tls: ssl.SSLContext | None = None
    """Judges an https server; None: by the system's authorities."""


@dataclass(frozen=True)
class Answer:
    """What came back."""

    status: int
    headers: Mapping[str, str]
    """By lower-case name."""
    body: bytes
    clock: Clock | None
    """The server's, by its Date header: a second wide at least."""
    asked_s: float = 0.0
    """When the question was sent, by our wall clock."""
    headed_s: float = 0.0
    """When the answer's head was there."""


async def ask(question: Question) -> Answer:
    """Asks and reads the whole answer. Raises Unanswered."""
    return await on_thread(lambda: ask_now(question), question.timeout_s)


async def on_thread(work: Callable[[], T], timeout_s: float) -> T:
    """Does the work on a thread of its own, which nobody waits for once this is cancelled.

    Raises Unanswered after `timeout_s` at the latest: looking a name up has no deadline of its
    own, and to a server whose answer comes drop by drop http.client listens for ever.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(settled: Callable[[], None]) -> None:
        if not done.done():
            settled()

    def run() -> None:
        try:
            result = work()
        except BaseException as error:
            outcome = functools.partial(done.set_exception, error)
        else:
            outcome = functools.partial(done.set_result, result)
        with contextlib.suppress(RuntimeError):  # The loop is closed: nobody waits any more.
            loop.call_soon_threadsafe(settle, outcome)

    threading.Thread(target=run, name="doctor-http", daemon=True).start()
    try:
        return await asyncio.wait_for(done, timeout_s)
    except TimeoutError:
        raise Unanswered(f"no answer within {timeout_s:g} s") from None


def ask_now(question: Question) -> Answer:
    """As ask(), on this thread."""
    with Exchange(question) as exchange:
        body = b"".join(exchange.pieces())
        return Answer(
            exchange.status,
            exchange.headers,
            body,
            exchange.clock,
            exchange.asked_s,
            exchange.headed_s,
        )


class Exchange:
    """A request under way: status and headers at once, the body piece by piece."""

    def __init__(self, question: Question) -> None:
        """Sends the request and waits for the answer's head. Raises Unanswered."""
        self._deadline_s = time.monotonic() + question.timeout_s
        self._timeout_s = question.timeout_s
        parts = urlsplit(question.url)
        host, timeout_s = parts.hostname or "", question.timeout_s
        try:
            self._connection = (
                http.client.HTTPSConnection(
                    host, parts.port, timeout=timeout_s, context=question.tls
                )
                if parts.scheme == "https"
                else http.client.HTTPConnection(host, parts.port, timeout=timeout_s)
            )
            path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
            self.asked_s = time.time()
            self._connection.request(question.method, path, question.body, dict(question.headers))
            self._response = self._connection.getresponse()
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise Unanswered(_why(error, parts.scheme, timeout_s)) from None
        self.status = self._response.status
        self.headers = {name.lower(): value for name, value in self._response.getheaders()}
        self.headed_s = time.time()
        name, date = f"{parts.scheme}://{parts.netloc}", self.headers.get("date", "")
        self.clock = date_clock(name, date, self.asked_s, self.headed_s)

    def pieces(self) -> Iterator[bytes]:
        """Yields the body as it comes. Raises Unanswered past the deadline or the limit."""
        total = 0
        try:
            while piece := self._next():
                total += len(piece)
                if total > BODY_BYTES_MAX:
                    raise Unanswered(f"its answer is longer than {BODY_BYTES_MAX >> 20} MiB")
                yield piece
        except (OSError, http.client.HTTPException) as error:
            raise Unanswered(_why(error, "", self._timeout_s)) from None

    def _next(self) -> bytes:
        left_s = self._deadline_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        if self._connection.sock is not None:
            self._connection.sock.settimeout(left_s)
        return self._response.read1(_CHUNK_BYTES)

    def __enter__(self) -> "Exchange":
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()


def date_clock(name: str, date: str, asked_s: float, answered_s: float) -> Clock | None:
    """Returns what a Date header says of a clock; None if it says nothing.

    It counts whole seconds, and servers write it anew now and then, not for each answer.
    """
    try:
        told_s = email.utils.parsedate_to_datetime(date).timestamp()
    except (ValueError, TypeError):
        return None
    return Clock(name, told_s - answered_s, told_s + 1 - (asked_s - DATE_AGE_MAX_S))


def _why(error: Exception, scheme: str, timeout_s: float) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        if "expired" in error.verify_message:
            return "its certificate has expired; renew it"
        return f"its certificate is not trusted ({error.verify_message}); give its authority's"
    if isinstance(error, ssl.SSLError):
        return "it speaks no TLS; give http://"
    if isinstance(error, TimeoutError):
        return f"no answer within {timeout_s:g} s"
    if isinstance(error, http.client.RemoteDisconnected | ConnectionResetError):
        hint = "; if it has a certificate, give https://" if scheme == "http" else ""
        return f"it closed the connection{hint}"
    if isinstance(error, http.client.HTTPException):
        return f"what answers there is no HTTP server ({type(error).__name__})"
    return getattr(error, "strerror", None) or str(error)
