"""etcd: its members, its majority, its space, its pace."""

import statistics
from collections.abc import Iterator

from kvturn_cli.doctor.facts import EtcdFacts, EtcdMember, Facts
from kvturn_cli.doctor.finding import Finding, counted, listed, ok, problem, warning
from kvturn_cli.doctor.versions import numbers

VERSION_MIN = (3, 5, 18)
QUOTA_DEFAULT_BYTES = 2 << 30
FULL_SHARE = 0.8
SLOW_MS = 100.0
BRING_BACK = "bring back members until more than half are there (etcdctl endpoint health --cluster)"
LEASES_NEED_IT = "Lease services elect their leader in etcd; without a majority nobody leads."


def findings(facts: Facts) -> Iterator[Finding]:
    """Judges the cluster if there is one."""
    etcd = facts.etcd
    if etcd is None:
        return
    reached = [one for one in etcd.members if not one.problem]
    yield from _members(etcd, reached)
    if not reached:
        return
    yield from _majority(etcd, reached)
    for member in reached:
        yield from _member(member)


def _members(etcd: EtcdFacts, reached: list[EtcdMember]) -> Iterator[Finding]:
    for member in etcd.members:
        if member.problem:
            judge = warning if reached else problem
            yield judge(
                "etcd.members",
                f"{member.endpoint}: {member.problem}",
                LEASES_NEED_IT if not reached else "One more loss may cost the majority.",
                "start it, or give --etcd HOST:PORT,... (and --etcd-ca, --etcd-user) as in"
                " --store of kvturn lease",
            )
    if not reached:
        return
    size = etcd.cluster_size or len(etcd.members)
    seen = f"{len(reached)} of {counted(size, 'member')} asked and well"
    if size < 3:
        yield warning(
            "etcd.cluster",
            f"{seen}: a cluster of {size}",
            "A loss of one member then costs the majority, and with it reuse.",
            "run three members (or five), and name all in --store of kvturn lease",
        )
    elif len(etcd.members) < size:
        yield warning(
            "etcd.cluster",
            f"{seen}: the others are not named",
            "A lease service that knows some members only loses etcd when those are gone.",
            "name all members in --store etcd://HOST:PORT,HOST:PORT,HOST:PORT of kvturn lease",
        )
    else:
        yield ok("etcd.cluster", seen)


def _majority(etcd: EtcdFacts, reached: list[EtcdMember]) -> Iterator[Finding]:
    if etcd.read_problem:
        yield problem(
            "etcd.majority",
            f"a read that a majority must agree to failed: {etcd.read_problem}",
            LEASES_NEED_IT,
            BRING_BACK,
        )
        return
    leaders = {one.leader for one in reached}
    if leaders == {0}:
        yield problem("etcd.majority", "etcd has no leader", LEASES_NEED_IT, BRING_BACK)
        return
    middle_ms, worst_ms = statistics.median(etcd.read_ms), max(etcd.read_ms)
    seen = (
        f"agreed reads take {middle_ms:.1f} ms, at worst {worst_ms:.1f} ms of {len(etcd.read_ms)}"
    )
    if middle_ms > SLOW_MS:
        yield warning(
            "etcd.pace",
            seen,
            "A leader that cannot renew its term within the leadership's TTL falls silent.",
            "give etcd a disk of its own (SSD) and CPU, or raise --leadership of kvturn lease",
        )
    else:
        yield ok("etcd.pace", seen)


def _member(member: EtcdMember) -> Iterator[Finding]:
    quota = member.quota_bytes or QUOTA_DEFAULT_BYTES
    used = (
        f"{member.db_used_bytes / 1e6:.1f} MB used of a database of {member.db_bytes / 1e6:.1f} MB"
    )
    make_room = (
        "etcdctl compact, etcdctl defrag, then etcdctl alarm disarm; start etcd with"
        " --auto-compaction-mode periodic --auto-compaction-retention 5m"
    )
    if member.errors:
        yield problem(
            "etcd.alarm",
            f"{member.endpoint}: {listed(member.errors)}; {used}",
            "An etcd with an alarm takes no writes, so no new leader can be elected.",
            make_room,
        )
    elif member.db_bytes > FULL_SHARE * quota:
        whose = "" if member.quota_bytes else " (etcd's default)"
        yield warning(
            "etcd.space",
            f"{member.endpoint}: {used}, the quota is {quota / 1e6:.0f} MB{whose}",
            "At its quota etcd takes no writes, so no new leader can be elected.",
            make_room,
        )
    if numbers(member.version) and numbers(member.version) < VERSION_MIN:
        yield warning(
            "etcd.version",
            f"{member.endpoint}: etcd {member.version}",
            "Older ones have lost watch events and revoked live leases.",
            f"update etcd to {'.'.join(map(str, VERSION_MIN))} or newer",
        )
    else:
        yield ok("etcd.version", f"{member.endpoint}: etcd {member.version}, {used}")
