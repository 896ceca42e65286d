"""A separate Docker engine for this suite: Debian's packages, its own folder, its own processes.

Debian's release has the engine but no Compose v2 and no buildx. These two are taken from the next
release and unpacked into the folder as client plug-ins. The system's init starts none of the
installed services, and a Docker engine that already runs is not touched.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

TREE = Path(__file__).parents[2]
FOLDER = TREE / "build/containers"
"""Folder that persists between runs: plug-ins, images and layers."""

WITHIN = 120.0
"""Timeout of commands in seconds, for those that hang."""

_PACKAGES = {"dockerd": "docker.io", "iptables": "iptables", "debootstrap": "debootstrap"}
_PLUGINS = ("docker-buildx", "docker-compose")
_PLUGINS_FROM = "trixie"


class NoEngine(Exception):
    """Error that no Docker engine can run here. The message says why."""


def install() -> None:
    """Install missing packages and plug-ins. Raises NoEngine if that is impossible."""
    if os.geteuid() != 0:
        raise NoEngine("an engine of its own takes root")
    if shutil.which("apt-get") is None:
        raise NoEngine("the engine is installed from Debian, and this machine has no apt-get")
    try:
        # Check that new mount, process and network namespaces are allowed.
        _run("unshare", "--mount", "--net", "--pid", "--fork", "--mount-proc", "true")
        if missing := [package for name, package in _PACKAGES.items() if not shutil.which(name)]:
            _run("apt-get", "update", "--quiet")
            # Wait for the lock if another process installs packages. In run level 1, packages do
            # not start their services.
            options = ("--yes", "--no-install-recommends", "-o", "DPkg::Lock::Timeout=300")
            _run("apt-get", "install", *options, *missing, RUNLEVEL="1")
        if not all((_plugins() / name).exists() for name in _PLUGINS):
            _unpack_plugins()
    except subprocess.CalledProcessError as error:
        said = (error.stderr.strip() or str(error)).splitlines()[-1]
        raise NoEngine(f"{error.cmd[0]}: {said}") from error


def mirror() -> str:
    """Return the URL from which this machine gets Debian packages."""
    targets = _run("apt-get", "indextargets", "--format", "$(REPO_URI)", "Origin: Debian")
    return targets.split()[0]


def _plugins() -> Path:
    return FOLDER / "config/cli-plugins"


def _unpack_plugins() -> None:
    _plugins().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="plugins-") as name:
        folder = Path(name)
        (folder / "lists/partial").mkdir(parents=True)
        source = folder / "sources.list"
        keys = "/usr/share/keyrings/debian-archive-keyring.gpg"
        source.write_text(f"deb [signed-by={keys}] {mirror()} {_PLUGINS_FROM} main\n")
        settings = {
            "Dir::Etc::SourceList": source,
            "Dir::Etc::SourceParts": "/dev/null",
            "Dir::State::Lists": folder / "lists",
            "Dir::Cache": folder,
            "APT::Sandbox::User": "root",
        }
        options = [word for item in settings.items() for word in ("-o", "{}={}".format(*item))]
        _run("apt-get", *options, "update", "--quiet")
        _run("apt-get", *options, "download", *_PLUGINS, cwd=folder)
        for package in folder.glob("*.deb"):
            _run("dpkg-deb", "--extract", str(package), name)
        for plugin in _PLUGINS:
            shutil.copy(folder / "usr/libexec/docker/cli-plugins" / plugin, _plugins())


class Engine:
    """A running Docker engine."""

    def __init__(self, folder: Path) -> None:
        self.environment = {
            "DOCKER_HOST": f"unix://{folder}/socket",
            "DOCKER_CONFIG": str(FOLDER / "config"),
        }

    def docker(self, *arguments: str | Path, stdin: str = "", **environment: str) -> str:
        """Return the output of `docker`. Raises CalledProcessError after printing its stderr."""
        command = ["docker", *(str(argument) for argument in arguments)]
        env = os.environ | self.environment | environment
        pipes: dict[str, Any] = {"input": stdin, "capture_output": True, "text": True}
        done = subprocess.run(command, env=env, cwd=TREE, check=False, **pipes)
        if done.returncode:
            print(" ".join(command), done.stdout, done.stderr, sep="\n")
            raise subprocess.CalledProcessError(done.returncode, command, done.stdout, done.stderr)
        return done.stdout

    def inspect(self, name: str) -> Any:
        """Return `docker inspect` of a container, an image, a volume or a network."""
        return json.loads(self.docker("inspect", name))[0]

    def has_image(self, name: str) -> bool:
        return bool(self.docker("image", "ls", "--quiet", name))


@contextmanager
def running(*options: str) -> Iterator[Engine]:
    """Start the engine on the images of `FOLDER`. `options` are further options of dockerd."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="engine-") as name:  # a short path, as it has sockets
        folder = Path(name)
        log = FOLDER / "dockerd.log"
        (folder / "daemon.json").write_text("{}")  # instead of the machine's daemon.json
        command = ["dockerd", "--config-file", f"{name}/daemon.json"]
        command += ["--data-root", str(FOLDER / "data")]
        command += ["--exec-root", f"{name}/exec", "--pidfile", f"{name}/pid"]
        command += ["--host", f"unix://{name}/socket", *options]
        with log.open("wb") as file:
            process = subprocess.Popen(command, stdout=file, stderr=file)
        try:
            engine = Engine(folder)
            _until_it_answers(engine, process, log)
            yield engine
        finally:
            process.terminate()
            try:
                process.wait(WITHIN)
            finally:
                process.kill()


def _until_it_answers(engine: Engine, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + WITHIN
    command = ["docker", "info"]
    env = os.environ | engine.environment
    while subprocess.run(command, env=env, capture_output=True, check=False).returncode:
        if process.poll() is not None or time.monotonic() > deadline:
            raise NoEngine(f"dockerd: {log.read_text().splitlines()[-1]}")
        time.sleep(0.1)


def _run(*command: str, cwd: Path | None = None, **environment: str) -> str:
    env = os.environ | {"DEBIAN_FRONTEND": "noninteractive"} | environment
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=True)
    return done.stdout
