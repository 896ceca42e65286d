"""Configurations shown in docs/, with the gateway's address of a run."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from tests.programs.program import Workspace

_DOCS = Path(__file__).parents[2] / "docs"
_SHOWN_URL = "http://127.0.0.1:9000"


def documented(page: str, file: str, workspace: Workspace) -> str:
    """Return the block of a docs page that is marked as this file."""
    text = (_DOCS / page).read_text(encoding="utf-8")
    block = re.search(rf"<!-- file: {re.escape(file)} -->\n+```\w+\n(.*?)^```$", text, re.M | re.S)
    assert block is not None, f"docs/{page} has no block of {file}"
    assert _SHOWN_URL in block[1], f"docs/{page}: {file} does not name {_SHOWN_URL}"
    return block[1].replace(_SHOWN_URL, workspace.url)


def documented_variables(page: str, file: str, workspace: Workspace) -> dict[str, str]:
    """Return the variables from a block of `export` lines."""
    lines = documented(page, file, workspace).splitlines()
    assert all(line.startswith("export ") for line in lines), lines
    words = [shlex.split(line.removeprefix("export ")) for line in lines]
    return dict(word.split("=", 1) for line in words for word in line)
