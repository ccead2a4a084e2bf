"""A Docker engine: the one that runs, or one that is started for the tests and then stopped."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import IO, Self

ROOT = Path(__file__).resolve().parent.parent.parent
FOLDER = ROOT / "build" / "docker"
"""Where an engine of the tests' own keeps images and build caches from run to run."""
START_TIMEOUT_S = 180
STOP_TIMEOUT_S = 180
INSTALL = "run scripts/setup.sh docker, which names or installs what is missing"


class DockerEngine:
    """A running engine and the client that speaks with it; use it as a context manager."""

    def __init__(self) -> None:
        self.environment = dict(os.environ)
        self.client = _client()
        self._dockerd: subprocess.Popen[bytes] | None = None
        self._scratch: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> Self:
        if not self._answers():
            try:
                self._start()
            except BaseException:
                self._stop()
                raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def run(
        self,
        *args: str,
        given: IO[bytes] | None = None,
        stderr: int = subprocess.PIPE,
        timeout_s: float = 600,
    ) -> str:
        """Runs `docker ARGS...` and returns what it prints. Fails the test with its stderr."""
        done = subprocess.run(
            [self.client, *args],
            stdin=given or subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr,
            env=self.environment,
            timeout=timeout_s,
        )
        told = (done.stderr or done.stdout).decode(errors="replace")
        assert done.returncode == 0, f"docker {' '.join(args)}: {told[-3000:]}"
        return done.stdout.decode(errors="replace")

    def has_image(self, name: str) -> bool:
        """Tells whether the engine has an image of that name."""
        return bool(self.run("image", "ls", "--quiet", name).strip())

    def _answers(self) -> bool:
        asked = [self.client, "version", "--format", "{{.Server.Version}}"]
        return subprocess.run(asked, capture_output=True, env=self.environment).returncode == 0

    def _start(self) -> None:
        dockerd = shutil.which("dockerd", path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
        assert dockerd is not None, f"no Docker engine runs, and there is no dockerd: {INSTALL}"
        assert os.geteuid() == 0, "no Docker engine runs, and to start one takes root"
        # Sockets have short paths only.
        self._scratch = tempfile.TemporaryDirectory(prefix="kvturn-docker-")
        scratch = Path(self._scratch.name)
        host = f"unix://{scratch}/docker.sock"
        self.environment["DOCKER_HOST"] = host
        FOLDER.mkdir(parents=True, exist_ok=True)
        # It ends with the tests, also where those are ended without a last word.
        command = ["setpriv", "--pdeathsig", "TERM", dockerd, "--host", host]
        command += ["--pidfile", str(scratch / "dockerd.pid")]
        command += ["--data-root", str(FOLDER / "data"), "--exec-root", str(scratch / "run")]
        with (FOLDER / "dockerd.log").open("wb") as log:
            self._dockerd = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while not self._answers():
            alive = self._dockerd.poll() is None and time.monotonic() < deadline_s
            assert alive, f"dockerd does not start: {Path(log.name).read_text()[-2000:]}"
            time.sleep(0.2)

    def _stop(self) -> None:
        """Ends the engine that was started here, if one was."""
        if self._dockerd is not None:
            self._dockerd.terminate()
            try:
                self._dockerd.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._dockerd.kill()
                self._dockerd.wait()
        if self._scratch is not None:
            self._scratch.cleanup()


def _client() -> str:
    """Returns the first client on PATH that can build with BuildKit. Fails where none can."""
    found = []
    for folder in dict.fromkeys(os.environ["PATH"].split(":")):
        client = Path(folder) / "docker"
        if not os.access(client, os.X_OK):
            continue
        found.append(str(client))
        # Clients before 23 have the engine build, later ones need a plug-in.
        told = subprocess.run([client, "--version"], capture_output=True, text=True).stdout
        major = re.search(r"version (\d+)", told)
        plugin = subprocess.run([client, "buildx", "version"], capture_output=True)
        if (major is not None and int(major[1]) < 23) or plugin.returncode == 0:
            return str(client)
    raise AssertionError(f"no docker client that can build with BuildKit, of {found}: {INSTALL}")
