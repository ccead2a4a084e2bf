"""`kvturn` run to its end: each time a process of its own, with real streams and exit code.

It is forked from one that has imported all commands already, because a Python that starts and
imports gRPC takes longer than most commands do.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import socket
import subprocess
import sys
import tempfile
from typing import Any, NamedTuple

GUARD_S = 120
_QUESTION_BYTES_MAX = 1 << 17


class Done(NamedTuple):
    """A command that has ended."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        """What it printed, as JSON."""
        return json.loads(self.out)


def kvturn(*arguments: str, stdin: str = "", **variables: str) -> Done:
    """Runs `kvturn` to its end, with more variables in its environment."""
    question = {"arguments": arguments, "environment": {**os.environ, **variables}}
    with contextlib.ExitStack() as stack:
        streams = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(3)]
        streams[0].write(stdin.encode())
        streams[0].seek(0)
        forker = _forker()
        numbers = [stream.fileno() for stream in streams]
        socket.send_fds(forker, [json.dumps(question).encode()], numbers)
        code = int(forker.recv(16))
        out, err = (os.pread(number, os.fstat(number).st_size, 0) for number in numbers[1:])
    return Done(code, out.decode(), err.decode())


async def kvturn_beside(*arguments: str, stdin: str = "", **variables: str) -> Done:
    """As `kvturn`, while the event loop goes on."""
    return await asyncio.to_thread(kvturn, *arguments, stdin=stdin, **variables)


@functools.cache
def _forker() -> socket.socket:
    """Starts the process that commands are forked from; it ends when this one does."""
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.settimeout(GUARD_S)
    command = [sys.executable, __file__, str(its.fileno())]
    process = subprocess.Popen(command, pass_fds=[its.fileno()])
    its.close()

    def end() -> None:
        ours.close()
        process.wait()

    atexit.register(end)
    return ours


def _fork_commands(asker: socket.socket) -> list[str] | None:
    """Answers each question with an exit code; returns None once there are no more.

    Returns the arguments of its command in each child.
    """
    while True:
        data, numbers, _, _ = socket.recv_fds(asker, _QUESTION_BYTES_MAX, 3)
        if not data:
            return None
        pid = os.fork()
        if pid == 0:
            asker.close()
            question = json.loads(data)
            os.environ.clear()
            os.environ.update(question["environment"])
            for number, own in enumerate(numbers):
                os.dup2(own, number)
        for own in numbers:
            os.close(own)
        if pid == 0:
            return list(question["arguments"])
        _, status = os.waitpid(pid, 0)
        asker.send(str(os.waitstatus_to_exitcode(status)).encode())


if __name__ == "__main__":
    from kvturn_cli.__main__ import COMMANDS, main

    for module, _, _ in COMMANDS.values():
        importlib.import_module(module)
    # Or else the end of each child goes through all of this memory, and so copies it.
    gc.collect()
    gc.freeze()
    # Threads do not live on in a child, and what they held stays locked there.
    assert len(os.listdir("/proc/self/task")) == 1  # noqa: PTH208
    asked = _fork_commands(socket.socket(fileno=int(sys.argv[1])))
    sys.exit(None if asked is None else main(asked))
