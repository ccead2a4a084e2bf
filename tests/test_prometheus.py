"""A real Prometheus scrapes real processes, and dashboards' questions get answers."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
import urllib.parse
import urllib.request
from typing import TYPE_CHECKING, Any

import pytest
from lease_rig import Engine, LeaseProcess, until
from router_harness import turn_body
from router_process import process
from stub_engine import CHAT, StubEngine
from test_lease_metrics import metrics_port
from test_observability import CONNECTOR, FOLDER, expressions, family_of, selectors

from kvturn_cli.leash import die_with_parent
from kvturn_cli.ports import pick_free

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [
    pytest.mark.fault,
    pytest.mark.skipif(
        shutil.which("prometheus") is None, reason="no prometheus: apt install prometheus"
    ),
]
OF_ENGINES = {family.name for family in CONNECTOR} | {"vllm:num_requests_running"}
"""What only engines tell, of which there are none here."""
SELDOM = re.compile(
    r"retries|queue_seconds|read_seconds|read_bytes|errors_total|grants_refused|ALERTS|ratio5m"
    r"|store_write|renewal|releases_total\[1h|haproxy_"
)
"""What has not happened in this test, or has no process there, so that the answer is empty."""


def ask(port: int, path: str, **query: str) -> Any:
    url = f"http://127.0.0.1:{port}/api/v1/{path}?{urllib.parse.urlencode(query)}"
    with urllib.request.urlopen(url, timeout=20) as answer:
        return json.load(answer)["data"]


def configuration(targets: dict[str, str]) -> str:
    """Returns the compose stack's configuration with other targets, scraped more often."""
    text = (FOLDER / "prometheus" / "prometheus.yml").read_text()
    jobs = "".join(
        f"  - job_name: {job}\n    static_configs: [{{targets: ['{target}']}}]\n"
        for job, target in targets.items()
    )
    text = text[: text.index("scrape_configs:")] + "scrape_configs:\n" + jobs
    text = re.sub(r"(scrape_interval|evaluation_interval): 5s", r"\1: 500ms", text)
    return text.replace("scrape_timeout: 4s", "scrape_timeout: 400ms")


def prometheus(folder: Path, port: int) -> subprocess.Popen[bytes]:
    """Starts one with the configuration of the folder."""
    with (folder / "prometheus.log").open("wb") as log:
        return subprocess.Popen(
            [
                *("prometheus", f"--config.file={folder}/prometheus.yml"),
                *(f"--storage.tsdb.path={folder}/data", f"--web.listen-address=127.0.0.1:{port}"),
            ],
            stderr=log,
            preexec_fn=die_with_parent,
        )


async def test_dashboards_get_answers_from_running_processes(tmp_path: Path):
    """One router, one lease service, one engine with a session, some turns: every question that
    these can answer is answered, and none is refused."""
    prefill, decode = [await StubEngine(role).start() for role in ("prefill", "decode")]
    port = pick_free(set())
    async with (
        LeaseProcess(tmp_path, "--metrics-port=0") as lease,
        Engine([lease.endpoint]) as engine,
        process(
            *("--port=0", "--no-grpc", f"--lease={lease.endpoint}", "--health-interval-s=0.1"),
            *(f"--prefill={prefill.url}", f"--decode={decode.url}"),
        ) as router,
    ):
        await router.until_listening()
        await router.until_ready()
        await engine.until_registered()
        engine.retain(1, "c")
        shutil.copy(FOLDER / "prometheus" / "rules.yml", tmp_path)
        targets = {
            "kvturn-router": f"127.0.0.1:{router.port}",
            "kvturn-lease": f"127.0.0.1:{metrics_port(lease)}",
        }
        (tmp_path / "prometheus.yml").write_text(configuration(targets))
        server = prometheus(tmp_path, port)
        try:

            async def turns_are_seen() -> bool:
                client = await router.client()
                await client.send("POST", CHAT, json.dumps(turn_body(stream=True)).encode())
                assert (await client.answer()).status == 200
                client.close()
                await asyncio.sleep(0.2)
                seen = "sum(rate(kvturn_router_turns_total[5s])) > 0 and count(up == 1) == 2"
                try:
                    found = await asyncio.to_thread(ask, port, "query", query=seen)
                except OSError:
                    return False  # it starts
                return bool(found["result"])

            await until(turns_are_seen, 60)
            for place, expression in expressions():
                query = expression.replace("$__rate_interval", "20s")
                found = await asyncio.to_thread(ask, port, "query", query=query)
                names = {family_of(name) for name, _ in selectors(expression)}
                if names & OF_ENGINES or SELDOM.search(expression) or place == "rules.yml":
                    continue
                for _ in range(40):  # A rate has an answer once it was asked for twice.
                    if found["result"]:
                        break
                    await asyncio.sleep(0.5)
                    found = await asyncio.to_thread(ask, port, "query", query=query)
                assert found["result"], f"{place}: no answer to {query}"
            rules = await asyncio.to_thread(ask, port, "rules")
            bad = [
                rule
                for group in rules["groups"]
                for rule in group["rules"]
                if rule["health"] == "err"
            ]
            assert not bad
        finally:
            server.terminate()
            server.wait(30)
            await prefill.stop()
            await decode.stop()
