"""Setup: pinned lists without addresses, steps that run once, clear words for what is missing."""

import importlib.util
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent
LOCKED = sorted(
    file for file in (ROOT / "requirements").glob("*.txt") if file.name != "vllm-overrides.txt"
)


def load_setup() -> ModuleType:
    """Loads scripts/setup.py as a module."""
    spec = importlib.util.spec_from_file_location("kvturn_setup", ROOT / "scripts" / "setup.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@pytest.mark.parametrize("locked", LOCKED, ids=lambda file: file.name)
def test_a_locked_list_pins_versions_and_hashes_and_names_no_address(locked: Path) -> None:
    """Each requirement of each list has one version and at least one hash, and no URL."""
    text = locked.read_text()
    assert "://" not in text
    for block in re.split(r"\n(?=\S)", text.strip()):
        assert re.match(r"[A-Za-z0-9._-]+(\[[a-z,]+\])?==\S+", block), block[:80]
        assert "--hash=sha256:" in block, block[:80]


def test_the_workspace_list_holds_every_dependency_of_every_member() -> None:
    """A dependency added to a pyproject.toml without `make lock` is noticed here."""
    pinned = {
        normalized(line.split("==")[0])
        for line in (ROOT / "requirements" / "workspace.txt").read_text().splitlines()
        if "==" in line
    }
    setup = load_setup()
    projects = [tomllib.loads((ROOT / m / "pyproject.toml").read_text()) for m in setup.MEMBERS]
    own = {normalized(project["project"]["name"]) for project in projects}
    root = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wanted = [*root["dependency-groups"]["dev"]]
    for project in projects:
        wanted += project["project"]["dependencies"]
    names = {normalized(re.split(r"[\s\[=<>!~;]", text, maxsplit=1)[0]) for text in wanted}
    assert names - own <= pinned


def test_a_step_is_current_until_what_it_is_made_from_changes(tmp_path: Path) -> None:
    """A second setup does nothing; a changed list makes the step again."""
    setup = load_setup()
    setup.ROOT = tmp_path
    locked = tmp_path / "list.txt"
    locked.write_text("one==1\n")
    target = tmp_path / "env"
    target.mkdir()
    step = setup.Step("env", target, (locked,), lambda: None)
    assert not step.is_current()
    (target / setup.STAMP).write_text(step.key())
    assert step.is_current()
    locked.write_text("one==2\n")
    assert not step.is_current()


def test_the_demo_prepares_no_more_than_one_vllm_and_the_model() -> None:
    """`make demo` needs neither the second vLLM nor the environments of the checks."""
    setup = load_setup()
    steps = setup.all_steps()
    assert setup.names_of("demo", steps) == {"uv", "workspace", "vllm-0.29.0", "model"}
    assert not {"vllm-0.29.0", "vllm-0.32.0", "model"} & setup.names_of("fast", steps)
    rivals = {"vllm-router", "smg", "example-proxy"}
    assert setup.names_of("test", steps) == set(steps) - {"docker", "plots"} - rivals
    with pytest.raises(setup.SetupError, match="no group or step named nonsense"):
        setup.names_of("nonsense", steps)


def test_torch_comes_from_the_find_links_folder_that_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder with a wheel for this Python is used; one for another Python is not."""
    setup = load_setup()
    tag = f"cp{sys.version_info[0]}{sys.version_info[1]}"
    other, right = tmp_path / "other", tmp_path / "right"
    for folder, python in ((other, "cp399"), (right, tag)):
        folder.mkdir()
        name = f"torch-2.13.0+cpu-{python}-{python}-manylinux_2_28_{os.uname().machine}.whl"
        (folder / name).touch()
    monkeypatch.setenv("PIP_FIND_LINKS", f"{other} {right}")
    assert setup.torch_source()[:2] == ["--find-links", str(right)]
    monkeypatch.setenv("PIP_FIND_LINKS", str(other))
    assert setup.torch_source() == ["--torch-backend", "cpu"]
    monkeypatch.delenv("PIP_FIND_LINKS")
    assert setup.torch_source() == ["--torch-backend", "cpu"]


def test_pip_settings_hold_for_uv_unless_uv_has_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mirror and a proxy that are set for pip reach uv; uv's own variables win."""
    setup = load_setup()
    for name in ("UV_DEFAULT_INDEX", "UV_INDEX", "SSL_CERT_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_INDEX_URL", "file:///mirror")
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "file:///more")
    monkeypatch.setenv("UV_INDEX", "file:///mine")
    environment = setup.uv_environment()
    assert environment["UV_DEFAULT_INDEX"] == "file:///mirror"
    assert environment["UV_INDEX"] == "file:///mine"
    assert environment["UV_PYTHON_DOWNLOADS"] == "never"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"sys.platform": "darwin"}, "runs on Linux"),
        ({"platform.machine": "riscv64"}, "x86_64 and aarch64"),
        ({"platform.libc_ver": ("", "")}, "GNU C library"),
        ({"platform.libc_ver": ("glibc", "2.17")}, "glibc 2.17 is too old"),
        ({"cpu_flags": {"sse2"}}, "AVX2"),
    ],
)
def test_a_machine_that_cannot_run_the_stack_is_told_so_in_one_line(
    change: dict[str, object], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each thing that setup cannot mend is named before anything is installed."""
    setup = load_setup()
    monkeypatch.setattr(setup.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(setup, "cpu_flags", lambda: {"avx2"})
    for name, value in change.items():
        owner: object = setup
        for part in name.split(".")[:-1]:
            owner = getattr(owner, part)
        leaf = name.split(".")[-1]
        monkeypatch.setattr(owner, leaf, value if leaf == "platform" else lambda value=value: value)
    with pytest.raises(setup.SetupError, match=words) as caught:
        setup.check_machine()
    assert "\n" not in str(caught.value)


def test_a_disk_that_is_too_small_is_told_before_anything_is_downloaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The message says how much is free and how much is needed."""
    setup = load_setup()
    monkeypatch.setattr(setup, "FREE_GIB_MIN", 1e9)
    with pytest.raises(setup.SetupError, match="GiB free on the disk"):
        setup.check_disk()


def run_setup_sh(**variables: str) -> subprocess.CompletedProcess[str]:
    """Runs scripts/setup.sh with these variables."""
    return subprocess.run(
        ["/bin/sh", str(ROOT / "scripts" / "setup.sh"), "demo"],
        env=variables,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_a_python_that_is_too_old_or_missing_is_told_in_one_line(tmp_path: Path) -> None:
    """PYTHON that is no Python 3.11+, and a PATH without any, each give one line and code 2."""
    (tmp_path / "dirname").symlink_to("/usr/bin/dirname")
    wrong = run_setup_sh(PATH=os.environ["PATH"], PYTHON="/bin/false")
    none = run_setup_sh(PATH=str(tmp_path))
    for done, words in ((wrong, "is not a Python 3.11"), (none, "no Python 3.11")):
        assert done.returncode == 2
        assert words in done.stderr
        assert done.stderr.count("\n") == 1


def test_a_python_without_venv_and_pip_is_told_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Debian's python3 without python3-venv and python3-pip can make nothing."""
    setup = load_setup()
    monkeypatch.setattr(setup, "has_module", lambda python, name: False)
    monkeypatch.setattr(setup.shutil, "rmtree", lambda *_, **__: None)
    with pytest.raises(setup.SetupError, match=r"apt install python3\.\d+-venv"):
        setup.make_uv()


def test_what_docker_tests_need_is_named_where_it_cannot_be_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without root nothing is installed; one line says which packages to install."""
    setup = load_setup()
    monkeypatch.setattr(setup, "missing_for_docker", lambda: ["docker.io", "debootstrap"])
    monkeypatch.setattr(setup.os, "geteuid", lambda: 1000)
    with pytest.raises(setup.SetupError, match=r"apt-get install docker\.io debootstrap") as said:
        setup.make_docker()
    assert "\n" not in str(said.value)
