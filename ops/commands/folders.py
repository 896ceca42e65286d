"""Folders that an operator names on a command line."""

from __future__ import annotations

from pathlib import Path


def adapter_folder_problem(folder: Path) -> str | None:
    """Return the error message for an adapter's folder, or None if the folder exists."""
    if folder.is_dir():
        return None
    found = "is a file" if folder.exists() else "does not exist"
    return f"{folder} {found}; name the adapter's folder"
