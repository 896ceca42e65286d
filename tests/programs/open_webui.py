"""Open WebUI with a tool, used in a browser, over chat completions."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from docs.browser import chromium
from tests.programs.documented import documented_variables
from tests.programs.engine.script import Call, Script
from tests.programs.program import NotAvailable, Workspace
from tests.programs.pypi import PypiProgram
from tests.support.patience import PATIENCE_S

_TREE = Path(__file__).parents[2]


class OpenWebui(PypiProgram):
    name = "open-webui"
    packages = ("open-webui",)
    executable = "open-webui"
    # torch embeds documents, which no run has. With its dependencies it takes 3 GB.
    left_out = ("torch",)
    # On a busy machine the server takes minutes to start.
    timeout_s = 2 * PATIENCE_S

    def install(self, folder: Path, versions: Mapping[str, str]) -> None:
        if chromium() is None:
            raise NotAvailable("needs a browser: apt-get install chromium-headless-shell")
        super().install(folder, versions)

    def prepare(self, workspace: Workspace) -> Script:
        note = workspace.write_note()
        return Script(calls=[Call("read_note", {"name": str(note)})])

    def environment(self, workspace: Workspace) -> Mapping[str, str]:
        return {
            **documented_variables("clients.md", "open-webui.sh", workspace),
            "DATA_DIR": str(workspace.home / "data"),
            "HF_HUB_OFFLINE": "1",
            "OFFLINE_MODE": "true",
            # The default embedding engine needs torch and a model from the Hugging Face hub.
            "RAG_EMBEDDING_ENGINE": "openai",
            "WEBUI_AUTH": "false",
            "WEBUI_SECRET_KEY": "none",
            "PYTHONPATH": str(_TREE),
        }

    def command(self, workspace: Workspace) -> Sequence[str | Path]:
        session = [sys.executable, "-m", "tests.programs.open_webui_session"]
        return [*session, self.path(workspace), workspace.model]
