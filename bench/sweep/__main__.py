"""Compares turns that may reuse KV with turns that may not, over a router that runs.

    python -m bench.sweep --url http://10.0.0.5:8000 --out build/sweep [--contexts 2000,8000 ...]
    python -m bench.sweep --report DIR [DIR ...]

Every combination of contexts, turns and concurrency is measured in both arms, which take turns in
being first. Every conversation begins with words of its own, so that no prefix cache helps one arm
by what the other has said. `rows.csv` gets a row for each turn as it ends; `table.md` and
`table.csv` hold medians and quartiles of the turns after the first. `deploy/baremetal/sweep.sh`
calls this.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import http.client
import sys
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import openai

from bench.sweep.cell import FIELDS, Cell, Row, Run, cells, row_of, runs
from bench.sweep.drivers import Driver, DriverError, OwnDriver, Target, VllmDriver, vllm_benchmark
from bench.sweep.prose import Length, text
from bench.sweep.table import HEAD, cells_of, lines, markdown
from kvturn.tls import trusting
from kvturn.watched import FileFault, read_file

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

READY_S = 30
"""Longest wait for a router without a usable engine; it asks after each every ten seconds."""
_LOOK_S = 1
_ANSWER_S = 10
_REASON_BYTES = 500
_LENGTH_WORDS = (50, 250)
_REUSED = ("reused", "partial_prefix", "local")


def numbers(value: str) -> list[int]:
    """Returns numbers from 1, given with commas. Raises ValueError."""
    found = [int(part) for part in value.split(",")]
    if min(found) < 1:
        raise ValueError(value)
    return found


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Returns the arguments."""
    parser = argparse.ArgumentParser(prog="python -m bench.sweep", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--url", help="base URL of the router")
    parser.add_argument("--out", type=Path, help="folder for the results; made if missing")
    parser.add_argument("--report", nargs="+", type=Path, help="only merge results of sweeps")
    parser.add_argument("--contexts", type=numbers, default=[2000, 8000, 32000])
    parser.add_argument("--turns", type=numbers, default=[4])
    parser.add_argument("--concurrency", type=numbers, default=[1, 4])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--arms", choices=("on", "off", "on,off", "off,on"), default="on,off")
    parser.add_argument("--suffix", type=int, default=100, help="tokens that a later turn adds")
    parser.add_argument("--answer", type=int, default=64, help="longest answer, in tokens")
    parser.add_argument("--label", default="", help="name of the sweep, in conversations' ids")
    parser.add_argument("--model", default="", help="name of the model; else the first served")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds that a turn may take")
    parser.add_argument("--api-key-file", type=Path, help="file with the API key of the router")
    parser.add_argument("--ca", type=Path, help="authorities of an https router")
    parser.add_argument("--driver", choices=("kvturn", "vllm"), default="kvturn")
    parser.add_argument("--vllm-python", default="python3", help="for vLLM's benchmark")
    parser.add_argument("--vllm-source", default="", help="source tree of vLLM")
    parser.add_argument("--tokenizer", default="", help="model folder or name, for the same")
    args = parser.parse_args(argv)
    if not args.report and not (args.url and args.out):
        parser.error("give --url and --out, or --report")
    return args


def target_of(args: argparse.Namespace) -> Target:
    """Returns the router to measure. Raises DriverError if it is not ready within READY_S."""
    try:
        file = args.api_key_file
        keys = read_file("--api-key-file", file).decode().split() if file else [""]
        tls = trusting("--ca", args.ca)
    except (FileFault, UnicodeDecodeError) as fault:
        raise DriverError(f"API_KEY_FILE or CA_FILE: {fault}") from fault
    if not keys:
        raise DriverError(f"API_KEY_FILE {file} holds no key")
    label = args.label or time.strftime("%H%M%S")
    target = Target(
        args.url, args.model, keys[0], tls, args.timeout, label, args.suffix, args.answer
    )
    try:
        wait_until_ready(target)
        with target.client() as client:
            served = client.models()
    except openai.OpenAIError as error:
        raise DriverError(
            f"ROUTER_URL={args.url}: the router does not list its models ({error});"
            " start it, or mend the address"
        ) from error
    if args.model and args.model not in served:
        raise DriverError(f"--model {args.model}: served are {', '.join(served)}")
    if not served:
        raise DriverError(f"ROUTER_URL={args.url}: no engine serves a model; start the engines")
    return dataclasses.replace(target, model=args.model or served[0])


def wait_until_ready(target: Target) -> None:
    """Waits while the router says that it is not. Raises DriverError after READY_S."""
    until_s = time.monotonic() + READY_S
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=target.tls)
    )
    while True:
        try:
            opener.open(f"{target.url}/ready", timeout=_ANSWER_S).close()
        except urllib.error.HTTPError as error:
            if error.code == HTTPStatus.SERVICE_UNAVAILABLE:
                why = error.read(_REASON_BYTES).decode(errors="replace").strip()
                if time.monotonic() > until_s:
                    raise DriverError(f"ROUTER_URL={target.url} is not ready: {why}") from error
                print(f"waiting for {target.url}: {why}", file=sys.stderr, flush=True)
                time.sleep(_LOOK_S)
                continue
        except (OSError, http.client.HTTPException):
            pass  # The first question that matters tells it better.
        return


def length_of(target: Target) -> Length:
    """Learns how many tokens the model makes of words. Raises DriverError."""
    seen: list[tuple[int, int]] = []
    with target.client() as client:
        for words in _LENGTH_WORDS:
            name = f"sweep-{target.label}-length-{words}"
            messages = [{"role": "user", "content": text(name, words)}]
            try:
                done = client.turn(target.model, messages, name, reuse=False, max_tokens=1)
            except openai.OpenAIError as error:
                raise DriverError(f"the router does not serve a turn: {error}") from error
            seen.append((words, done.prompt_tokens))
    try:
        return Length.of(seen[0], seen[1])
    except ValueError as error:
        raise DriverError(
            f"{error}: the router reports no prompt tokens; mend ROUTER_URL if it is none of kvturn"
        ) from error


def warm_up(target: Target, length: Length, smallest: Cell) -> None:
    """Holds a conversation that does not count, by which engines meet; says if it reused."""
    warm = Run(Cell(smallest.context, 2, 1), "on", -1)
    last = OwnDriver(target, length).measure(warm)[-1]
    if last.error:
        raise DriverError(f"the warm-up's turn failed: {last.error}")
    if last.verdict in _REUSED:
        told = f"{last.verdict}, {last.reused_tokens} of {last.prompt_tokens} tokens"
        print(f"warm-up: the second turn's verdict is {told}", flush=True)
    else:
        print(
            f"warm-up: the second turn reused nothing, its verdict is {last.verdict or 'not told'}"
            " (docs/turns.md says what that means); the arm 'on' may show the same",
            flush=True,
        )


def driver_of(args: argparse.Namespace, target: Target, length: Length) -> Driver:
    """Returns what holds the conversations. Raises DriverError."""
    if args.driver == "kvturn":
        return OwnDriver(target, length)
    folder = vllm_benchmark(args.vllm_source, args.vllm_python)
    if not args.tokenizer:
        raise DriverError("MODEL is not set: DRIVER=vllm needs it for its tokenizer")
    return VllmDriver(target, length, args.vllm_python, folder, args.tokenizer, args.out)


@contextmanager
def row_file(folder: Path) -> Iterator[tuple[TextIO, csv.DictWriter[str]]]:
    """Opens rows.csv of a sweep."""
    with (folder / "rows.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS)
        writer.writeheader()
        yield file, writer


def read_rows(folders: Sequence[Path]) -> list[Row]:
    """Returns the rows of sweeps. Raises DriverError."""
    rows: list[Row] = []
    for folder in folders:
        try:
            with (folder / "rows.csv").open(newline="") as file:
                rows += [row_of(record) for record in csv.DictReader(file)]
        except (OSError, ValueError, KeyError) as error:
            raise DriverError(
                f"--report {folder}: no rows.csv of a sweep there ({error})"
            ) from error
    return rows


def report(rows: Sequence[Row], folder: Path | None) -> None:
    """Prints the table, and writes it to a folder if one is given."""
    found = lines(rows)
    print(markdown(found), end="", flush=True)
    if folder is None:
        return
    (folder / "table.md").write_text(markdown(found))
    with (folder / "table.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(HEAD)
        writer.writerows(cells_of(line, found) for line in found)


def sweep(args: argparse.Namespace) -> int:
    """Measures. Returns the exit status: 1 if a turn failed."""
    args.out.mkdir(parents=True, exist_ok=True)
    target = target_of(args)
    length = length_of(target)
    driver = driver_of(args, target, length)
    arms = tuple(args.arms.split(","))
    wanted = cells(args.contexts, args.turns, args.concurrency)
    if "on" in arms:
        warm_up(target, length, min(wanted))
    planned = list(runs(wanted, arms, args.repeats))
    rows: list[Row] = []
    with row_file(args.out) as (file, writer):
        for number, run in enumerate(planned, 1):
            measured = driver.measure(run)
            rows += measured
            writer.writerows(dataclasses.asdict(row) for row in measured)
            file.flush()
            cell = run.cell
            failed = sum(bool(row.error) for row in measured)
            print(
                f"{number}/{len(planned)}: context {cell.context}, {cell.turns} turns,"
                f" {cell.concurrency} at once, reuse {run.arm}"
                + f", {failed} failed"
                * bool(failed),
                flush=True,
            )
    report(rows, args.out)
    errors = [row.error for row in rows if row.error]
    if errors:
        print(f"sweep: {len(errors)} turns failed, the first: {errors[0]}", file=sys.stderr)
    return 1 if errors else 0


def main(argv: Sequence[str] | None = None) -> int:
    """Runs it."""
    args = arguments(argv)
    try:
        if args.report:
            report(read_rows(args.report), args.out)
            return 0
        return sweep(args)
    except (DriverError, OSError) as error:
        print(f"sweep: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("sweep: interrupted; rows.csv holds what was measured", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
