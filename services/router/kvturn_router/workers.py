"""Several processes of one router, all on one HTTP port and one gRPC port.

The parent holds the ports, starts the workers and looks after them; it serves nothing itself. The
kernel shares connections out among the workers that listen, so one that is starting or dead gets
none. Workers know nothing of each other: with a lease service they are to it what replicas are.
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Sequence
from typing import Final

from kvturn.streams import announce
from kvturn_router.server import cannot_listen
from kvturn_router.worker_pulse import STILL_S, until_still

logger = logging.getLogger("kvturn.router.workers")

_START_S: Final = 60.0
"""Longest that a worker may take until it listens."""
_END_S: Final = 10.0
"""How much longer than the grace a worker may take to end."""
_PAUSE_MIN_S: Final = 0.2
_PAUSE_MAX_S: Final = 10.0
_SETTLED_S: Final = 30.0
"""A worker that lived so long is started again at once."""


class StartFault(Exception):
    """Not all workers came to listen. `status` is the exit status of the one that ended, if any."""

    def __init__(self, problem: str, status: int | None = None) -> None:
        super().__init__(problem)
        self.status = status


class HeldPort:
    """A port of all addresses of a host, that workers can share and nobody else can take.

    A socket is bound to it for as long as this lives and never listens, so that the port stays
    ours while no worker has it. `port` 0 takes any free one.
    """

    def __init__(self, host: str, port: int) -> None:
        """Raises ListenError if the port cannot be had."""
        self.port = port
        self._sockets: list[socket.socket] = []
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            for family, kind, protocol, _, address in dict.fromkeys(found):
                self._hold(socket.socket(family, kind, protocol), address[:1], address[2:])
        except OSError as error:
            self.close()
            raise cannot_listen(host, port, error) from None

    def close(self) -> None:
        """Gives the port up."""
        for held in self._sockets:
            held.close()

    def _hold(
        self, held: socket.socket, host: tuple[object, ...], more: tuple[object, ...]
    ) -> None:
        self._sockets.append(held)
        if held.family == socket.AF_INET6:
            held.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        # First as one who does not share, which fails if anybody else has the port.
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind((*host, self.port, *more))
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        self.port = held.getsockname()[1]


class Workers:
    """Keeps `count` workers running. `arguments` are a worker's flags, its ports among them.

    `folder` is where they tell each other their metrics, "" for not.
    `grace_s` is how long a worker may serve on once it is told to end, `still_s` how long one may
    give no sign of life.
    """

    def __init__(
        self,
        count: int,
        arguments: Sequence[str],
        grace_s: float,
        folder: str = "",
        still_s: float = STILL_S,
    ) -> None:
        assert count >= 1
        self._count = count
        self._command = (
            sys.executable,
            "-P",
            "-m",
            "kvturn_router.worker",
            str(os.getpid()),
        )
        self._arguments = (folder, *arguments)
        self._grace_s = grace_s
        self._still_s = still_s
        self._running: dict[int, asyncio.subprocess.Process] = {}
        self._listening: set[int] = set()
        self._begun = False
        self._stop = asyncio.Event()

    async def run(self, stop: asyncio.Event) -> bool:
        """Runs them until `stop`; prints the line of one when all listen.

        Returns whether all ended in order. Raises StartFault if one never listened.
        """
        self._stop = stop
        keepers = [asyncio.create_task(self._keep(number)) for number in range(self._count)]
        stopping = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait([stopping, *keepers], return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()
            stop.set()
            self._tell(signal.SIGTERM)
            _, late = await asyncio.wait(keepers, timeout=self._grace_s + _END_S)
            if late:
                logger.error("%d workers did not end in time and are killed", len(late))
                self._tell(signal.SIGKILL)
        return all(await asyncio.gather(*keepers)) and not late

    def _tell(self, number: signal.Signals) -> None:
        for process in self._running.values():
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(number)

    async def _keep(self, number: int) -> bool:
        """Has one worker run, and another in its place when it dies; tells how the last ended."""
        clock = asyncio.get_running_loop().time
        pause_s = 0.0
        while True:
            began = clock()
            try:
                process = await self._start(number)
            except OSError as error:  # no room for one more process, say
                if not self._begun:
                    raise StartFault(f"a worker cannot be started: {error}") from None
                happened = f"cannot be started: {error}"
            else:
                status = await self._end_of(number, process)
                if self._stop.is_set():
                    # The signal may have come before the worker knew what to do with it.
                    return status in (0, -signal.SIGTERM)
                if not self._begun:
                    problem = f"a worker {_ending(status)} before all listened"
                    raise StartFault(problem, status)
                happened = f"(pid {process.pid}) {_ending(status)}"
            settled = clock() - began > _SETTLED_S
            pause_s = 0.0 if settled else min(max(2 * pause_s, _PAUSE_MIN_S), _PAUSE_MAX_S)
            logger.warning(
                "worker %d %s; another takes its place in %g s", number + 1, happened, pause_s
            )
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._stop.wait()
            if self._stop.is_set():
                return True

    async def _start(self, number: int) -> asyncio.subprocess.Process:
        """Starts a worker. Raises OSError."""
        return await asyncio.create_subprocess_exec(
            *self._command,
            str(number + 1),
            *self._arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            # A terminal's Ctrl-C goes to the parent alone: a worker that is only starting does not
            # know yet what to do with it.
            process_group=0,
        )

    async def _end_of(self, number: int, process: asyncio.subprocess.Process) -> int:
        """Looks after a worker until it has ended; returns its exit status."""
        self._running[number] = process
        await self._until_it_listens(number, process)
        watching = asyncio.create_task(self._end_if_still(number, process))
        status = await process.wait()
        watching.cancel()
        del self._running[number]
        return status

    async def _until_it_listens(self, number: int, process: asyncio.subprocess.Process) -> None:
        """Waits for the line that a router prints when it listens, or for its end."""
        if self._stop.is_set():
            process.terminate()
        assert process.stdout is not None
        try:
            async with asyncio.timeout(_START_S):
                line = await process.stdout.readline()
        except TimeoutError:
            logger.error("worker %d did not listen within %g s", number + 1, _START_S)
            process.kill()
            return
        if not line:
            return
        self._listening.add(number)
        if not self._begun and len(self._listening) == self._count:
            self._begun = True
            announce(line.decode().rstrip())

    async def _end_if_still(self, number: int, process: asyncio.subprocess.Process) -> None:
        """Kills a worker that no longer answers; at the end the grace bounds how long it may."""
        assert process.stdout is not None
        if await until_still(process.stdout, self._still_s) and not self._stop.is_set():
            logger.error(
                "worker %d has not answered for %g s and is killed", number + 1, self._still_s
            )
            process.kill()


def _ending(status: int) -> str:
    return f"ended with status {status}" if status >= 0 else f"was ended by signal {-status}"
