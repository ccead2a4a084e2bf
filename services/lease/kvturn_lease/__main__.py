"""Starts one lease service: `kvturn lease` or `python -m kvturn_lease`."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import secrets
import signal
import sys
import time
from typing import TYPE_CHECKING

import uvloop

from kvturn_lease.config import ConfigError, LeaseConfig, parse_config
from kvturn_lease.lessor import Lessor
from kvturn_lease.server import LeaseServer, ListenError
from kvturn_lease.servicer import LeaseServicer
from kvturn_lease.store import MemoryStore
from kvturn_lease.telemetry import make_telemetry

if TYPE_CHECKING:
    from collections.abc import Sequence

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2


def boottime_ns() -> int:
    """Returns the clock of the lease rules: it goes on while the machine is suspended."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs until SIGTERM or SIGINT. Returns the exit code; a fault is one line on stderr."""
    try:
        config = parse_config(sys.argv[1:] if argv is None else argv, os.environ)
    except ConfigError as error:
        print(f"kvturn lease: {error}", file=sys.stderr)
        return EXIT_USAGE
    logging.basicConfig(
        level=config.log_level, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    # Leases are many, long-lived and free of reference cycles; walking all of them whenever
    # their number has grown by a quarter would hold up questions for tens of milliseconds.
    gc.set_threshold(10_000, 20, 1_000)
    try:
        uvloop.run(_serve(config))
    except ListenError as error:
        print(f"kvturn lease: {error}", file=sys.stderr)
        return EXIT_FAILED
    return EXIT_OK


async def _serve(config: LeaseConfig) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    store = MemoryStore()
    telemetry = make_telemetry(config.otlp_endpoint)
    lessor = Lessor(config.lessor, term=secrets.randbits(64) or 1)
    lessor.restore(await store.load(), boottime_ns())
    servicer = LeaseServicer(config, lessor, store, boottime_ns, telemetry.tracer)
    server = LeaseServer(config, servicer, telemetry)
    port = await server.start()
    print(f"lease service listening on {config.host}:{port}", flush=True)
    await stop.wait()
    await server.stop()
    await store.close()
    await telemetry.close()


if __name__ == "__main__":
    sys.exit(main())
