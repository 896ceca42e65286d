"""The Dockerfile: linted, and its build steps run on this machine without Docker."""

from __future__ import annotations

import os
import platform
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from ops.commands.up import DEMO_MODEL
from ops.local_stack.ports import PortClaims
from tests.support.dockerfile import DOCKERFILE, Step, stages, steps
from tests.support.installed import EVERY_MODULE, PACKAGES, assert_lists_installed_packages
from tests.support.patience import PATIENCE_S

TREE = DOCKERFILE.parent
BIN = Path(sys.executable).parent
STAGES = stages(DOCKERFILE.read_text(encoding="utf-8"))
TARGETS = ("gateway", "demo")
# Seconds, only for a test that hangs.
WITHIN = 240.0
# Equivalent to `cap_drop: ALL`: file modes then apply to root too.
WITHOUT_CAPABILITIES = ["setpriv", "--bounding-set=-all", "--inh-caps=-all", "--no-new-privs"]


@pytest.mark.parametrize("path", ["Dockerfile", "deploy/kubernetes/overlays/multi-node/Dockerfile"])
def test_hadolint_finds_nothing(path: str) -> None:
    found = subprocess.run(
        [BIN / "hadolint", TREE / path], capture_output=True, text=True, check=False
    )
    assert (found.returncode, found.stdout + found.stderr) == (0, "")


def test_the_default_target_is_the_gateway() -> None:
    assert list(STAGES)[-1] == "gateway"


@pytest.mark.parametrize("target", TARGETS)
def test_the_image_is_fit_for_production(target: str) -> None:
    last = {step.instruction: step for step in steps(STAGES, target)}
    assert last["USER"].text == "10001:10001"
    assert last["STOPSIGNAL"].text == "SIGTERM"
    assert last["ENTRYPOINT"].words() == ["gateway"]
    assert last["CMD"].words()[0] == {"gateway": "serve", "demo": "up"}[target]
    # Only build stages install packages.
    runs = [step.text for step in steps(STAGES, target) if step.instruction == "RUN"]
    assert not [run for run in runs if re.search(r"\b(pip|apt-get|gcc|make)\b", run)]
    from_ = [step.flags["from"] for step in steps(STAGES, target) if "from" in step.flags]
    assert from_ == ["build-user", f"build-{target}"]
    # LABEL a="1" b="2"
    labels = dict(re.findall(r'org\.opencontainers\.image\.(\w+)="([^"]*)"', last["LABEL"].text))
    project = tomllib.loads((TREE / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert labels["title"] == project["name"]
    assert labels["version"] == project["version"]
    assert labels["licenses"] == project["license"]


def test_the_context_holds_what_is_copied_and_no_more() -> None:
    ignore = (TREE / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert "*" in ignore
    let_in = {line[1:] for line in ignore if line.startswith("!")}
    copied = {
        source.rstrip("/")
        for stage in STAGES.values()
        for step in stage.steps
        if step.instruction == "COPY" and "from" not in step.flags
        for source in step.words()[:-1]
    }
    assert let_in == copied
    assert {path for path in copied if not (TREE / path).exists()} == set()
    project = tomllib.loads((TREE / "pyproject.toml").read_text(encoding="utf-8"))
    assert copied >= set(project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"])


class Image:
    """The file system of a build target, in a folder: /x in the Dockerfile is root/x here.

    The stage `build-user` is left out, as it would create a user on this machine.
    """

    def __init__(self, root: Path) -> None:
        root.mkdir()
        self._root = root
        self._away = root.with_name("src")
        self._folder = Path("/")
        self.store = root / "var/lib/gateway"
        self.store.mkdir(parents=True)

    def build(self, stage: str) -> None:
        """Run the steps of a build stage on top of the current content."""
        self.make_writable()
        if self._away.exists():
            self._away.rename(self._root / "src")
        env = {"PATH": os.pathsep.join([str(self._base_python()), os.defpath])}
        env |= {
            name: value
            for name, value in os.environ.items()
            if name.startswith(("PIP_", "UV_", "SSL_"))
        }
        for step in STAGES[stage].steps:
            if step.instruction == "WORKDIR":
                self._folder = Path(step.text)
                self._inside(self._folder).mkdir(parents=True)
            elif step.instruction == "COPY":
                self._copy(step)
            elif step.instruction in ("ARG", "ENV"):
                env |= dict(word.split("=", 1) for word in step.words())
            elif step.instruction == "RUN":
                text, folder = self._here(step.text), self._inside(self._folder)
                subprocess.run(text, shell=True, cwd=folder, env=env, check=True)

    def become(self, target: str) -> None:
        """Apply the target's final stages, and make all files except the store read-only."""
        (self._root / "src").rename(self._away)  # the image has no /src
        self._env = {"PATH": os.defpath}
        self.config: dict[str, list[str]] = {}
        for step in steps(STAGES, target):
            if step.instruction == "COPY" and step.flags["from"] == f"build-{target}":
                assert step.words() == ["/image/", "/"]
                made = self._root / "image"
                shutil.copytree(made, self._root, symlinks=True, dirs_exist_ok=True)
                shutil.rmtree(made)
            elif step.instruction == "ENV":
                self._set(step)
            elif step.instruction in ("HEALTHCHECK", "ENTRYPOINT", "CMD"):
                text = step.text.removeprefix("CMD ")  # HEALTHCHECK begins with CMD
                self.config[step.instruction] = replace(step, text=text).words()
        for path in [self._root, *self._root.rglob("*")]:
            if not path.is_symlink() and path != self.store:
                path.chmod(path.stat().st_mode & ~0o222)

    def run(self, command: list[str], **settings: str) -> subprocess.Popen[str]:
        """Run `command` with the image's environment only. Nothing but the store is writable."""
        env = self._env | settings
        dropped = WITHOUT_CAPABILITIES if os.geteuid() == 0 else []
        executable = shutil.which(command[0], path=env["PATH"])
        assert executable is not None
        return subprocess.Popen(
            [*dropped, executable, *(self._here(part) for part in command[1:])],
            cwd=self._root,
            env=env,
            stderr=subprocess.PIPE,
            text=True,
        )

    def path(self, path: str) -> str:
        """Return where the image's `path` is on this machine."""
        return self._here(path)

    def make_writable(self) -> None:
        self._root.chmod(0o700)
        for path in self._root.rglob("*"):
            if path.is_dir() and not path.is_symlink():
                path.chmod(0o700)

    def _inside(self, path: Path) -> Path:
        return self._root / str(path).lstrip("/")

    def _copy(self, step: Step) -> None:
        *sources, target = step.words()
        for source in sources:
            to = self._inside(self._folder / target)
            if (TREE / source).is_dir():
                shutil.copytree(TREE / source, to, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(TREE / source, to)

    def _set(self, step: Step) -> None:
        for word in step.words():
            name, _, value = word.partition("=")
            self._env[name] = self._here(value).replace("$PATH", self._env["PATH"])

    def _base_python(self) -> Path:
        """Return a folder whose `python` is the base interpreter of this virtual environment."""
        folder = self._root / "python"
        if not folder.exists():
            folder.mkdir()
            version = f"python{sys.version_info.major}.{sys.version_info.minor}"
            (folder / "python").symlink_to(Path(sys.base_prefix) / "bin" / version)
        return folder

    def _here(self, text: str) -> str:
        return re.sub(r"(?<![\w.}])/(?=opt/|image\b|var/lib/gateway)", f"{self._root}/", text)


def _answers(url: str, process: subprocess.Popen[str]) -> httpx.Response:
    deadline = time.monotonic() + WITHIN
    while True:
        try:
            return httpx.get(url, timeout=PATIENCE_S)
        except httpx.TransportError:
            assert process.poll() is None, process.communicate()[1]
            assert time.monotonic() < deadline
            time.sleep(0.1)


def _ends(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Return the process' exit code and stderr."""
    _, errors = process.communicate(timeout=WITHIN)
    return process.returncode, errors


@pytest.fixture
def image(tmp_path: Path) -> Iterator[Image]:
    image = Image(tmp_path / "image")
    yield image
    image.make_writable()


@pytest.mark.slow
def test_the_images_run(image: Image) -> None:
    """Build the demo image on top of the gateway's, whose final stages have left out files."""
    image.build("build")
    image.build("build-sbom")
    sbom = Path(image.path("/opt/")).parent / "src/sbom.json"
    assert_lists_installed_packages(sbom, platform.python_version())
    image.build("build-gateway")
    image.become("gateway")
    with PortClaims() as claims:
        port, nobody = claims.take_free(), claims.take_free()
        settings = {
            "GATEWAY_PORT": str(port),
            "GATEWAY_TOKENIZER_DIR": str(DEMO_MODEL),
            "GATEWAY_TRITON_GRPC": f"127.0.0.1:{nobody}",
            "GATEWAY_ALLOW_ANONYMOUS": "true",
        }
        with _running(image, port, **settings):
            code, errors = _ends(image.run(["python", "-c", EVERY_MODULE, *PACKAGES]))
            assert (code, errors) == (0, "")
            ready = httpx.get(f"http://127.0.0.1:{port}/health/ready", timeout=WITHIN)
            assert (ready.status_code, ready.json()["status"]) == (503, "not ready")
    # Check that the rest of the image is read-only.
    new = image.path("/opt/new")
    code, errors = _ends(image.run(["python", "-c", f"open({new!r}, 'w')"]))
    assert (code, "Permission" in errors) == (1, True)

    image.build("build-demo")
    image.become("demo")
    with PortClaims() as claims:
        port = claims.take_free()
    with _running(image, port, "--port", str(port)):
        asked = {"model": "zh", "prompt": "美国的首都在哪里? \n答案:", "temperature": 0}
        answer = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=asked, timeout=WITHIN)
        assert answer.json()["choices"][0]["text"] == "华盛顿"


@contextmanager
def _running(image: Image, port: int, *arguments: str, **settings: str) -> Iterator[None]:
    """Run the image's ENTRYPOINT and CMD until SIGTERM. HEALTHCHECK must succeed, then fail."""
    command = [*image.config["ENTRYPOINT"], *image.config["CMD"], *arguments]
    check = image.config["HEALTHCHECK"]
    process = image.run(command, **settings)
    try:
        # Published ports are reached from outside, so the test does not use loopback.
        assert _answers(f"http://{_address()}:{port}/health/live", process).status_code == 200
        _until_healthy(image, check, port)
        is_demo = image.config["CMD"][0] == "up"
        if is_demo:
            _until_ready(port, process)
        yield
        process.terminate()
        code, _ = _ends(process)
        # Both codes are an orderly end: uvicorn may end itself with the signal that stopped it.
        assert code in ((0,) if is_demo else (0, -signal.SIGTERM))
        assert _checked(image, check, port) == 1
    finally:
        process.kill()


def _until_healthy(image: Image, check: list[str], port: int) -> None:
    """Repeat the check, since a busy machine may need more than the four seconds of one check."""
    deadline = time.monotonic() + WITHIN
    while _checked(image, check, port):
        assert time.monotonic() < deadline


def _checked(image: Image, check: list[str], port: int) -> int:
    return _ends(image.run(check, GATEWAY_PORT=str(port)))[0]


def _until_ready(port: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + WITHIN
    while _answers(f"http://127.0.0.1:{port}/health/ready", process).status_code != 200:
        assert time.monotonic() < deadline
        time.sleep(0.1)


def _address() -> str:
    """Return a non-loopback address of this machine, or 127.0.0.1 if there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends no packet
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])
