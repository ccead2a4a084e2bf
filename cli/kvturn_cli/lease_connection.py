"""How operators' commands reach the lease service: flags, who to ask, what to say if it is silent.

The flags' variables are shared by all of these commands: --lease-ca of each is
KVTURN_OPERATOR_LEASE_CA.
"""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Self, TypeVar

import grpc
import grpc.aio

from kvturn.clock import boottime_ns
from kvturn.lease_access import LeaseAccess, lease_access
from kvturn.lease_channels import LeaseChannels, Unanswered, error_info
from kvturn.tls import TlsFiles
from kvturn.watched import FileFault
from kvturn_cli import run_state
from kvturn_cli.arguments import Parser, endpoints, seconds
from kvturn_cli.checkout import default_run_dir

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from kvturn.v1.lease_pb2_grpc import LeaseServiceAsyncStub

Q = TypeVar("Q")
A = TypeVar("A")

VARIABLES = "KVTURN_OPERATOR_"
DEFAULT_ENDPOINT = "127.0.0.1:7600"
TIMEOUT_S = 5.0


class NoAnswer(Exception):
    """The lease service did not do what it was asked; the message says what to do, in a line."""


class Refused(NoAnswer):
    """The leader refuses the question itself."""

    def __init__(self, reason: str, message: str) -> None:
        """`reason` is the error's, as in lease.proto."""
        super().__init__(message)
        self.reason = reason


def add_flags(parser: Parser) -> None:
    """Adds the flags that say which lease service, and who asks."""
    add = parser.add_argument
    add(
        "--lease",
        type=endpoints,
        default=None,
        metavar="HOST:PORT[,...]",
        help="lease service, all its processes; default: the one of kvturn up, or"
        f" {DEFAULT_ENDPOINT}",
    )
    add("--run-dir", type=Path, default=default_run_dir(), help="the run folder given to kvturn up")
    add("--lease-ca", type=Path, metavar="FILE", help="its certificate's authorities; turns TLS on")
    add("--lease-cert", type=Path, metavar="FILE", help="our certificate, where it asks for one")
    add("--lease-key", type=Path, metavar="FILE", help="the key of our certificate")
    add("--lease-token-file", type=Path, metavar="FILE", help="file with an operator's token")
    add("--timeout", type=seconds, default=TIMEOUT_S, metavar="S", help="wait for an answer, s")


class LeaseConnection:
    """A connection to whoever leads; to be used as `async with`, on one event loop."""

    def __init__(self, named: tuple[str, ...], access: LeaseAccess, timeout_s: float) -> None:
        self.named = named
        """The endpoints, in the order given."""
        self.timeout_s = timeout_s
        self._access = access
        self._channels: LeaseChannels
        self._probes: asyncio.Task[None]

    @classmethod
    def of(cls, parser: Parser, args: argparse.Namespace) -> Self:
        """Returns the connection that the flags ask for; refuses files that cannot be used."""
        files = TlsFiles(
            args.lease_cert,
            args.lease_key,
            args.lease_ca,
            ("--lease-cert", "--lease-key", "--lease-ca"),
        )
        try:
            access = lease_access(files, args.lease_token_file, "--lease-token-file")
        except FileFault as fault:
            parser.error(str(fault))
        return cls(args.lease or _of_up(args.run_dir), access, args.timeout)

    @property
    def where(self) -> str:
        """The endpoints, as they are shown."""
        return ",".join(self.named)

    async def __aenter__(self) -> Self:
        # Nobody asks a second time here: a slow connection may take all of the time, and more, so
        # that it is the question's own end that tells.
        connect_s = 2 * self.timeout_s
        self._channels = LeaseChannels(self.named, boottime_ns, self._access, connect_s)
        self._probes = asyncio.create_task(self._channels.run())
        if len(self.named) > 1:
            # Whom to ask first: a frozen process would cost the whole timeout.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.timeout_s / 2):
                    await self._channels.another_leads("")
        return self

    async def __aexit__(self, *_: object) -> None:
        self._probes.cancel()
        await asyncio.gather(self._probes, return_exceptions=True)
        await self._channels.close()

    async def ask(
        self,
        rpc: Callable[[LeaseServiceAsyncStub], grpc.aio.UnaryUnaryMultiCallable[Q, A]],
        question: Q,
    ) -> A:
        """Returns the leader's answer, within the timeout. Raises NoAnswer, or its kind Refused."""
        try:
            return await self._channels.ask(rpc, question, timeout_s=self.timeout_s)
        except Unanswered as error:
            raise NoAnswer(self._silence(str(error))) from None
        except grpc.aio.AioRpcError as error:
            reason, _ = error_info(error)
            if error.code() in (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.INVALID_ARGUMENT):
                raise Refused(reason, error.details() or "") from None
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                raise NoAnswer(
                    f"the lease service at {self.where} does not know this question;"
                    " run one of this version"
                ) from None
            told = self._channels.problem(error)
            raise NoAnswer(f"no answer from the lease service at {self.where}: {told}") from None

    def _silence(self, why: str) -> str:
        return (
            f"no answer from the lease service at {self.where}: {why};"
            " start it (kvturn up, kvturn lease), or give --lease HOST:PORT"
        )


def _of_up(run_dir: Path) -> tuple[str, ...]:
    state = run_state.read(run_dir)
    if state is None or not state.lease_address or not state.holder.is_running():
        return (DEFAULT_ENDPOINT,)
    return (state.lease_address,)
