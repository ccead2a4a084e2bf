"""The compose stack of this checkout in a Docker engine, driven as a user drives it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

from docker_engine import ROOT, DockerEngine

from kvturn_cli.engine import data_type

FOLDER = ROOT / "deploy" / "compose"
FILES = ("compose.yaml",)
HTTP_TIMEOUT_S = 300


class ComposeStack:
    """One project of `docker compose`."""

    def __init__(
        self,
        engine: DockerEngine,
        variables: dict[str, str],
        project: str,
        files: tuple[str, ...] = FILES,
    ) -> None:
        self.engine = engine
        self.project = project
        self.environment = {
            **engine.environment,
            **variables,
            "CPU_DTYPE": data_type(),
            "COMPOSE_PROJECT_NAME": project,
            # docker-compose 1.29 gives up when the engine takes a minute for something.
            "COMPOSE_HTTP_TIMEOUT": str(HTTP_TIMEOUT_S),
            "PATH": f"{Path(engine.client).parent}:{os.environ['PATH']}",
        }
        self.command = [*_compose(engine), *(part for file in files for part in ("-f", file))]

    def compose(self, *args: str, timeout_s: float = 600) -> str:
        """Runs `docker compose ARGS...` and returns what it prints. Fails the test with stderr."""
        done = subprocess.run(
            [*self.command, *args],
            cwd=FOLDER,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
        assert done.returncode == 0, f"compose {' '.join(args)}: {done.stderr[-3000:]}"
        return done.stdout

    def roll(self, *services: str, timeout_s: float = 600) -> None:
        """Runs roll.sh."""
        done = subprocess.run(
            [FOLDER / "roll.sh", *services],
            env={**self.environment, "COMPOSE": " ".join(self.command)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
        )
        assert done.returncode == 0, done.stdout[-3000:]

    def down(self) -> None:
        """Stops and forgets all of it."""
        self.compose("--profile", "cpu", "down", "--volumes", "--timeout", "5")

    def container(self, service: str) -> str:
        """Returns the id of a service's container. Asks the engine: compose takes a second."""
        labels = (f"project={self.project}", f"service={service}", "oneoff=False")
        filters = [f"--filter=label=com.docker.compose.{label}" for label in labels]
        return self.engine.run("ps", "--all", "--quiet", "--no-trunc", *filters).strip()

    def state(self, service: str) -> dict[str, Any]:
        """Returns what the engine knows of a service's container: State, RestartCount..."""
        inspected = json.loads(self.engine.run("inspect", self.container(service)))
        state: dict[str, Any] = inspected[0]
        return state

    def health(self, service: str) -> str:
        """Returns starting, healthy or unhealthy; or in which state a stopped container is."""
        state = self.state(service)["State"]
        if state["Status"] != "running":
            return str(state["Status"])
        return str(state["Health"]["Status"])

    def wait_healthy(self, *services: str, timeout_s: float) -> None:
        """Returns when all are healthy; fails the test with the log of one that does not get so."""
        deadline_s = time.monotonic() + timeout_s
        waiting = list(services)
        while waiting := [name for name in waiting if self.health(name) != "healthy"]:
            late = time.monotonic() > deadline_s
            assert not late, f"{waiting} not healthy\n{self.log(waiting[0])[-3000:]}"
            time.sleep(1)

    def log(self, service: str) -> str:
        """Returns what a service's container printed."""
        return self.engine.run("logs", self.container(service), stderr=subprocess.STDOUT)

    def kill(self, service: str) -> int:
        """Ends a service's process as a crash would; returns how often it was restarted before.

        `docker kill` is no crash: the engine would not start the service again.
        """
        state = self.state(service)
        os.kill(int(state["State"]["Pid"]), signal.SIGKILL)
        return int(state["RestartCount"])

    def wait_restarted(self, service: str, restarts: int, timeout_s: float) -> None:
        """Returns when the engine has started a killed service again, once, and it is healthy."""
        deadline_s = time.monotonic() + timeout_s
        while (told := self.state(service)["RestartCount"]) == restarts:
            assert time.monotonic() < deadline_s, f"{service} is not started again"
            time.sleep(0.2)
        self.wait_healthy(service, timeout_s=deadline_s - time.monotonic())
        assert told == self.state(service)["RestartCount"] == restarts + 1, self.log(service)

    def inside(self, service: str, *command: str) -> str:
        """Runs a command in a service's container and returns what it prints."""
        return self.engine.run("exec", self.container(service), *command)


def _compose(engine: DockerEngine) -> list[str]:
    """Returns how compose is called: as COMPOSE says, the plug-in, or docker-compose."""
    if said := os.environ.get("COMPOSE"):
        return said.split()
    plugin = subprocess.run([engine.client, "compose", "version"], capture_output=True)
    return [engine.client, "compose"] if plugin.returncode == 0 else ["docker-compose"]
