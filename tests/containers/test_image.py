"""The gateway's image: contents, labels, and reproducible builds."""

from __future__ import annotations

import hashlib
import json
import tarfile
from pathlib import Path
from typing import IO

from tests.containers.engine import TREE, Engine
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


def test_two_builds_have_the_same_layers(engine: Engine, tmp_path: Path) -> None:
    """Compare two builds from folders with different file times. The second used no build cache.

    Compare the entries of each layer without their order, because Docker does not always write them
    in the same order.
    """
    base = engine.inspect(PYTHON)["RootFS"]["Layers"]
    for name in (IMAGE, AGAIN):
        assert engine.inspect(name)["RootFS"]["Layers"][: len(base)] == base
    first, again = (_own_layers(engine, name, tmp_path, len(base)) for name in (IMAGE, AGAIN))
    assert len(first) == len(again) == 2
    for one, other in zip(first, again, strict=True):
        assert one
        assert one ^ other == set()


def _own_layers(
    engine: Engine, name: str, folder: Path, base: int
) -> list[set[tuple[object, ...]]]:
    """Return the entries of each layer above the `base` layers of the base image."""
    file = folder / "image.tar"
    engine.docker("image", "save", "--output", file, name)
    with tarfile.open(file) as image:
        [manifest] = json.load(_read(image, "manifest.json"))
        found = []
        for layer in manifest["Layers"][base:]:
            with tarfile.open(fileobj=_read(image, layer)) as entries:
                found.append({_describe(entries, entry) for entry in entries})
    return found


def _read(archive: tarfile.TarFile, name: str | tarfile.TarInfo) -> IO[bytes]:
    file = archive.extractfile(name)
    assert file is not None
    return file


def _describe(archive: tarfile.TarFile, entry: tarfile.TarInfo) -> tuple[object, ...]:
    digest = hashlib.sha256(_read(archive, entry).read()).hexdigest() if entry.isreg() else ""
    owner = (entry.uid, entry.gid, entry.uname, entry.gname)
    described = (
        entry.name,
        entry.type,
        entry.linkname,
        entry.mode,
        entry.mtime,
        entry.size,
        digest,
    )
    return (*described, *owner, *sorted(entry.pax_headers.items()))


def test_every_module_of_the_gateway_can_be_imported(engine: Engine) -> None:
    assert _run(engine, "python", "-c", EVERY_MODULE, *PACKAGES) == ""


def test_it_has_what_the_gateway_needs_and_no_more(engine: Engine) -> None:
    sizes = json.loads(_run(engine, "python", "-c", _SIZES))
    largest = sorted(sizes.items(), key=lambda item: -item[1])[:10]
    print(*(f"{size / MIB:6.1f} {name}" for name, size in largest), sep="\n")
    assert sum(sizes.values()) < 120 * MIB
    assert not {"pip", "setuptools", "transformers", "huggingface_hub", "mypy"} & set(sizes)
    assert {"asyncpg", "gateway"} <= set(sizes)
    added = engine.inspect(IMAGE)["Size"] - engine.inspect(PYTHON)["Size"]
    assert added < 122 * MIB


def test_it_has_the_migrations_of_the_database(engine: Engine) -> None:
    folder = "from pathlib import Path; import gateway.database as package; "
    folder += "folder = Path(package.__file__).with_name('migrations'); "
    found = _run(
        engine, "python", "-c", folder + "print(*(file.name for file in folder.iterdir()))"
    )
    migrations = TREE / "gateway/database/migrations"
    assert set(found.split()) == {file.name for file in migrations.glob("*.sql")}


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
