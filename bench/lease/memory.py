"""Resident memory of the service per lease."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bench.lease.figures import Table
from bench.lease.operations import Operations, Setting, holding, service_args
from bench.lease.processes import Cores, ServerProcess

if TYPE_CHECKING:
    from collections.abc import Sequence

_MB = 1e6
_EXTRAPOLATED_TO = 100_000


async def measure_memory(cases: Sequence[tuple[int, int]], cores: Cores) -> Table:
    """Returns the memory for each case (leases, digest points), granted and brought."""
    rows = [
        await _measure(Setting(leases, 10), points, cores, brought=brought)
        for leases, points in cases
        for brought in (False, True)
    ]
    return Table(
        "Memory of the service process",
        "Ten engines. *Granted*: each lease came with a Grant. *Brought*: all came in the "
        "inventories of ten Registers, as after a restart of the service, whose messages the "
        "process held for a moment. Measured when two in a hundred had since been read and as many "
        "granted. MB are 10^6 bytes; a lease's bytes are the growth since the "
        f"start, over the leases. The last column is start + {_EXTRAPOLATED_TO:,} times that, "
        "measured where that many leases were held and extrapolated elsewhere.",
        (
            "leases",
            "digest points",
            "how they came",
            "MB at start",
            "MB holding them",
            "MB at most",
            "bytes per lease",
            f"MB at {_EXTRAPOLATED_TO:,}",
        ),
        rows,
    )


async def _measure(
    setting: Setting, points: int, cores: Cores, *, brought: bool
) -> tuple[str, ...]:
    with ServerProcess("lease service", service_args(setting), cores.server) as service:
        at_start = service.rss_bytes()
        inventories = setting if brought else Setting(0, setting.engines)
        async with holding(service, inventories, points) as (fleet, reader):
            await fleet.grant(setting.leases - fleet.lease_count, setting.engines)
            await Operations(service, fleet, reader, setting.leases // 100).round(counts=False)
            holding_them, at_most = service.rss_bytes(), service.peak_rss_bytes()
    per_lease = (holding_them - at_start) / setting.leases
    extrapolated = (at_start + _EXTRAPOLATED_TO * per_lease) / _MB
    return (
        f"{setting.leases:,}",
        f"{points:,}",
        "brought" if brought else "granted",
        f"{at_start / _MB:,.0f}",
        f"{holding_them / _MB:,.0f}",
        f"{at_most / _MB:,.0f}",
        f"{per_lease:,.0f}",
        f"{extrapolated:,.0f}" + ("" if setting.leases == _EXTRAPOLATED_TO else " (extrapolated)"),
    )
