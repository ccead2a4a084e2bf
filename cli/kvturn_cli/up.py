"""`kvturn up`: the whole system on this machine, and `kvturn down`, which stops it."""

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from kvturn_cli import run_state
from kvturn_cli.arguments import Parser, port, positive, seconds
from kvturn_cli.checkout import (
    current_folder_problem,
    default_model,
    default_run_dir,
    default_vllm_python,
)
from kvturn_cli.console import ConsoleProgress, make_console
from kvturn_cli.engine import EngineConfig
from kvturn_cli.etcd import MEMORY
from kvturn_cli.interrupts import Interrupted, interruptible
from kvturn_cli.process import ProcessId
from kvturn_cli.run_state import AlreadyUpError, RunState
from kvturn_cli.stack import SHARED_CPU, ConfigError, Stack, StackConfig, StackError

WATCH_INTERVAL_S = 0.5
DOWN_TIMEOUT_S = 40.0


def main(argv: list[str]) -> int:
    """Runs `kvturn up`."""
    args = up_parser().parse_args(argv)
    if problem := current_folder_problem():
        return fail(problem, 2)
    if args.detach:
        return detach(args.run_dir, [arg for arg in argv if arg != "--detach"])
    try:
        with run_state.hold(args.run_dir), interruptible():
            return run(args)
    except (ConfigError, AlreadyUpError) as error:
        return fail(str(error), 2)
    except OSError as error:
        return fail(f"--run-dir {args.run_dir}: {error.strerror}", 2)
    except StackError as error:
        return fail(str(error), 1)
    except Interrupted:
        return fail("interrupted before everything was ready; all stopped", 130)


def up_parser() -> Parser:
    """Returns the parser of `kvturn up`."""
    parser = Parser(
        "kvturn up",
        "Runs lease service, router, one prefill and one decode vLLM on this machine. Every flag"
        " --some-name can also be given as the variable KVTURN_UP_SOME_NAME.",
    )
    add = parser.add_argument
    add("--model", type=Path, default=default_model(), help="model folder (any that vLLM loads)")
    add("--vllm-python", type=Path, default=default_vllm_python(), help="vLLM's interpreter")
    add("--run-dir", type=Path, default=default_run_dir(), help="folder for logs and traces")
    add("--router-port", type=port, default=8000, help="router's HTTP port; 0: any free one")
    add("--grpc-port", type=port, default=8001, help="router's gRPC port")
    add("--lease-port", type=port, default=7600, help="lease service's gRPC port")
    add("--prefill-port", type=port, default=8100, help="prefill engine's HTTP port")
    add("--decode-port", type=port, default=8200, help="decode engine's HTTP port")
    add(
        "--store",
        default=MEMORY,
        help="where leases are recorded: memory, etcd (starts the one on PATH, or of make setup),"
        " or etcd://HOST:PORT,HOST:PORT",
    )
    add("--kv-cache-gib", type=positive, default=1, help="KV memory of each engine, GiB")
    add(
        "--max-model-len",
        type=int,
        default=0,
        help="longest prompt and answer, tokens; 0: the model's, at most 8192",
    )
    add("--threads", type=int, default=0, help="threads of each engine; 0: the cores shared out")
    add(
        "--no-prefill-prefix-caching",
        action="store_true",
        help="turn prefill's own prefix caching off",
    )
    for role in ("prefill", "decode"):
        add(
            f"--{role}-arg",
            action="append",
            default=[],
            metavar="ARG",
            help=f"a vLLM flag for {role}, as --{role}-arg=--flag; repeatable",
        )
    for service in ("lease", "router"):
        add(
            f"--{service}-arg",
            action="append",
            default=[],
            metavar="ARG",
            help=f"a flag for kvturn {service}; repeatable",
        )
    add(
        "--question-deadline-ms",
        type=positive,
        default=50,
        help="how long a turn waits for the lease service before it goes on without, ms",
    )
    add(
        "--start-timeout", type=seconds, default=600.0, help="how long engines may take to start, s"
    )
    add(
        "--detach",
        action="store_true",
        help="return when everything is ready; stop with kvturn down",
    )
    return parser


def stack_config(args: argparse.Namespace) -> StackConfig:
    """Returns the stack that the flags ask for."""
    return StackConfig(
        run_dir=args.run_dir.absolute(),
        model=args.model.absolute(),
        vllm_python=args.vllm_python.absolute(),
        engines=(
            EngineConfig(
                "prefill",
                "prefill-0",
                args.prefill_port,
                tuple(args.prefill_arg),
                prefix_caching=not args.no_prefill_prefix_caching,
            ),
            EngineConfig("decode", "decode-0", args.decode_port, tuple(args.decode_arg)),
        ),
        router_port=args.router_port,
        grpc_port=args.grpc_port,
        lease_port=args.lease_port,
        router_args=tuple(args.router_arg),
        lease_args=(*SHARED_CPU, *args.lease_arg),
        store=args.store,
        kv_cache_gib=args.kv_cache_gib,
        max_model_len=args.max_model_len,
        threads=args.threads,
        question_deadline_ms=args.question_deadline_ms,
        start_timeout_s=args.start_timeout,
    )


def run(args: argparse.Namespace) -> int:
    """Runs the stack until a signal or until one of its processes ends."""
    console = make_console()
    progress = ConsoleProgress(console)
    stack = Stack(stack_config(args), progress)
    holder = ProcessId.of(os.getpid())
    assert holder is not None
    ready = False
    try:
        run_state.write(args.run_dir, RunState(holder))
        stack.start()
        children = tuple(process.id for process in stack.processes if process.id)
        run_state.write(
            args.run_dir,
            RunState(
                holder,
                children,
                True,
                stack.router_url,
                stack.served_model_name,
                stack.lease_address,
            ),
        )
        ready = True
        announce(progress, stack)
        while True:
            stack.check_alive()
            time.sleep(WATCH_INTERVAL_S)
    except Interrupted:
        progress.done("stopping")
        if not ready:
            raise
        return 0
    finally:
        progress.clear()
        stack.stop()
        run_state.remove(args.run_dir)


def announce(progress: ConsoleProgress, stack: Stack) -> None:
    """Tells where everything is."""
    progress.done(f"kvturn is up. OpenAI API: {stack.router_url}/v1, gRPC: {stack.router_grpc}")
    progress.done(f"what goes on: {stack.router_url}/ui")
    progress.done(f"model: {stack.served_model_name}; leases: {stack.lease_address}")
    if stack.store != MEMORY:
        progress.done(f"records: {stack.store}")
    progress.done(f"traces: {stack.trace_file}; logs: {stack.config.run_dir}")
    progress.done("Talk to it with kvturn chat; stop it with kvturn down, or Ctrl-C here.")


def detach(run_dir: Path, argv: list[str]) -> int:
    """Starts `kvturn up` in a session of its own and relays its lines until it is ready."""
    try:
        run_state.hold(run_dir).close()
        log = run_dir / "up.log"
        with log.open("wb") as output:
            child = subprocess.Popen(
                [sys.executable, "-m", "kvturn_cli", "up", *argv],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, "KVTURN_UP_DETACH": ""},
            )
    except AlreadyUpError as error:
        return fail(str(error), 2)
    except OSError as error:
        return fail(f"--run-dir {run_dir}: {error.strerror}", 2)
    try:
        with interruptible():
            return relay(child, log, run_dir)
    except Interrupted:
        child.terminate()
        try:
            child.wait(DOWN_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return fail(f"still stopping; see {log}, or kvturn down --run-dir {run_dir}", 1)
        return fail("interrupted before everything was ready; all stopped", 130)


def relay(child: subprocess.Popen[bytes], log: Path, run_dir: Path) -> int:
    """Copies the child's lines to our own output until it is ready or has ended."""
    with log.open() as lines:
        while True:
            status = child.poll()  # Before the lines are read, so that none is missed.
            state = run_state.read(run_dir)
            for line in lines.read().splitlines():
                print(line, file=sys.stderr if line.startswith("kvturn up:") else sys.stdout)
            sys.stdout.flush()
            if status is not None:
                return status
            if state and state.ready and state.holder.pid == child.pid:
                return 0
            time.sleep(0.1)


def fail(message: str, code: int) -> int:
    """Prints one line to stderr and returns the exit code."""
    print(f"kvturn up: {message}", file=sys.stderr, flush=True)
    return code


def down(argv: list[str]) -> int:
    """Runs `kvturn down`: stops what `kvturn up` started; fine if there is nothing."""
    parser = Parser("kvturn down", "Stops what kvturn up started.")
    parser.add_argument(
        "--run-dir", type=Path, default=default_run_dir(), help="the run folder given to kvturn up"
    )
    run_dir: Path = parser.parse_args(argv).run_dir
    state = run_state.read(run_dir)
    if state is None:
        print("kvturn is not up; nothing to stop.")
        return 0
    was_running = state.holder.is_running()
    if was_running:
        print(f"stopping what process {state.holder.pid} runs", flush=True)
    stopped = stop_run(state)
    if not stopped:
        print(
            f"kvturn down: process {state.holder.pid} does not end; kill it by hand",
            file=sys.stderr,
        )
        return 1
    run_state.remove(run_dir)
    print("kvturn is stopped." if was_running else "kvturn had already ended; nothing to stop.")
    return 0


def stop_run(state: RunState) -> bool:
    """Ends a run's processes, and no process that merely has one of their numbers.

    Each child ends by itself once the holder is gone; killing is the last resort.
    """
    state.holder.signal(signal.SIGTERM)
    if not state.holder.wait(DOWN_TIMEOUT_S):
        state.holder.signal(signal.SIGKILL)
    deadline_s = time.monotonic() + DOWN_TIMEOUT_S
    for child in state.children:
        if not child.wait(max(0.0, deadline_s - time.monotonic())):
            child.signal(signal.SIGKILL)
    return all(process.wait(5) for process in (state.holder, *state.children))
