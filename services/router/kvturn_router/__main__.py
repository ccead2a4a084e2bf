"""Starts one router: `kvturn router` or `python -m kvturn_router`."""

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
import shutil
import socket
import sys
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from importlib.metadata import version

import uvloop

from kvturn.address import EngineAddress, address_of
from kvturn.clock import boottime_ns
from kvturn.hangup import on_hangup
from kvturn.keys import watched_keys
from kvturn.lease_access import lease_access
from kvturn.lease_channels import LeaseChannels
from kvturn.metrics import Page
from kvturn.open_files import raise_limit
from kvturn.recognition import Recognition, minted_id
from kvturn.spelling import stray_variables, unusable
from kvturn.streams import announce, run_command
from kvturn.tls import ClientTls, ServerTls
from kvturn.tracing import Tracing
from kvturn.watched import warn_of_open_secrets
from kvturn_router.choice.costs import Costs
from kvturn_router.config import ConfigError, RouterConfig, parse_config
from kvturn_router.engines.admission import Admission
from kvturn_router.engines.engine import DECODE, PREFILL, Engine
from kvturn_router.engines.engine_key import EngineKey
from kvturn_router.engines.fleet import FLAGS, Fleet
from kvturn_router.engines.health import Health
from kvturn_router.engines.health_watch import HealthWatch
from kvturn_router.engines.waiting import WaitingRoom
from kvturn_router.front.body_budget import BodyBudget
from kvturn_router.front.engines_front import EnginesFront
from kvturn_router.front.gate import QUESTIONS_MAX, Gate
from kvturn_router.front.grpc_front import GrpcFront, RouterServicer
from kvturn_router.front.http_front import HttpFront
from kvturn_router.front.http_wire import Listener, WireLimits
from kvturn_router.front.metrics_front import MetricsFront
from kvturn_router.front.overview_front import OverviewFront
from kvturn_router.front.settings_front import SettingsFront
from kvturn_router.front.viewers import Viewers
from kvturn_router.leases.conversation_book import ConversationBook
from kvturn_router.leases.lease_client import LeaseClient
from kvturn_router.leases.router_session import RouterSession
from kvturn_router.metrics import FAMILIES, LOOP_LAG, RouterMetrics
from kvturn_router.request.intake import Intake
from kvturn_router.request.keys import ApiKeys
from kvturn_router.server import ListenError, RouterServer
from kvturn_router.telemetry.turn_trace import TurnTracer, make_tracing
from kvturn_router.turn.forward import Forwarder, LeaseReuse, TurnLimits
from kvturn_router.turn.legs import Legs, RequestIds
from kvturn_router.turn.recent_turns import RecentTurns
from kvturn_router.turn.stock import HandleBook
from kvturn_router.turn.stock_reuse import StockReuse
from kvturn_router.worker_pages import WorkerPages, WorkerPlace
from kvturn_router.worker_pulse import beat
from kvturn_router.workers import HeldPort, StartFault, Workers

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2

_FAULTS_MAX = 5
"""Turns in a row that an engine fails until it is out for a while."""
_GOLDEN_RATIO = 0.618034
# glibc's numbers for settings of malloc.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3


def main(argv: Sequence[str] | None = None) -> int:
    """Runs until SIGTERM or SIGINT. Returns the exit code; a fault is one line on stderr."""
    arguments = sys.argv[1:] if argv is None else argv
    if problem := unusable(arguments, os.environ):
        print(f"kvturn router: {problem}", file=sys.stderr)
        return EXIT_USAGE
    return run_command("kvturn router", lambda: run(arguments))


def run(argv: Sequence[str], place: WorkerPlace | None = None) -> int:
    """Runs a router, or the workers of one; as `main`.

    `place` is which of several workers it is, which share their ports; None if it is alone.
    """
    try:
        config = parse_config(argv)
    except ConfigError as error:
        print(f"kvturn router: {error}", file=sys.stderr)
        return EXIT_USAGE
    if problem := raise_limit():
        print(f"kvturn router: {problem}", file=sys.stderr)
        return EXIT_FAILED
    who = f" worker {place.number}" if place is not None else ""
    logging.basicConfig(
        level=config.log_level.upper(),
        format=f"%(asctime)s %(levelname)s{who} %(name)s: %(message)s",
    )
    if place is None:
        _warn(config)
    try:
        if config.workers > 1:
            return asyncio.run(_supervise(config, argv))
        return _run_one(config, place)
    except ListenError as error:
        print(f"kvturn router: {error}", file=sys.stderr)
        return EXIT_FAILED


def _warn(config: RouterConfig) -> None:
    warn_of_open_secrets(config.secrets_files)
    if stray := stray_variables(os.environ):
        logging.getLogger("kvturn.router").warning("%s", stray)


def _run_one(config: RouterConfig, place: WorkerPlace | None) -> int:
    tracing = make_tracing(config.traces)
    try:
        uvloop.run(_serve(config, tracing, place))
    finally:
        tracing.shutdown()
    return EXIT_OK


async def _supervise(config: RouterConfig, argv: Sequence[str]) -> int:
    http = HeldPort(config.host, config.port)
    grpc = None if config.grpc_port is None else HeldPort(config.host, config.grpc_port)
    arguments = [*argv, "--workers=1", f"--port={http.port}"]
    if grpc is not None:
        arguments.append(f"--grpc-port={grpc.port}")
    folder = _pages_folder()
    grace_s = config.drain_notice_s + config.grace_s
    workers = Workers(config.workers, arguments, grace_s, folder)
    stop = _stop_on_signals()
    try:
        return EXIT_OK if await workers.run(stop) else EXIT_FAILED
    except StartFault as fault:
        if fault.status is None or fault.status < 0:  # else the worker has said why
            print(f"kvturn router: {fault}", file=sys.stderr)
        return max(fault.status or 0, EXIT_FAILED)
    finally:
        _ignore_signals()
        if folder:
            shutil.rmtree(folder, ignore_errors=True)
        for held in (http, grpc):
            if held is not None:
                held.close()


def _pages_folder() -> str:
    """Returns a new folder that nobody else can look into, "" if there can be none."""
    try:
        return tempfile.mkdtemp(prefix="kvturn-")
    except OSError as error:
        logging.getLogger("kvturn.router").warning(
            "no folder for the workers' metrics, so each tells of itself alone: %s", error
        )
        return ""


def _stop_on_signals() -> asyncio.Event:
    """Returns an event that SIGTERM and SIGINT set, however often they come."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def set_stop(*_: object) -> None:
        loop.call_soon_threadsafe(stop.set)

    for number in (signal.SIGTERM, signal.SIGINT):
        # Not the loop's own handlers: those end with the loop, and a second signal would kill us.
        signal.signal(number, set_stop)
    on_hangup(set_stop)
    return stop


def _ignore_signals() -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


async def _serve(config: RouterConfig, tracing: Tracing, place: WorkerPlace | None) -> None:
    stop = _stop_on_signals()
    server = compose(config, tracing, place)
    await server.start()
    _collect_rarely()
    _keep_memory()
    grpc = ""
    if server.grpc_port is not None:
        grpc = f", grpc {address_of(config.host, server.grpc_port)}"
    scheme = "http" if config.tls is None else "https"
    announce(f"router listening on {scheme}://{address_of(config.host, server.port)}{grpc}")
    beating = None if place is None else asyncio.create_task(beat())
    await stop.wait()
    logging.getLogger("kvturn.router").info(
        "draining: %d turns in flight, for up to %g s",
        server.in_flight,
        config.drain_notice_s + config.grace_s,
    )
    await server.stop()
    if beating is not None:
        beating.cancel()
    _ignore_signals()  # the last spans are still to be sent


def _collect_rarely() -> None:
    # Turns leave next to no cycles behind, and what is here now stays: with Python's own settings
    # the collector takes a tenth of a turn's time, and more the more conversations are remembered.
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 50, 50)


def _keep_memory() -> None:
    # glibc maps each block of 128 KB anew and gives free memory back at once, so that a long body
    # would be copied into fresh pages each time, which takes longer than the copies themselves.
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_MMAP_THRESHOLD, 4 << 20)
        libc.mallopt(_M_TRIM_THRESHOLD, 64 << 20)


def compose(
    config: RouterConfig, tracing: Tracing, place: WorkerPlace | None = None
) -> RouterServer:
    """Builds a router from its settings. Call on the event loop that will run it.

    `place` is which of several workers it is, None if it is alone.
    """
    shares_ports = place is not None
    fleet = _fleet(config)
    engine_key = EngineKey("--engine-api-key-file", config.engine_api_key_file)
    forwarder = _forwarder(config, fleet, engine_key, tracing)
    intake = _intake(config)
    gate = Gate(config.turns_max)
    bodies = BodyBudget(config.bodies_bytes_max)
    front = _http_front(
        config, intake, forwarder, engine_key, gate, lambda: pages.all(), shares_ports
    )
    listener = Listener(
        front.serve,
        WireLimits(config.body_bytes_max, config.head_bytes_max),
        bodies,
        None if intake.keys is None else front.admit,
    )
    grpc = _grpc(config, intake, forwarder, gate, bodies, fleet, shares_ports)
    lag = LOOP_LAG.histogram()
    metrics = RouterMetrics(forwarder, gate, bodies, listener, grpc, tracing.queue, lag)
    pages = WorkerPages(place, metrics.page)
    return RouterServer(
        config,
        listener=listener,
        fleet=fleet,
        health=HealthWatch(
            fleet,
            key=engine_key,
            interval_s=config.health_interval_s,
            timeout_s=config.health_timeout_s,
            clock_ns=boottime_ns,
        ),
        forwarder=forwarder,
        gate=gate,
        lease=forwarder.lease,
        grpc=grpc,
        pages=pages,
        lag=lag,
        shares_ports=shares_ports,
        tls=None if config.tls is None else ServerTls(config.tls),
    )


def _forwarder(
    config: RouterConfig, fleet: Fleet, engine_key: EngineKey, tracing: Tracing
) -> Forwarder:
    legs = Legs(RequestIds(), engine_key)
    room = WaitingRoom(
        roles=(DECODE, PREFILL),
        places=config.queue_places,
        patience_ns=round(config.queue_s * 1e9),
    )
    return Forwarder(
        fleet=fleet,
        admission=Admission(fleet, room, boottime_ns),
        legs=legs,
        book=ConversationBook(config.conversations_max),
        recent=RecentTurns(),
        tracer=TurnTracer(tracing.tracer, config.sampler),
        limits=TurnLimits(config.prefill_timeout_s, config.decode_timeout_s, config.read_margin_ms),
        costs=Costs(),
        thresholds=config.thresholds,
        clock_ns=boottime_ns,
        lease=_lease(config, fleet) if config.lease else None,
        stock=_stock(config, legs) if config.stock_reuse else None,
    )


def _intake(config: RouterConfig) -> Intake:
    keys = config.api_keys_file
    return Intake(
        config.tenant_header,
        _new_conversation_id,
        ApiKeys(watched_keys("--api-keys-file", keys)) if keys is not None else None,
        config.session_headers,
        boottime_ns,
    )


def _router_id() -> str:
    """Names this process, one of several workers, to the lease service."""
    return f"{socket.gethostname()[:64]}:{os.getpid()}"


def _lease(config: RouterConfig, fleet: Fleet) -> LeaseReuse:
    access = lease_access(config.lease_tls, config.lease_token_file, "--lease-token-file")
    channels = LeaseChannels(config.lease, boottime_ns, access)
    session = RouterSession(
        channels,
        router_id=_router_id(),
        question_deadline_ms=config.question_deadline_ms,
        listener=fleet,
        clock_ns=boottime_ns,
        version=version("kvturn-router"),
    )
    return LeaseReuse(session, LeaseClient(channels))


def _stock(config: RouterConfig, legs: Legs) -> StockReuse:
    handles = HandleBook(handles_max=config.stock_handles_max, ttl_ns=int(config.stock_ttl_s * 1e9))
    return StockReuse(handles, Recognition(config.conversations_max), legs, boottime_ns)


def _http_front(
    config: RouterConfig,
    intake: Intake,
    forwarder: Forwarder,
    engine_key: EngineKey,
    gate: Gate,
    pages: Callable[[], Awaitable[Mapping[str, Page]]],
    one_of_several: bool,
) -> HttpFront:
    file = config.admin_keys_file
    admin_keys = None if file is None else ApiKeys(watched_keys("--admin-keys-file", file))
    viewers = Viewers(intake, admin_keys)
    return HttpFront(
        intake=intake,
        forwarder=forwarder,
        fleet=forwarder.fleet,
        engines=EnginesFront(
            forwarder.fleet,
            admin_keys=admin_keys,
            anyone_may_see=intake.keys is None,
            one_of_several=one_of_several,
        ),
        overview=OverviewFront(
            forwarder,
            gate=gate,
            viewers=viewers,
            trace_url=config.trace_url,
            one_of_several=one_of_several,
        ),
        metrics=MetricsFront(
            FAMILIES,
            pages,
            admin_keys=admin_keys,
            anyone_may_read=intake.keys is None or config.metrics_without_key,
        ),
        settings=SettingsFront(
            config, _router_id(), admin_keys=admin_keys, anyone_may_see=intake.keys is None
        ),
        viewers=viewers,
        gate=gate,
        engine_key=engine_key,
    )


def _grpc(
    config: RouterConfig,
    intake: Intake,
    forwarder: Forwarder,
    gate: Gate,
    bodies: BodyBudget,
    fleet: Fleet,
    shares_port: bool,
) -> GrpcFront | None:
    if config.grpc_port is None:
        return None
    servicer = RouterServicer(
        intake=intake,
        forwarder=forwarder,
        gate=gate,
        body_bytes_max=config.body_bytes_max,
    )
    return GrpcFront(
        servicer,
        fleet,
        bodies,
        keys=intake.keys,
        calls_max=config.turns_max + QUESTIONS_MAX,
        body_bytes_max=config.body_bytes_max,
        head_bytes_max=config.head_bytes_max,
        shares_port=shares_port,
    )


def _fleet(config: RouterConfig) -> Fleet:
    tls = ClientTls(config.engine_tls)
    interval_ns = round(config.health_interval_s * 1e9)

    def build(address: EngineAddress, number: int) -> Engine:
        health = Health(
            interval_ns=interval_ns,
            failures_max=config.health_failures_max,
            faults_max=_FAULTS_MAX,
            # Multiples of the golden ratio lie evenly, however many there are.
            phase=number * _GOLDEN_RATIO % 1,
            now_ns=boottime_ns(),
        )
        return Engine(
            address,
            health=health,
            connect_timeout_s=config.connect_timeout_s,
            in_flight_max=config.engine_turns_max,
            tls=tls,
        )

    fleet = Fleet(build, boottime_ns)
    for role, addresses in ((PREFILL, config.prefills), (DECODE, config.decodes)):
        for address in addresses:
            fleet.add(address.url, role, FLAGS)
    return fleet


def _new_conversation_id(scope: str) -> str:
    return minted_id(scope, secrets.token_hex(16))


if __name__ == "__main__":
    sys.exit(main())
