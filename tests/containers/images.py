"""Builds all images, in the host's network: ``python -m tests.containers.images``.

The project's images come from its unchanged Dockerfile. Without an image registry, base images
cannot be pulled. They are built under the same names from Debian packages, with this machine's pip
configuration.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.containers.engine import FOLDER, TREE, Engine, mirror, running
from tests.support.dockerfile import DOCKERFILE, stages

HERE = Path(__file__).parent
RELEASE = "bookworm"
PYTHON = stages(DOCKERFILE.read_text(encoding="utf-8"))["build"].base
COMPOSE = ("compose", "--file", "docker-compose.yml", "--file", str(HERE / "override.yaml"))
# Stage of stand_ins/Dockerfile -> image name in docker-compose.yml.
STAND_INS = {
    "redis": "redis:7.4-bookworm",
    "postgres": "postgres:18-bookworm",
    "postgres-15": "postgres:15-bookworm",
    "prometheus": "prom/prometheus:v3.5.0",
    "triton": "stand-in-triton",
}
AGAIN = "triton-openai-gateway:again"
SBOM = FOLDER / "sbom"
AUTHORITIES = "/etc/ssl/certs/ca-certificates.crt"
# Files that Debian's slim images or `python:3.11-slim-bookworm` leave out: documentation, package
# caches and Python's tests.
_LEFT_OUT = (
    *("var/cache/apt", "var/lib/apt/lists", "usr/lib/python3.11/test"),
    *(f"usr/share/{name}" for name in ("doc", "groff", "info", "lintian", "locale", "man")),
)
# pip options that do not name a folder of this machine.
_OF_PIP = ("index-url", "trusted-host", "proxy", "timeout", "default-timeout")


def make(engine: Engine) -> None:
    """Build all images. Raises CalledProcessError if a build fails."""
    if not engine.has_image(PYTHON):
        with _told("base"):
            _make_base(engine)
    with _told("project"):
        engine.docker(*COMPOSE, "build", "gateway", "demo")
    with _told("project, from scratch"):
        _build_again(engine)
    with _told("sbom"):
        command = ["build", "--network", "host", "--target", "sbom", "--output", str(SBOM)]
        engine.docker(*command, TREE, DOCKER_BUILDKIT="1")
    for stage, name in STAND_INS.items():
        with _told(stage):
            command = ["build", "--network", "host", "--target", stage, "--tag", name]
            engine.docker(*command, HERE / "stand_ins", DOCKER_BUILDKIT="1")


def _build_again(engine: Engine) -> None:
    """Build the gateway's image again from a copy with newer file times, without build cache."""
    with tempfile.TemporaryDirectory(prefix="again-") as name:
        folder = Path(name)
        let_in = (TREE / ".dockerignore").read_text(encoding="utf-8").splitlines()
        paths = [line.removeprefix("!") for line in let_in if line.startswith("!")]
        for path in [*paths, "Dockerfile", ".dockerignore"]:
            to = folder / path
            if (TREE / path).is_dir():
                shutil.copytree(TREE / path, to, copy_function=shutil.copy)  # with new times
            else:
                shutil.copy(TREE / path, to)
        command = ["build", "--network", "host", "--no-cache", "--target", "gateway"]
        engine.docker(*command, "--tag", AGAIN, folder, DOCKER_BUILDKIT="1")


@contextmanager
def _told(image: str) -> Iterator[None]:
    began = time.monotonic()
    yield
    print(f"image {image}: {time.monotonic() - began:.0f} s", flush=True)


def _make_base(engine: Engine) -> None:
    """Build a stand-in for `python:3.11-slim-bookworm`."""
    with tempfile.TemporaryDirectory(prefix="base-") as name:
        root = Path(name)
        packages = ["ca-certificates", "python3-distutils", "python3-venv", "libpython3.11"]
        command = ["debootstrap", "--variant=minbase", f"--include={','.join(packages)}"]
        subprocess.run([*command, RELEASE, name, mirror()], check=True, stdout=subprocess.DEVNULL)
        (root / "usr/bin/python").symlink_to("python3")
        for folder in _LEFT_OUT:
            shutil.rmtree(root / folder, ignore_errors=True)
        (root / AUTHORITIES.lstrip("/")).write_bytes(Path(AUTHORITIES).read_bytes())
        (root / "etc/pip.conf").write_text(_pip_configuration())
        changes = ["ENV LANG=C.UTF-8", f"ENV SSL_CERT_FILE={AUTHORITIES}", 'CMD ["python3"]']
        options = [word for change in changes for word in ("--change", change)]
        tar = root.with_suffix(".tar")
        try:
            subprocess.run(["tar", "--create", "--file", tar, "--directory", root, "."], check=True)
            engine.docker("import", *options, tar, PYTHON)
        finally:
            tar.unlink(missing_ok=True)


def _pip_configuration() -> str:
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    ).stdout
    lines = ["[global]", f"cert = {AUTHORITIES}"]
    for line in listed.splitlines():
        name, _, value = line.partition("=")
        if (option := name.rpartition(".")[2]) in _OF_PIP:
            lines.append(f"{option} = {value.strip(chr(39))}")
    return "\n".join([*lines, ""])


def main() -> None:
    # Builds use the host's network, so they need neither a bridge nor firewall rules.
    with running("--bridge=none", "--iptables=false", "--ip-forward=false") as engine:
        make(engine)


if __name__ == "__main__":
    main()
