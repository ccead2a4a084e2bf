"""Starts one lease service: `kvturn lease` or `python -m kvturn_lease`."""

from __future__ import annotations

import signal

if __name__ == "__main__":
    # As an exception Ctrl-C would end in a traceback while all of the following is imported.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import asyncio
import ctypes
import gc
import logging
import os
import secrets
import sys
from typing import TYPE_CHECKING

import uvloop

from kvturn.address import address_of, is_loopback
from kvturn.clock import boottime_ns
from kvturn.hangup import on_hangup
from kvturn.keys import watched_keys
from kvturn.open_files import raise_limit
from kvturn.spelling import stray_variables, unusable
from kvturn.streams import announce, run_command
from kvturn.watched import warn_of_open_secrets
from kvturn_lease.callers import Callers
from kvturn_lease.config import ConfigError, LeaseConfig, parse_config
from kvturn_lease.election import Election
from kvturn_lease.etcd.client import EtcdClient
from kvturn_lease.etcd_leases import EtcdLeases
from kvturn_lease.etcd_records import Keys
from kvturn_lease.etcd_store import EtcdStore
from kvturn_lease.lessor import Lessor
from kvturn_lease.metrics import LeaseMetrics
from kvturn_lease.metrics_listener import MetricsListener
from kvturn_lease.office import LeaderOffice, new_term
from kvturn_lease.outages import Outages
from kvturn_lease.server import LeaseServer, ListenError
from kvturn_lease.servicer import LeaseServicer
from kvturn_lease.store import MemoryStore
from kvturn_lease.telemetry import make_tracing

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvturn.tracing import Tracing
    from kvturn_lease.etcd.config import EtcdConfig
    from kvturn_lease.etcd_store import Fence

_SPANS_S = 0.5
"""How long the last spans may take to go out."""
_M_MMAP_THRESHOLD = -3  # malloc.h
_MMAP_THRESHOLD_BYTES = 64 * 1024

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Runs until SIGTERM or SIGINT. Returns the exit code; a fault is one line on stderr."""
    arguments = sys.argv[1:] if argv is None else argv
    if problem := unusable(arguments, os.environ):
        print(f"kvturn lease: {problem}", file=sys.stderr)
        return EXIT_USAGE
    return run_command("kvturn lease", lambda: _run(arguments))


def _run(arguments: Sequence[str]) -> int:
    try:
        config = parse_config(arguments, os.environ)
    except ConfigError as error:
        print(f"kvturn lease: {error}", file=sys.stderr)
        return EXIT_USAGE
    if problem := raise_limit():
        print(f"kvturn lease: {problem}", file=sys.stderr)
        return EXIT_FAILED
    logging.basicConfig(
        level=config.log_level, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    if stray := stray_variables(os.environ):
        logging.getLogger("kvturn.lease").warning("%s", stray)
    # Leases are many, long-lived and free of reference cycles; walking all of them whenever
    # their number has grown by a quarter would hold up questions for tens of milliseconds.
    gc.set_threshold(10_000, 20, 1_000)
    _return_large_messages()
    try:
        uvloop.run(_serve(config))
    except ListenError as error:
        print(f"kvturn lease: {error}", file=sys.stderr)
        return EXIT_FAILED
    return EXIT_OK


def _return_large_messages() -> None:
    """Lets glibc give the memory of large messages back to the system as soon as they are done.

    Left to itself it raises the threshold with the first inventory of tens of megabytes, and
    leases then lie scattered among what was freed.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # glibc's; another C library does as it does
        mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_BYTES)


async def _serve(config: LeaseConfig) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        # Not the loop's own handlers: those end with the loop, and a second signal would kill us.
        signal.signal(number, lambda *_: loop.call_soon_threadsafe(stop.set))
    on_hangup(lambda: loop.call_soon_threadsafe(stop.set))
    tracing = make_tracing(config.traces)
    callers = callers_of(config)
    servicer = LeaseServicer(config, None, None, boottime_ns, tracing, callers)
    server = LeaseServer(config, servicer, tracing, callers)
    if config.etcd is None:
        servicer.lead(Lessor(config.lessor, new_term(), tally=servicer.tally), MemoryStore())
    listener = _metrics_listener(config, servicer, tracing)
    metrics = "" if listener is None else f", metrics {await _start(listener, config)}"
    port = await server.start()
    announce(f"lease service listening on {address_of(config.host, port)}{metrics}")
    if config.etcd is None:
        await stop.wait()
    else:
        address = config.advertise or address_of(config.host, port)
        await _stand_for_election(config, config.etcd, servicer, server, address, stop)
    await server.stop()
    if listener is not None:
        await listener.stop()
    await asyncio.to_thread(tracing.shutdown, _SPANS_S)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


def _metrics_listener(
    config: LeaseConfig, servicer: LeaseServicer, tracing: Tracing
) -> MetricsListener | None:
    if config.metrics_port is None:
        return None
    metrics = LeaseMetrics(servicer, boottime_ns, tracing.queue)
    return MetricsListener(metrics, config.metrics_host or config.host, config.metrics_port)


async def _start(listener: MetricsListener, config: LeaseConfig) -> str:
    """Starts it; returns where its metrics are. Raises ListenError."""
    port = await listener.start()
    return f"http://{address_of(config.metrics_host or config.host, port)}/metrics"


def callers_of(config: LeaseConfig) -> Callers | None:
    """Returns who may call what, None for everybody everything."""
    secrets_files = list(config.token_files.values())
    if config.tls is not None and config.tls.key is not None:
        secrets_files.append(config.tls.key)
    warn_of_open_secrets(secrets_files)
    logger = logging.getLogger("kvturn.lease")
    address = address_of(config.host, config.port)
    if config.trusts_all:
        if not is_loopback(config.host):
            logger.warning(
                "whoever reaches %s may act as an engine, a router or an operator: set"
                " --engine-tokens-file and --router-tokens-file, or --tls-client-ca",
                address,
            )
        return None
    if config.tls is None and not is_loopback(config.host):
        logger.warning("tokens come to %s unencrypted: set --tls-cert and --tls-key", address)
    tokens = {
        role: watched_keys(f"--{role}-tokens-file", file)
        for role, file in config.token_files.items()
    }
    certificates = config.tls is not None and config.tls.ca is not None
    return Callers(tokens, certificates=certificates)


async def _stand_for_election(
    config: LeaseConfig,
    etcd: EtcdConfig,
    servicer: LeaseServicer,
    server: LeaseServer,
    address: str,
    stop: asyncio.Event,
) -> None:
    """Leads whenever elected in etcd, until `stop`; then hands over."""
    logger = logging.getLogger("kvturn.lease")
    if not config.secret:
        logger.warning(
            "no --secret-file: after a failover verdicts know less, because the next leader"
            " cannot tell which records are whose"
        )
    client = EtcdClient(etcd)
    outages = Outages(logger)
    keys = Keys(etcd.prefix, config.secret or secrets.token_bytes(32))

    def open_store(fence: Fence) -> EtcdStore:
        return EtcdStore(
            client,
            keys,
            fence,
            EtcdLeases(config.records_ttl_s),
            outages,
            conversations_max=config.lessor.conversations_max,
            on_fenced=election.over.set,
            tally=servicer.tally,
        )

    office = LeaderOffice(config.lessor, servicer, server, boottime_ns, open_store)
    election = Election(
        client,
        office,
        outages,
        boottime_ns,
        key=keys.leader,
        address=address,
        ttl_s=config.leadership_ns // 1_000_000_000,
        tally=servicer.tally,
    )
    running = asyncio.create_task(election.run())
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({running, stopping}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopping.cancel()
        running.cancel()
        await asyncio.wait({running})
        await client.close()
    if not running.cancelled():
        running.result()


if __name__ == "__main__":
    sys.exit(main())
