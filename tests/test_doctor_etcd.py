"""What `kvturn doctor` finds of etcd, on real ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

from etcd_server import EtcdCluster, EtcdServer

from kvturn_cli.doctor import etcd as checks
from kvturn_cli.doctor.facts import EtcdFacts, Facts, RouterFacts
from kvturn_cli.doctor.finding import Severity
from kvturn_cli.doctor.probes.etcd import READS, probe_etcd
from kvturn_lease.etcd.config import EtcdConfig

if TYPE_CHECKING:
    from pathlib import Path

TIMEOUT_S = 5.0


def amiss(facts: EtcdFacts) -> dict[str, tuple[Severity, str]]:
    """Returns what is not in order, by check; tests run on the etcd that there is, old or new."""
    found = checks.findings(Facts(RouterFacts("http://r:1"), etcd=facts))
    return {
        one.check: (one.severity, one.seen)
        for one in found
        if one.severity != Severity.OK and one.check != "etcd.version"
    }


async def test_a_lone_member_is_well_and_alone(tmp_path: Path) -> None:
    """Its version, its space, its pace; and a majority of one is lost with it."""
    async with EtcdServer(tmp_path, "--quota-backend-bytes", "1000000000") as etcd:
        facts = await probe_etcd(EtcdConfig(endpoints=(etcd.endpoint,)), TIMEOUT_S)
    [member] = facts.members
    assert member.version.startswith("3.")
    assert member.leader
    assert 0 < member.db_used_bytes <= member.db_bytes
    assert member.quota_bytes in (0, 1_000_000_000), "told from 3.6 on"
    assert (facts.cluster_size, len(facts.read_ms), facts.read_problem) == (1, READS, "")
    assert amiss(facts).keys() == {"etcd.cluster"}
    gone = await probe_etcd(EtcdConfig(endpoints=(etcd.endpoint,)), 0.5)
    assert amiss(gone)["etcd.members"][0] == Severity.PROBLEM


async def test_of_three_members_one_may_be_gone_and_not_two(tmp_path: Path) -> None:
    """A majority is asked, not a member."""
    async with EtcdCluster(tmp_path) as cluster:
        endpoints = tuple(member.endpoint for member in cluster.members)
        config = EtcdConfig(endpoints=endpoints)
        assert not amiss(await probe_etcd(config, TIMEOUT_S))
        named = EtcdConfig(endpoints=endpoints[:1])
        assert amiss(await probe_etcd(named, TIMEOUT_S)).keys() == {"etcd.cluster"}
        cluster.members[2].kill()
        found = amiss(await probe_etcd(config, TIMEOUT_S))
        assert {check: severity for check, (severity, _) in found.items()} == {
            "etcd.members": Severity.WARNING
        }
        cluster.members[1].kill()
        found = amiss(await probe_etcd(config, 2.0))
        assert found["etcd.majority"][0] == Severity.PROBLEM


async def test_an_etcd_without_space_has_an_alarm(tmp_path: Path) -> None:
    """It was filled to its quota."""
    async with EtcdServer(tmp_path, "--quota-backend-bytes", str(1024 * 1024)) as etcd:
        await etcd.fill()
        facts = await probe_etcd(EtcdConfig(endpoints=(etcd.endpoint,)), TIMEOUT_S)
    severity, seen = amiss(facts)["etcd.alarm"]
    assert severity == Severity.PROBLEM
    assert "NOSPACE" in seen
