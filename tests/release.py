"""Release checks, run by ``make release-check`` after all tests.

Version numbers agree, both distributions build, and their wheels install and start on each Python
found. A Python that is missing on this machine is reported.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
EXECUTOR = ROOT / "triton_repo/cpu_executor"
BIN = Path(sys.executable).parent
# Other files that have the release's version, with a regex for it.
_NAMED = {
    "triton_repo/cpu_executor/pyproject.toml": r'^version = "(.*)"$',
    "Dockerfile": r'image\.version="(.*)"',
    "deploy/kubernetes/base/kustomization.yaml": r"newTag: (.*)",
    "deploy/kubernetes/overlays/demo-cpu/kustomization.yaml": r"newTag: (.*)-demo",
    "CHANGELOG.md": r"^## \[(\d.*)\] - \d{4}-\d\d-\d\d$",
}
_STARTS = (
    "import pkgutil, importlib, gateway\n"
    "for module in pkgutil.walk_packages(gateway.__path__, 'gateway.'):\n"
    "    if module.name not in ('gateway.__main__', 'gateway.observability.tracing'):\n"
    "        importlib.import_module(module.name)\n"
)


def main() -> int:
    """Run all checks, print a line for each, and return 1 if one failed."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    failed = [*_differing_versions(version["version"])]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        failed += _build(folder)
        for python in PYTHONS:
            failed += _start_on(python, folder)
    for line in failed:
        print(f"FAILED: {line}")
    return 1 if failed else 0


def _differing_versions(version: str) -> Iterator[str]:
    for path, pattern in _NAMED.items():
        found = re.search(pattern, (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE)
        if found is None or found[1] != version:
            yield f"{path}: {found and found[1]}, pyproject.toml: {version}"
    print(f"version {version}: compared in {len(_NAMED)} files")


def _build(folder: Path) -> list[str]:
    """Build both distributions. Compare the checkout's wheel with one built from the sdist."""
    for source in (ROOT, EXECUTOR):
        _run(BIN / "hatchling", "build", "-t", "wheel", "-d", folder / "wheels", cwd=source)
    _run(BIN / "hatchling", "build", "-t", "sdist", "-d", folder / "sdist", cwd=ROOT)
    [sdist] = (folder / "sdist").glob("*.tar.gz")
    (folder / "unpacked").mkdir()
    _run("tar", "-xzf", sdist, "-C", folder / "unpacked")
    [unpacked] = (folder / "unpacked").iterdir()
    _run(BIN / "hatchling", "build", "-t", "wheel", "-d", folder / "again", cwd=unpacked)
    [again] = (folder / "again").glob("*.whl")
    [wheel] = (folder / "wheels").glob(again.name)
    same = zipfile.ZipFile(again).namelist() == zipfile.ZipFile(wheel).namelist()
    print(f"built {wheel.name}, {sdist.name} and the CPU executor")
    return [] if same else ["the sdist makes another wheel than the checkout"]


def _start_on(python: str, folder: Path) -> list[str]:
    """Install the wheels on a Python with the locked dependencies, and import all modules."""
    found = subprocess.run(
        [BIN / "uv", "python", "find", "--no-python-downloads", python],
        capture_output=True,
        text=True,
        check=False,
    )
    if found.returncode:
        print(f"Python {python}: not on this machine")
        return []
    own = folder / python
    _run(BIN / "uv", "venv", "--quiet", "--python", found.stdout.strip(), own)
    install = (BIN / "uv", "pip", "install", "--quiet", "--no-deps", "--python", own / "bin/python")
    _run(*install, "--require-hashes", "--requirement", ROOT / "requirements/gateway.txt")
    _run(*install, *(folder / "wheels").glob("*.whl"))
    for command in (
        (own / "bin/gateway", "--version"),
        (own / "bin/gateway", "serve", "--help"),
        (own / "bin/python", "-c", _STARTS),
    ):
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode:
            return [f"Python {python}: {command[1]}: {done.stderr[-1000:]}"]
    print(f"Python {python}: installed, every module imported")
    return []


def _run(*command: str | Path, cwd: Path = ROOT) -> None:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))}:\n{done.stdout}{done.stderr}")


if __name__ == "__main__":
    sys.exit(main())
