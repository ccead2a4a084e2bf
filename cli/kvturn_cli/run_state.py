"""What `kvturn up` leaves in its run folder so that `kvturn down` and a second `up` find it.

up.lock is held (flock) by the `up` that runs: the kernel lets it go however that process ends.
up.json names that process, its children and its addresses.
"""

import dataclasses
import fcntl
import json
from pathlib import Path
from typing import IO

import msgspec

from kvturn.watched import FileFault, read_file
from kvturn_cli.process import ProcessId


class AlreadyUpError(Exception):
    """Another `kvturn up` uses the run folder."""


@dataclasses.dataclass(frozen=True)
class RunState:
    """A running `kvturn up`."""

    holder: ProcessId
    """The `up` process itself."""
    children: tuple[ProcessId, ...] = ()
    """The leashes of its processes."""
    ready: bool = False
    """Whether everything is ready."""
    router_url: str = ""
    """Base URL of the router."""
    model: str = ""
    """Name of the model that it serves."""
    lease_address: str = ""
    """HOST:PORT of the lease service."""


def state_file(run_dir: Path) -> Path:
    """Returns where the state of a run folder lies."""
    return run_dir / "up.json"


def write(run_dir: Path, state: RunState) -> None:
    """Replaces the state, whole at every moment."""
    fresh = run_dir / "up.json.new"
    fresh.write_text(json.dumps(dataclasses.asdict(state), indent=1))
    fresh.replace(state_file(run_dir))


def read(run_dir: Path) -> RunState | None:
    """Returns the state, None if there is none or it cannot be read."""
    try:
        return msgspec.json.decode(read_file("", state_file(run_dir)), type=RunState)
    except (FileFault, msgspec.DecodeError, UnicodeDecodeError):
        return None


def remove(run_dir: Path) -> None:
    """Removes the state; fine if there is none."""
    state_file(run_dir).unlink(missing_ok=True)


def hold(run_dir: Path) -> IO[str]:
    """Takes the run folder's lock; it is let go when the file is closed or the process ends.

    Raises AlreadyUpError if another process holds it, OSError if the folder cannot be used.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    lock = (run_dir / "up.lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        state = read(run_dir)
        holder = f" (process {state.holder.pid})" if state else ""
        raise AlreadyUpError(
            f"kvturn is already up in {run_dir}{holder};"
            " stop it with kvturn down, or choose another --run-dir"
        ) from None
    return lock
