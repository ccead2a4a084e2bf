"""The least that a grpc.aio server can cost: it answers every BeginRead with the same bytes.

    python -m bench.lease.echo --points 64

The bytes are as many as a granted read's; nothing is parsed, looked up or written.
"""

from __future__ import annotations

import argparse
from typing import Any

import grpc
import uvloop

from bench.lease.workload import begin_read_answer

_SERVICE = "kvturn.v1.LeaseService"


async def _serve(points: int) -> None:
    answer = begin_read_answer(points)

    async def echo(_: bytes, __: Any) -> bytes:
        return answer

    handlers = {"BeginRead": grpc.unary_unary_rpc_method_handler(echo)}
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(f"echo listening on 127.0.0.1:{port}", flush=True)
    await server.wait_for_termination()


def main() -> None:
    """Serves until it is killed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--points", type=int, default=64)
    uvloop.run(_serve(parser.parse_args().points))


if __name__ == "__main__":
    main()
