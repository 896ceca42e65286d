"""Checks of folders that an operator names on a command line."""

from __future__ import annotations

from pathlib import Path


def adapter_folder_problem(folder: Path) -> str | None:
    """Return an error message if an adapter's folder does not exist, else None."""
    if folder.is_dir():
        return None
    found = "is a file" if folder.exists() else "does not exist"
    return f"{folder} {found}; name the adapter's folder"
