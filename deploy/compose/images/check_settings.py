#!/usr/bin/env python3
"""Checks what .env and the shell set, before anything of the stack starts: check_settings.py FILE

Prints a line for each setting that is wrong, with the fix, and ends with 2 if there is one. Values
come from the environment, as compose hands them on; FILE, which is .env, tells what else was meant.
"""

from __future__ import annotations

import difflib
import ipaddress
import itertools
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from kvturn_lease.config import ConfigError as LeaseConfigError
from kvturn_lease.config import parse_config as parse_lease
from kvturn_router.config import ConfigError as RouterConfigError
from kvturn_router.config import parse_config as parse_router

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

GIB = 1 << 30
UNITS = {"b": 1, "k": 1 << 10, "m": 1 << 20, "g": GIB}
OWN = "OWN_"
"""What variables of a user's own compose.override.yaml begin with; profiles: the same in small."""
FREE = (OWN, "COMPOSE_", "DOCKER_")
PORTS = ("HTTP_PORT", "GRPC_PORT", "JAEGER_PORT", "PROMETHEUS_PORT", "GRAFANA_PORT")


class Form(NamedTuple):
    """What a value may be: `words` complete the sentence "must be ..."."""

    words: str
    fits: Callable[[str], bool]


def pattern(words: str, text: str) -> Form:
    return Form(words, lambda value: re.fullmatch(text, value) is not None)


def choice(*values: str) -> Form:
    return Form(f"one of {', '.join(values)}", lambda value: value in values)


def is_address(value: str) -> bool:
    try:
        ipaddress.ip_address(value.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True


def is_profiles(value: str) -> bool:
    return all(name in ("cpu", "gpu") or name.startswith(OWN.lower()) for name in names(value))


def names(profiles: str) -> list[str]:
    return [name.strip() for name in profiles.split(",") if name.strip()]


ANY = pattern("anything", ".*")
TEXT = pattern("said, not empty", r"\S+")
IMAGE = pattern("NAME:TAG of an image", r"[\w./:-]+[:@][\w.:-]+")
PORT = Form("a port from 1 to 65535", lambda value: value.isdecimal() and 1 <= int(value) <= 65535)
COUNT = pattern("a whole number from 1", r"0*[1-9]\d{0,8}")
CPUS = pattern("a number of CPUs above 0, e.g. 1.5", r"(?=.*[1-9])\d{1,4}(\.\d+)?")
MEMORY = pattern("a size, e.g. 512m or 6g", r"(?=.*[1-9])\d{1,12}(\.\d+)?[bkmgBKMG][bB]?")
GPUS = pattern("numbers of GPUs with commas between, e.g. 0,1", r"\d+(,\d+)*")

FORMS = {
    "COMPOSE_PROFILES": Form(
        f"cpu, gpu or empty; profiles of your own begin with {OWN.lower()}", is_profiles
    ),
    "COMPOSE_PROJECT_NAME": ANY,
    "BIND_ADDRESS": Form("an address of this host, e.g. 127.0.0.1", is_address),
    **dict.fromkeys(PORTS, PORT),
    **dict.fromkeys(("KVTURN_IMAGE", "ENGINE_CPU_IMAGE", "ENGINE_GPU_IMAGE"), IMAGE),
    **dict.fromkeys(("COLLECTOR_IMAGE", "OTEL_COLLECTOR_IMAGE", "BUSYBOX_IMAGE"), IMAGE),
    **dict.fromkeys(("PYTHON_IMAGE", "VLLM_IMAGE", "ETCD_IMAGE", "HAPROXY_IMAGE"), IMAGE),
    **dict.fromkeys(("JAEGER_IMAGE", "PROMETHEUS_IMAGE", "GRAFANA_IMAGE"), IMAGE),
    "TORCH_BACKEND": ANY,
    "CPU_MODEL": pattern("a folder in the container, e.g. /mnt/models/NAME", r"/\S+"),
    "CPU_MODEL_NAME": TEXT,
    "CPU_MODEL_LEN": COUNT,
    "CPU_KV_CACHE_GIB": COUNT,
    "CPU_THREADS": COUNT,
    "CPU_DTYPE": choice("bfloat16", "float16", "float32", "auto"),
    "CPU_CPUS": CPUS,
    "CPU_MEMORY": MEMORY,
    "GPU_MODEL": TEXT,
    "HF_TOKEN": ANY,
    "GPU_PREFILL": GPUS,
    "GPU_DECODE": GPUS,
    "GPU_TENSOR_PARALLEL": COUNT,
    "GPU_CPUS": CPUS,
    "GPU_MEMORY": MEMORY,
    "GPU_SHM": MEMORY,
    "MODELS": TEXT,
    **dict.fromkeys(("LEASE_MEMORY", "ROUTER_MEMORY", "ETCD_MEMORY"), MEMORY),
    **dict.fromkeys(("JAEGER_MEMORY", "PROMETHEUS_MEMORY", "GRAFANA_MEMORY"), MEMORY),
    "PROMETHEUS_RETENTION": pattern("a time, e.g. 7d or 12h", r"(\d+(ms|[smhdwy]))+"),
}
# What lease services and routers read is checked by their own parsers.
LEASE = {"SESSION_TTL_S": "KVTURN_LEASE_SESSION_TTL", "LEASE_POLICY": "KVTURN_LEASE_POLICY"}
ROUTER = {
    "ROUTER_PLAN": "KVTURN_ROUTER_PLAN",
    "QUESTION_DEADLINE_MS": "KVTURN_ROUTER_QUESTION_DEADLINE_MS",
    "HEALTH_TIMEOUT_S": "KVTURN_ROUTER_HEALTH_TIMEOUT_S",
}
KNOWN = {*FORMS, *LEASE, *ROUTER}


def problems(file: str, given: Mapping[str, str]) -> list[str]:
    """Returns a line for each wrong setting, in a file's text or in what is given."""
    values = {name: given.get(name, "") for name in KNOWN}
    wrong = [*wrong_names(file), *wrong_values(values), *refused_by_kvturn(values)]
    # Values that are wrong by themselves contradict nothing.
    return wrong or contradictions(values)


def wrong_names(file: str) -> list[str]:
    """Names of the file that nobody reads, or that stand in it twice."""
    lines = [line.strip() for line in file.splitlines()]
    meant = [
        line.partition("=")[0].removeprefix("export ").strip()
        for line in lines
        if line and not line.startswith("#")
    ]
    told = []
    for name in dict.fromkeys(meant):
        if meant.count(name) > 1:
            told.append(f"{name}: stands twice in .env; take one out")
        if name not in KNOWN and not name.startswith(FREE):
            near = difflib.get_close_matches(name, sorted(KNOWN), n=1)
            hint = f"did you mean {near[0]}?" if near else "take it out"
            told.append(
                f"{name}: nothing of the stack reads it; {hint}"
                f" (variables of a compose.override.yaml of yours begin with {OWN})"
            )
    return told


def wrong_values(values: Mapping[str, str]) -> list[str]:
    return [
        f"{name}: must be {form.words}, not {values[name]!r}; set it in .env"
        for name, form in FORMS.items()
        if not form.fits(values[name])
    ]


def refused_by_kvturn(values: Mapping[str, str]) -> list[str]:
    """Settings that a lease service or a router would not start with."""
    told = []
    for name in (*LEASE, *ROUTER):
        try:
            if not values[name]:
                told.append(f"{name}: must not be empty; set it in .env")
            elif name in LEASE:
                parse_lease([], {LEASE[name]: values[name]})
            else:
                parse_router([], {"KVTURN_ROUTER_LEASE": "lease:7600", ROUTER[name]: values[name]})
        except (LeaseConfigError, RouterConfigError) as error:
            told.append(f"{name}={values[name]}: {error}; set it in .env")
    return told


def contradictions(values: Mapping[str, str]) -> list[str]:
    """Settings that are right one by one and not together."""
    told = [
        f"{one} and {other} are both {values[one]}; give each a port of its own"
        for one, other in itertools.combinations(PORTS, 2)
        if int(values[one]) == int(values[other])
    ]
    if {"cpu", "gpu"} <= set(names(values["COMPOSE_PROFILES"])):
        told.append("COMPOSE_PROFILES: cpu and gpu engines have the same names; choose one")
    # Whatever COMPOSE_PROFILES says: --profile, or naming a service, starts engines without it.
    cache = int(values["CPU_KV_CACHE_GIB"]) * GIB
    if cache >= size(values["CPU_MEMORY"]):
        told.append(
            f"CPU_KV_CACHE_GIB={values['CPU_KV_CACHE_GIB']} does not fit into"
            f" CPU_MEMORY={values['CPU_MEMORY']}; lower it or raise CPU_MEMORY"
        )
    return told + gpu_contradictions(values)


def gpu_contradictions(values: Mapping[str, str]) -> list[str]:
    told = []
    gpus = {name: values[name].split(",") for name in ("GPU_PREFILL", "GPU_DECODE")}
    ranks = int(values["GPU_TENSOR_PARALLEL"])
    for name, numbers in gpus.items():
        if len(set(numbers)) != ranks:
            told.append(
                f"{name}={values[name]} names {len(set(numbers))} GPUs and"
                f" GPU_TENSOR_PARALLEL={ranks} takes {ranks}; make them equal"
            )
    if both := set(gpus["GPU_PREFILL"]) & set(gpus["GPU_DECODE"]):
        told.append(
            f"GPU_PREFILL and GPU_DECODE both name GPU {min(both)}; give each engine its own"
        )
    return told


def size(memory: str) -> float:
    """Returns the bytes of a size as compose writes it."""
    number = memory.lower()
    if number[-2:-1].isalpha():
        number = number[:-1]
    return float(number[:-1]) * UNITS[number[-1]]


def main(path: Path) -> int:
    try:
        file = path.read_text()
    except OSError as error:
        told = [f".env: cannot be read: {error.strerror}; no secret is in it: chmod a+r .env"]
    else:
        told = problems(file, os.environ)
    for line in told:
        print(f"settings: {line}", file=sys.stderr)
    return 2 if told else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
