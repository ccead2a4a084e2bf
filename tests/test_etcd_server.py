"""The etcd that setup installs runs: alone, killed and started again, and as a cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING

from etcd_server import EtcdCluster, EtcdServer

from kvturn_cli.etcd import etcd_command, version_of

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


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


async def test_a_cluster_of_three_starts(tmp_path: Path) -> None:
    """What one member takes, another gives."""
    async with EtcdCluster(tmp_path) as cluster:
        await cluster.members[0].ctl("put", "a", "1")
        assert await cluster.members[2].ctl("get", "a") == "a\n1\n"


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
