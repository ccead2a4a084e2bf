"""The etcd that setup installs runs: alone, as a cluster, and in a stack of `kvturn up`."""

from __future__ import annotations

import sys
from pathlib import Path

import grpc
import pytest
from etcd_server import EtcdServer, until

from kvturn.v1 import lease_pb2, lease_pb2_grpc
from kvturn_cli.etcd import etcd_command, version_of
from kvturn_cli.stack import ConfigError, Stack, StackConfig


async def test_an_etcd_keeps_its_data_over_a_kill(tmp_path: Path) -> None:
    """A key put before kill -9 is there after the next start, and gone after a wipe."""
    async with EtcdServer(tmp_path) as etcd:
        await etcd.ctl("put", "a", "1")
        etcd.kill()
        await etcd.start()
        assert await etcd.ctl("get", "a") == "a\n1\n"
        etcd.kill()
        etcd.wipe()
        await etcd.start()
        assert await etcd.ctl("get", "a") == ""


def test_versions_are_compared_as_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """3.5.18 is newer than 3.5.9; what is no etcd counts as older than any."""
    binaries = {}
    for version in ("3.5.9", "3.5.18"):
        binary = tmp_path / version
        binary.write_text(f"#!/bin/sh\necho 'etcd Version: {version}'\n")
        binary.chmod(0o755)
        binaries[version] = version_of(binary)
    assert binaries["3.5.18"] > binaries["3.5.9"] > version_of(tmp_path / "missing")
    assert "--auto-compaction-retention" in etcd_command(tmp_path / "3.5.9", tmp_path, 1, 2)


async def test_a_stack_with_etcd_starts_one_and_leaves_nothing_behind(tmp_path: Path) -> None:
    """`--store etcd`: the lease service leads with the etcd of the stack; both end with it."""
    stack = Stack(stack_config(tmp_path, "etcd"))
    with stack:
        assert [process.name for process in stack.processes] == ["etcd", "lease"]
        assert stack.store.startswith("etcd://127.0.0.1:")
        await until(lambda: registered(stack))
        secret = tmp_path / "run" / "cluster-secret"
        assert secret.stat().st_mode & 0o777 == 0o600
        assert len(secret.read_text()) == 64
        ids = [process.id for process in stack.processes]
    assert not any(each is not None and each.is_running() for each in ids)


async def registered(stack: Stack) -> bool:
    """Tells whether the stack's lease service leads."""
    with grpc.insecure_channel(stack.lease_address) as channel:
        stub = lease_pb2_grpc.LeaseServiceStub(channel)
        try:
            stub.ListEngines(lease_pb2.ListEnginesRequest(), timeout=5)
        except grpc.RpcError:
            return False
        return True


def stack_config(tmp_path: Path, store: str) -> StackConfig:
    """A stack of nothing but the lease service and its store."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    return StackConfig(
        run_dir=tmp_path / "run",
        model=model,
        vllm_python=Path(sys.executable),
        engines=(),
        router=False,
        traces=False,
        store=store,
    )


@pytest.mark.parametrize(
    ("store", "binary", "words"),
    [
        ("redis", "", "--store redis: give memory, etcd, or etcd://HOST:PORT"),
        ("etcd", "/bin/false", "/bin/false is no etcd; set KVTURN_ETCD to one"),
    ],
)
def test_a_store_that_cannot_be_had_is_refused_before_anything_starts(
    store: str, binary: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the flag's name and with the fix."""
    monkeypatch.setenv("KVTURN_ETCD", binary)
    with pytest.raises(ConfigError, match=words):
        Stack(stack_config(tmp_path, store))
