"""The gateway's image: contents, labels, and reproducible builds."""

from __future__ import annotations

import json

from tests.containers.engine import Engine
from tests.containers.images import AGAIN, PYTHON, SBOM
from tests.support.installed import EVERY_MODULE, PACKAGES, assert_lists_installed_packages

IMAGE = "triton-openai-gateway:latest"
MIB = 1 << 20
_SIZES = """
import json, pathlib, sysconfig
folder = pathlib.Path(sysconfig.get_path("purelib"))
files = [(path.relative_to(folder).parts[0], path.lstat().st_size)
         for path in folder.rglob("*") if path.is_file()]
sizes = dict.fromkeys((name for name, _ in files), 0)
for name, size in files:
    sizes[name] += size
print(json.dumps(sizes))
"""


def _run(engine: Engine, *command: str) -> str:
    run = ["container", "run", "--rm", "--read-only", "--network", "none"]
    return engine.docker(*run, "--entrypoint", command[0], IMAGE, *command[1:])


def test_two_builds_have_the_same_layers(engine: Engine) -> None:
    """Compare two builds from folders with different file times. The second used no build cache."""
    layers = [engine.inspect(name)["RootFS"]["Layers"] for name in (IMAGE, AGAIN)]
    base = engine.inspect(PYTHON)["RootFS"]["Layers"]
    assert layers[0] == layers[1]
    assert len(layers[0]) == len(base) + 2


def test_every_module_of_the_gateway_can_be_imported(engine: Engine) -> None:
    assert _run(engine, "python", "-c", EVERY_MODULE, *PACKAGES) == ""


def test_it_has_what_the_gateway_needs_and_no_more(engine: Engine) -> None:
    sizes = json.loads(_run(engine, "python", "-c", _SIZES))
    largest = sorted(sizes.items(), key=lambda item: -item[1])[:10]
    print(*(f"{size / MIB:6.1f} {name}" for name, size in largest), sep="\n")
    assert sum(sizes.values()) < 120 * MIB
    assert not {"pip", "setuptools", "transformers", "huggingface_hub", "mypy"} & set(sizes)
    added = engine.inspect(IMAGE)["Size"] - engine.inspect(PYTHON)["Size"]
    assert added < 122 * MIB


def test_it_says_what_it_is(engine: Engine) -> None:
    labels = engine.inspect(IMAGE)["Config"]["Labels"]
    assert labels["org.opencontainers.image.title"] == "triton-openai-gateway"
    python = _run(engine, "python", "-c", "import platform; print(platform.python_version())")
    assert_lists_installed_packages(SBOM / "sbom.json", python.strip())


def test_the_service_needs_no_shell(engine: Engine) -> None:
    """Check that only the health check needs a shell."""
    config = engine.inspect(IMAGE)["Config"]
    assert (config["Entrypoint"], config["Cmd"]) == (["gateway"], ["serve"])
    # Started with a PATH that has no other program.
    start = "import os; os.execve('/opt/venv/bin/gateway', ['gateway', '--version'], {'PATH': '/'})"
    assert _run(engine, "python", "-c", start).startswith("gateway ")
