"""Makes all images, in the network of this machine: ``python -m tests.containers.images``.

The project's own come from its Dockerfile as it is. What that and docker-compose.yml would pull
cannot be pulled without a registry of images, so it is made from Debian's packages, and from pip's
configuration of this machine, under the names that the files use.
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
# Stage of stand_ins/Dockerfile -> the name that docker-compose.yml has it by.
STAND_INS = {
    "redis": "redis:7.4-bookworm",
    "prometheus": "prom/prometheus:v3.5.0",
    "triton": "stand-in-triton",
}
AGAIN = "triton-openai-gateway:again"
SBOM = FOLDER / "sbom"
AUTHORITIES = "/etc/ssl/certs/ca-certificates.crt"
# What Debian's slim images, which `python:3.11-slim-bookworm` is made of, leave out; and packages
# that were unpacked, and tests, as that image does.
_LEFT_OUT = (
    *("var/cache/apt", "var/lib/apt/lists", "usr/lib/python3.11/test"),
    *(f"usr/share/{name}" for name in ("doc", "groff", "info", "lintian", "locale", "man")),
)
# Options of pip that are no folder of this machine.
_OF_PIP = ("index-url", "trusted-host", "proxy", "timeout", "default-timeout")


def make(engine: Engine) -> None:
    """Raises CalledProcessError where one cannot be made."""
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
    """The gateway's image once more, of a copy that is younger, by nothing that was made before."""
    with tempfile.TemporaryDirectory(prefix="again-") as name:
        folder = Path(name)
        let_in = (TREE / ".dockerignore").read_text(encoding="utf-8").splitlines()
        paths = [line.removeprefix("!") for line in let_in if line.startswith("!")]
        for path in [*paths, "Dockerfile", ".dockerignore"]:
            to = folder / path
            if (TREE / path).is_dir():
                shutil.copytree(TREE / path, to, copy_function=shutil.copy)  # without times
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
    """Python on Debian, as `python:3.11-slim-bookworm` is."""
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
    # Neither bridge nor firewall: what is built is in the network of this machine, as it is.
    with running("--bridge=none", "--iptables=false", "--ip-forward=false") as engine:
        make(engine)


if __name__ == "__main__":
    main()
