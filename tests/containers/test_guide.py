"""docs/deployment.md shows the real output of its commands, run in a clone of this repository.

With ``GATEWAY_DOCS=write`` in the environment, the test updates the page.
"""

from __future__ import annotations

import difflib
import os
import shutil
import subprocess
from pathlib import Path

from docs.rerun import rerun_on_engine
from tests.containers.engine import TREE, Engine
from tests.containers.gpu import make_engine
from tests.containers.images import HERE

GUIDE = TREE / "docs/deployment.md"


def test_commands_print_what_is_shown(engine: Engine, tmp_path: Path) -> None:
    clone = tmp_path / "clone"
    _clone(clone)
    make_engine(clone / "models")
    variables = engine.environment | {
        "COMPOSE_FILE": f"docker-compose.yml:{HERE / 'override.yaml'}",
        "TRITON_SHM_SIZE": "512mb",
    }
    shown = GUIDE.read_text(encoding="utf-8")
    try:
        printed = rerun_on_engine(shown, clone, variables)
    finally:
        compose = ["compose", "--project-name", "triton-openai-gateway", "--profile", "*"]
        engine.docker(*compose, "down", "--volumes", "--timeout", "5")
    if os.environ.get("GATEWAY_DOCS") == "write":
        GUIDE.write_text(printed, encoding="utf-8")
    lines = (text.splitlines(keepends=True) for text in (shown, printed))
    print("".join(difflib.unified_diff(*lines, "shown", "printed now")))
    assert printed == shown


def _clone(folder: Path) -> None:
    """Copy the files that git tracks or would add to `folder`."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=TREE, capture_output=True, text=True, check=True).stdout
    for name in filter(None, names.split("\0")):
        to = folder / name
        to.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(TREE / name, to)
