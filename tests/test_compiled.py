"""The wheel with a compiled token path: compiled modules behave like their sources."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
import zipfile
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
HOOK = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["hatch"][
    "build"
]["targets"]["wheel"]["hooks"]["custom"]
# Tests of each compiled module, and of faults and disconnects during a served stream.
TESTS = (
    "tests/gateway/api/test_answers.py",
    "tests/gateway/api/test_request_ends.py",
    "tests/gateway/pipeline/test_faults.py",
    "tests/gateway/tokenization/test_text_stream.py",
    "tests/gateway/tokenization/test_vocabulary.py",
    "tests/gateway/triton/http2",
    "tests/gateway/triton/test_response_template.py",
    "tests/gateway/triton/test_transports.py",
    "tests/test_compiled.py::test_what_is_listed_is_what_is_imported",
)
_COMPILED = "TOKEN_PATH_IS_COMPILED"


@pytest.mark.skipif(_COMPILED not in os.environ, reason="run by the test below")
@pytest.mark.parametrize("path", HOOK["modules"])
def test_what_is_listed_is_what_is_imported(path: str) -> None:
    name = path.removesuffix(".py").replace("/", ".")
    module = import_module(name)
    assert module.__file__ is not None
    assert module.__file__.endswith(".so")


@pytest.mark.slow
def test_the_compiled_token_path_passes_the_tests_of_its_sources(tmp_path: Path) -> None:
    installed = tmp_path / "installed"
    # The tests also need the CPU executor, which is not compiled.
    for source in (ROOT, ROOT / "triton_repo/cpu_executor"):
        to = tmp_path / source.name
        built = subprocess.run(
            [Path(sys.executable).parent / "hatchling", "build", "-t", "wheel", "-d", to],
            cwd=source,
            env=os.environ | {"HATCH_BUILD_HOOK_ENABLE_CUSTOM": "true"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert built.returncode == 0, built.stdout + built.stderr
        [wheel] = to.glob("*.whl")
        assert wheel.name.endswith("-none-any.whl") == (source != ROOT)
        zipfile.ZipFile(wheel).extractall(installed)
    # The tests must import the installed packages, so the checkout is appended to the path and is
    # not the working directory. They run in one process, as each would import everything in 5 s of
    # CPU time.
    command = [sys.executable, "-m", "pytest", "-q", "--import-mode=append"]
    command += ["-p", "no:xdist", "-p", "no:cacheprovider", "-m", "not slow", *TESTS]
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    env |= {"PYTHONPATH": str(installed), "PYTHONSAFEPATH": "1", _COMPILED: "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-10_000:] + done.stderr[-2000:]
