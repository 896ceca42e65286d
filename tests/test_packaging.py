"""Installed packages: lock files match pyproject.toml, and wheels have all files."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.locks import read_lock, version

ROOT = Path(__file__).parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = PYPROJECT["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
TOOLS: list[str] = PYPROJECT["dependency-groups"]["tools"]
SBOM: list[str] = PYPROJECT["dependency-groups"]["sbom"]
EXECUTOR = "triton_repo/cpu_executor"
MIGRATIONS = {
    str(path.relative_to(ROOT)) for path in (ROOT / "gateway/database/migrations").glob("*.sql")
}
# Requirements that each lock file must contain.
LOCKS: dict[str, list[str]] = {
    "gateway": PROJECT["dependencies"],
    "local": PROJECT["dependencies"] + EXTRAS["local"],
    "dev": PROJECT["dependencies"] + [line for extra in EXTRAS.values() for line in extra],
    "tools": TOOLS,
    "sbom": SBOM,
}
# The extra `local` needs an older numpy, and an ml-dtypes that is compatible with it.
MAY_DIFFER = {"numpy", "ml-dtypes"}


@pytest.mark.parametrize("name", LOCKS)
def test_the_lock_has_what_pyproject_asks_for(name: str) -> None:
    for line in LOCKS[name]:
        asked = Requirement(line)
        pins = read_lock(name).get(canonicalize_name(asked.name), [])
        assert pins, f"`make lock`: requirements/{name}.txt has no {asked.name}"
        for pin, _ in pins:
            assert version(pin) in asked.specifier, f"`make lock`: {pin} is not {asked}"


@pytest.mark.parametrize("name", LOCKS)
def test_every_pin_has_hashes_and_no_lock_names_a_registry(name: str) -> None:
    text = (ROOT / "requirements" / f"{name}.txt").read_text(encoding="utf-8")
    assert not re.findall(r"^.*://.*$|^\s*--(?!hash).*$", text, re.MULTILINE)
    for pins in read_lock(name).values():
        for pin, hashes in pins:
            version(pin)
            assert hashes, f"{pin} has no hash"


def test_the_locks_agree() -> None:
    everything = read_lock("dev")
    for name in ("gateway", "local", "tools", "sbom"):
        for package, pins in read_lock(name).items():
            if package in everything and package not in MAY_DIFFER:
                assert {version(pin) for pin, _ in pins} == {
                    version(pin) for pin, _ in everything[package]
                }, f"`make lock`: {package} differs between {name}.txt and dev.txt"


def test_the_gateway_starts_without_what_its_lock_leaves_out() -> None:
    """Check that optional packages are not imported: the image installs only this lock file."""
    installed = {canonicalize_name(name) for name in read_lock("gateway")}
    top_level = packages_distributions()
    missing = sorted(
        module
        for module, names in top_level.items()
        if not {canonicalize_name(name) for name in names} & (installed | {PROJECT["name"]})
    )
    assert {"transformers", "huggingface_hub", "ml_dtypes", "rapidjson"} <= set(missing)
    program = (
        "import sys\n"
        f"sys.modules.update(dict.fromkeys({missing}))\n"
        "import gateway.server, gateway.triton.grpcio, gateway.triton.logits\n"
        "import gateway.sources.remote, ops.commands.lora, ops.commands.key, adapters.convert\n"
        "import httpx; httpx.Client()  # imports httpcore\n"
        "from ops.cli import main\n"
        "main(['key', '--help'])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_every_dependency_has_an_upper_bound() -> None:
    unbounded = [
        line
        for line in LOCKS["dev"] + TOOLS + SBOM + PYPROJECT["build-system"]["requires"]
        if not any(bound.operator in ("<", "<=", "==") for bound in Requirement(line).specifier)
    ]
    assert unbounded == []


def test_what_builds_the_project_is_locked() -> None:
    hook = PYPROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["hooks"]["custom"]
    assert {*PYPROJECT["build-system"]["requires"], *hook["dependencies"]} <= set(TOOLS)


def _build(kind: str, folder: Path, to: Path) -> Path:
    """Build the wheel or sdist of a distribution, and return its file."""
    command = [Path(sys.executable).parent / "hatchling", "build", "-t", kind, "-d", to]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    [built] = to.iterdir()
    return built


def _build_wheel(folder: Path, to: Path) -> set[str]:
    """Return the names of the files in the wheel of a distribution, without its metadata."""
    wheel = _build("wheel", folder, to)
    return {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}


def test_the_wheels_hold_the_product_and_its_data(tmp_path: Path) -> None:
    names = _build_wheel(ROOT, tmp_path / "gateway")
    executor = _build_wheel(ROOT / EXECUTOR, tmp_path / "executor")
    packages = ("adapters", "certificates", "gateway", "guides", "lora_store", "ops", "triton_repo")
    tracked = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", *packages],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    # The wheels contain the scripts for Redis, migrations of the database, templates and all other
    # tracked files, and no others.
    assert names | executor == {
        name for name in tracked.stdout.splitlines() if name != f"{EXECUTOR}/pyproject.toml"
    }
    assert {name for name in executor if not name.startswith(f"{EXECUTOR}/")} == set()
    assert {name for name in names if name.startswith(f"{EXECUTOR}/")} == set()
    assert {"gateway/tenancy/limits/script.lua", "gateway/conversations/look.lua"} <= names
    assert MIGRATIONS
    assert names >= MIGRATIONS
    assert {f"{package}/py.typed" for package in packages} <= names


def test_the_sdist_holds_the_migrations(tmp_path: Path) -> None:
    with tarfile.open(_build("sdist", ROOT, tmp_path / "sdist")) as sdist:
        assert {name.partition("/")[2] for name in sdist.getnames()} >= MIGRATIONS


def test_the_executor_is_of_the_gateways_release() -> None:
    own = tomllib.loads((ROOT / EXECUTOR / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert own["version"] == PROJECT["version"]
    assert own["dependencies"] == [f"{PROJECT['name']}[local]=={PROJECT['version']}"]
