"""The command line `kvturn`: one sub-command per module, imported only when it is called."""

import importlib
import os
import signal
import sys

from kvturn.spelling import meant, unusable
from kvturn.streams import run_command

COMMANDS = {
    "up": ("kvturn_cli.up", "main", "run the whole system on this machine"),
    "down": ("kvturn_cli.up", "down", "stop what kvturn up started"),
    "chat": ("kvturn_cli.chat", "main", "talk through the router; shows each turn's reuse"),
    "demo": ("kvturn_cli.demo", "main", "hold a scripted conversation and compare TTFT"),
    "top": ("kvturn_cli.top", "main", "watch engines, conversations and reuse, live"),
    "conversations": ("kvturn_cli.conversations", "main", "list conversations"),
    "turns": ("kvturn_cli.turns", "main", "show a conversation's turns, and why each reused"),
    "leases": ("kvturn_cli.leases", "main", "list leases"),
    "engines": ("kvturn_cli.engines", "main", "list engines and their KV memory"),
    "revoke": ("kvturn_cli.revoke", "main", "end leases"),
    "drain": ("kvturn_cli.drain", "main", "send an engine no new turns, or again"),
    "router": ("kvturn_router.__main__", "main", "start one router"),
    "lease": ("kvturn_lease.__main__", "main", "start one lease service"),
    "doctor": ("kvturn_cli.doctor.command", "main", "check a deployment; says what to fix"),
    "otlp": ("kvturn_cli.otlp", "main", "receive traces and write them to a file"),
}


def main(argv: list[str] | None = None) -> int:
    """Runs the sub-command that the first argument names. Returns the exit code.

    Without `argv` the process is the command's, with the arguments of its own.
    """
    if argv is None and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # Where a command does not say otherwise Ctrl-C ends it as SIGTERM does. As an exception it
        # may come while modules are imported or an event loop is taken down, with a traceback.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    args = sys.argv[1:] if argv is None else argv
    return run_command("kvturn", lambda: _run(args))


def _run(args: list[str]) -> int:
    if not args or args[0] in ("-h", "--help", "help"):
        print(usage())
        return 0 if args else 2
    if args[0] == "--version":
        from importlib.metadata import version  # Takes longer to import than all else here.

        print(f"kvturn {version('kvturn')}")
        return 0
    if problem := unusable(args, os.environ):
        print(f"kvturn: {problem}", file=sys.stderr)
        return 2
    if args[0] not in COMMANDS:
        known = f"one of {', '.join(COMMANDS)}{meant(args[0], COMMANDS)}"
        print(f"kvturn: no command {args[0]!r}; {known}", file=sys.stderr)
        return 2
    module, function, _ = COMMANDS[args[0]]
    return int(getattr(importlib.import_module(module), function)(args[1:]) or 0)


def usage() -> str:
    """Returns the list of commands."""
    lines = [f"  {name:15}{text}" for name, (_, _, text) in COMMANDS.items()]
    head = "usage: kvturn COMMAND [--help]\n\nKV reuse across turns for prefill/decode serving.\n"
    return "\n".join([head, *lines])


if __name__ == "__main__":
    sys.exit(main())
