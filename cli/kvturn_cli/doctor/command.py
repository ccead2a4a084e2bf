"""`kvturn doctor`: checks a deployment, and tells what keeps turns from reusing KV."""

import argparse
import asyncio
import json
import os
import ssl
import sys
from pathlib import Path

from rich.text import Text

from kvturn.lease_access import LeaseAccess, lease_access
from kvturn.tls import TlsFiles, trusting
from kvturn.watched import FileFault, read_file
from kvturn_cli import run_state
from kvturn_cli.arguments import Parser, base_url, endpoints, seconds
from kvturn_cli.checkout import default_run_dir
from kvturn_cli.console import ConsoleProgress, make_console
from kvturn_cli.doctor.diagnosis import diagnose
from kvturn_cli.doctor.examination import Scope, examine
from kvturn_cli.doctor.finding import Severity
from kvturn_cli.doctor.probes.collector import CollectorAccess
from kvturn_cli.doctor.probes.router import RouterAccess
from kvturn_cli.doctor.report import document, lines
from kvturn_cli.interrupts import cancelled_by_signals
from kvturn_lease import config as lease_config
from kvturn_lease.etcd.config import EtcdConfig

USUAL_ROUTER = "http://127.0.0.1:8000"
EXIT_OK, EXIT_PROBLEM, EXIT_USAGE, EXIT_INTERRUPTED = 0, 1, 2, 130
COLOURS = {Severity.OK: "green", Severity.WARNING: "yellow", Severity.PROBLEM: "red"}


class UsageError(Exception):
    """A flag is wrong; the message names it and the fix, in one line."""


def main(argv: list[str]) -> int:
    """Runs `kvturn doctor`. Returns 0 without problems, 1 with, 2 for wrong flags."""
    args = parser().parse_args(argv)
    try:
        scope = scope_of(args)
    except UsageError as error:
        print(f"kvturn doctor: {error}", file=sys.stderr)
        return EXIT_USAGE
    return asyncio.run(run(scope, as_json=args.json))


def parser() -> Parser:
    """Returns the parser of `kvturn doctor`."""
    made = Parser(
        "kvturn doctor",
        "Checks a deployment: every finding says what was seen, why it matters and the fix. It ends"
        " by driving two turns of a conversation of its own. Exits 0 without problems, 1 with.",
    )
    add = made.add_argument
    add(
        "--router",
        type=base_url,
        default=None,
        help=f"router; default: kvturn up's, or {USUAL_ROUTER}",
    )
    add("--run-dir", type=Path, default=default_run_dir(), help="the run folder given to kvturn up")
    add("--api-key", default="", help="API key of a client, for the two turns")
    add("--admin-key", default="", help="operator's key, where clients need keys")
    add("--ca", type=Path, default=None, help="authorities of an https router; else the system's")
    add(
        "--engine-ca",
        type=Path,
        default=None,
        help="authorities of https engines; else the system's",
    )
    add(
        "--lease",
        type=endpoints,
        default=(),
        metavar="HOST:PORT[,...]",
        help="lease services; default: the router's",
    )
    for name, about in (
        ("lease-ca", "authorities of the lease service; turns TLS to it on"),
        ("lease-cert", "our certificate for the lease service"),
        ("lease-key", "its key"),
        ("lease-token-file", "token of a router or an operator that we show it"),
    ):
        add(f"--{name}", type=Path, default=None, metavar="FILE", help=about)
    add(
        "--etcd",
        type=lambda text: endpoints(text.removeprefix("etcd://")),
        default=(),
        metavar="HOST:PORT[,...]",
        help="etcd; default: the lease service's",
    )
    for name, about in (
        ("etcd-ca", "authorities of etcd; turns TLS to it on"),
        ("etcd-cert", "our certificate for etcd"),
        ("etcd-key", "its key"),
        ("etcd-password-file", "password of --etcd-user"),
    ):
        add(f"--{name}", type=Path, default=None, metavar="FILE", help=about)
    add("--etcd-user", default="", help="user to log in to etcd as")
    add(
        "--otlp",
        type=base_url,
        default=None,
        help="collector, http://HOST:PORT; default: the router's",
    )
    add(
        "--from-here",
        action="store_true",
        help="this machine stands for the engines': what it cannot reach counts as a problem",
    )
    add("--no-turns", action="store_true", help="drives no turns")
    add("--model", default="", help="model of the turns; default: the first that is served")
    add("--timeout", type=seconds, default=3.0, help="of each question, s")
    add("--turn-timeout", type=seconds, default=120.0, help="of each turn, s")
    add("--json", action="store_true", help="prints one JSON object")
    return made


# --- Flags ---------------------------------------------------------------------------------------


def scope_of(args: argparse.Namespace) -> Scope:
    """Returns what the flags ask for. Raises UsageError."""
    state = run_state.read(args.run_dir)
    url = args.router or (state.router_url if state and state.ready else USUAL_ROUTER)
    access = RouterAccess(url, args.api_key, args.admin_key, _tls("--ca", args.ca))
    etcd_access = _etcd(args)
    return Scope(
        access,
        lease=args.lease,
        lease_access=_lease_access(args),
        etcd=etcd_access if etcd_access.endpoints else None,
        etcd_access=etcd_access,
        otlp=args.otlp or "",
        collector_access=_collector_access(),
        engine_tls=_tls("--engine-ca", args.engine_ca),
        from_here=args.from_here,
        turns=not args.no_turns,
        model=args.model,
        timeout_s=args.timeout,
        turn_timeout_s=args.turn_timeout,
    )


def _tls(flag: str, ca: Path | None) -> ssl.SSLContext | None:
    try:
        return trusting(flag, ca)
    except FileFault as fault:
        raise UsageError(str(fault)) from None


def _collector_access() -> CollectorAccess:
    try:
        return CollectorAccess(os.environ)
    except FileFault as fault:
        raise UsageError(str(fault)) from None


def _lease_access(args: argparse.Namespace) -> LeaseAccess:
    settings = ("--lease-cert", "--lease-key", "--lease-ca")
    files = TlsFiles(args.lease_cert, args.lease_key, args.lease_ca, settings)
    try:
        return lease_access(files, args.lease_token_file, "--lease-token-file")
    except FileFault as fault:
        raise UsageError(str(fault)) from None


def _etcd(args: argparse.Namespace) -> EtcdConfig:
    """Returns how to reach etcd; without endpoints where they are to be learned."""
    if bool(args.etcd_user) != bool(args.etcd_password_file):
        raise UsageError("--etcd-user and --etcd-password-file go together")
    file: Path | None = args.etcd_password_file
    try:
        files = lease_config.etcd_files(args.etcd_cert, args.etcd_key, args.etcd_ca)
        password = b"" if file is None else read_file("--etcd-password-file", file)
    except (lease_config.ConfigError, FileFault) as fault:
        raise UsageError(str(fault)) from None
    return EtcdConfig(
        endpoints=args.etcd,
        ca_file=files.ca,
        cert_file=files.cert,
        key_file=files.key,
        user=args.etcd_user,
        password=password.decode(errors="replace").rstrip("\r\n"),
    )


# --- The run -------------------------------------------------------------------------------------


async def run(scope: Scope, *, as_json: bool) -> int:
    """Examines, prints, and returns the exit code."""
    console = make_console()
    progress = ConsoleProgress(console)
    try:
        with cancelled_by_signals():
            facts = await examine(scope, (lambda _: None) if as_json else progress.waiting)
    except asyncio.CancelledError:
        print("kvturn doctor: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    finally:
        progress.clear()
    findings = list(diagnose(facts))
    if as_json:
        print(json.dumps(document(facts, findings), indent=1))
    else:
        for line, severity in lines(findings):
            style = "bold" if severity is None else COLOURS[severity]
            console.print(Text(line, style=style), soft_wrap=True)
    bad = any(finding.severity == Severity.PROBLEM for finding in findings)
    return EXIT_PROBLEM if bad else EXIT_OK
