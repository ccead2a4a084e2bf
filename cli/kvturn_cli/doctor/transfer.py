"""NIXL's backends: equal on both sides, and the fast one really fast."""

from collections.abc import Iterator

from kvturn_cli.doctor.facts import EngineFacts, Facts
from kvturn_cli.doctor.finding import Finding, counted, listed, ok, problem, warning

LIBFABRIC, UCX = "LIBFABRIC", "UCX"
EFA = "efa"
_SILENT = (
    "Without EFA, libfabric takes TCP without a word, and reads take many times as long"
    " (read_too_long)."
)
_EFA_FIX = (
    "start it on an instance with EFA, give its container the devices"
    " (--device /dev/infiniband/uverbs0, ...) and libfabric with EFA's provider; fi_info -p efa"
    " must list it"
)


def findings(facts: Facts) -> Iterator[Finding]:
    """Compares the backends of prefill and decode, then looks for the devices they need."""
    told = [one for one in facts.engines if one.settings and one.settings.nixl_backends]
    if not told:
        return
    yield from _alike(told)
    fabric = [one for one in told if one.settings and LIBFABRIC in one.settings.nixl_backends]
    for engine in fabric:
        yield from _efa(engine, facts)
    # Engines of one machine need no network: there UCX is the fast one.
    if len({one.settings.machine for one in told if one.settings} - {""}) != 1:
        yield from _ucx(told)


def _alike(told: list[EngineFacts]) -> Iterator[Finding]:
    by_backends: dict[str, list[str]] = {}
    for engine in told:
        assert engine.settings is not None
        by_backends.setdefault("+".join(sorted(engine.settings.nixl_backends)), []).append(
            engine.name
        )
    seen = "; ".join(f"{one}: {listed(names)}" for one, names in sorted(by_backends.items()))
    sets = [set(one.split("+")) for one in by_backends]
    if len(by_backends) == 1:
        yield ok("transfer.backends", f"{seen}" if len(told) < 2 else f"equal: {seen}")
    elif not set.intersection(*sets):
        yield problem(
            "transfer.backends",
            f"no NIXL backend is common to all engines: {seen}",
            "Engines without a common backend cannot read each other's KV (read_failed).",
            'set "backends" in kv_connector_extra_config to the same on all, e.g. ["LIBFABRIC"]'
            ' with EFA, ["UCX"] else',
        )
    else:
        yield warning(
            "transfer.backends",
            f"NIXL's backends differ: {seen}",
            "Only what both sides have can be used, which may be the slower one.",
            'set "backends" in kv_connector_extra_config to the same on all',
        )


def is_efa(device: str) -> bool:
    """Tells whether an RDMA device is EFA, by its name or by its driver in brackets."""
    return device.startswith(EFA) or device.endswith(f" ({EFA})")


def _ucx(told: list[EngineFacts]) -> Iterator[Finding]:
    for engine in told:
        assert engine.settings is not None
        backends, devices = engine.settings.nixl_backends, engine.settings.rdma_devices
        if UCX in backends and LIBFABRIC not in backends and devices and all(map(is_efa, devices)):
            yield warning(
                "transfer.efa",
                f"{engine.name} asks for UCX, and its machine has no RDMA devices but EFA"
                f" ({counted(len(devices), 'device')})",
                "UCX does not read over EFA as over other RDMA devices: it may take TCP without a"
                " word, and reads take many times as long (read_too_long).",
                'set "backends": ["LIBFABRIC"] in kv_connector_extra_config of all engines',
            )


def _efa(engine: EngineFacts, facts: Facts) -> Iterator[Finding]:
    settings, host = engine.settings, facts.host
    assert settings is not None
    devices = [device for device in settings.rdma_devices if is_efa(device)]
    here = bool(host.machine) and settings.machine == host.machine
    if not devices:
        others = listed(settings.rdma_devices) or "none"
        yield problem(
            "transfer.efa",
            f"{engine.name} asks for LIBFABRIC and its machine has no EFA device (RDMA devices:"
            f" {others})",
            _SILENT,
            f'{_EFA_FIX}; or set "backends": ["UCX"]',
        )
    elif not here:
        yield ok(
            "transfer.efa",
            f"{engine.name}: {counted(len(devices), 'EFA device')}; whether libfabric's provider is"
            " there can only be seen on that machine (fi_info -p efa, or kvturn doctor there)",
        )
    elif host.efa is None:
        yield warning(
            "transfer.efa",
            f"{engine.name}: {counted(len(devices), 'EFA device')}, but fi_info cannot tell of its"
            f" provider: {host.efa_problem}",
            _SILENT,
            "install libfabric's tools (apt install libfabric-bin, or EFA's installer) and run"
            " fi_info -p efa",
        )
    elif host.efa:
        yield ok(
            "transfer.efa", f"{engine.name}: {counted(len(devices), 'EFA device')}, provider efa"
        )
    else:
        yield problem(
            "transfer.efa",
            f"{engine.name} asks for LIBFABRIC and libfabric has no EFA provider here:"
            f" {host.efa_problem}",
            _SILENT,
            _EFA_FIX,
        )
