"""Installation of the Python packages of other gateways, for the comparison of gateways."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

from bench.machine import ROOT
from bench.servers import Bench, Unmeasured

_INSTALL_WITHIN_S = 300


def importable(bench: Bench, name: str, requirements: Sequence[str], modules: Sequence[str]) -> str:
    """Return a PYTHONPATH with which `modules` can be imported.

    If a module cannot be imported yet, `requirements` are installed without their dependencies into
    the folder build/bench/`name`. Without network access, put the packages there yourself. Raises
    Unmeasured if the packages are unavailable.
    """
    folder = ROOT / "build" / "bench" / name
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH"), str(folder)]))
    check = [sys.executable, "-c", f"import {', '.join(modules)}"]
    env = {**os.environ, "PYTHONPATH": path}
    if subprocess.run(check, capture_output=True, env=env, check=False).returncode == 0:
        return path
    bench.log(f"{name}: installing {' '.join(requirements)} into {folder.relative_to(ROOT)}")
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    install += ["--no-deps", "--upgrade", "--target", str(folder), *requirements]
    for command in (install, check):
        try:
            subprocess.run(
                command,
                check=True,
                capture_output=True,
                text=True,
                timeout=_INSTALL_WITHIN_S,
                env=env,
            )
        except (OSError, subprocess.SubprocessError) as error:
            said = getattr(error, "stderr", None) or str(error)
            raise Unmeasured(f"{name} could not be installed: {said.strip()[-200:]}") from error
    return path
