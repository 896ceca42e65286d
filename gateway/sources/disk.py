"""Sources of LoRA adapters on this machine's disks: folders, and the Hugging Face cache.

The cache has a folder ``models--OWNER--NAME`` for each model (huggingface_hub, "Understand
caching"). In this folder, the file ``refs/REVISION`` contains the hash of a commit. The folder
``snapshots/COMMIT`` has symbolic links to the files, which are in ``blobs``.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from adapters.errors import MissingFile, SourceNotAllowed
from gateway.sources.source import Source

_MIN_COMMIT_CHARS = 7
_COMMIT_CHARS = 40


class LocalFolder(NamedTuple):
    """A folder with an adapter's files.

    All files must be inside the folder `within`, also the targets of symbolic links.
    """

    folder: Path
    within: Path


def find_hub_cache(environment: Mapping[str, str] = os.environ) -> Path:
    """Return the folder of the Hugging Face cache, by the same rules as huggingface_hub."""
    if cache := environment.get("HF_HUB_CACHE"):
        return Path(cache).expanduser()
    general = environment.get("XDG_CACHE_HOME", "~/.cache")
    home = environment.get("HF_HOME", os.path.join(general, "huggingface"))
    return Path(home).expanduser() / "hub"


def find_folder(source: Source, below: Iterable[Path] | None) -> LocalFolder:
    """Return the folder of a ``file`` source.

    `below` lists the allowed parent folders. The folder must be in one of these folders after
    resolving symbolic links. If `below` is None, any folder is allowed.

    Raises:
        SourceNotAllowed: the folder is not allowed, or does not exist. The message is the same in
            both cases, because it must not reveal which folders exist.
        MissingFile: `below` is None, and the folder does not exist.
    """
    folder = Path(str(source))
    if below is None:
        if not os.path.isdir(folder):
            says = f"{source} is no folder on the gateway's machine; create it, or name another one"
            raise MissingFile("source", "source", str(source), "a folder", says=says)
        return LocalFolder(folder, Path(os.path.realpath(folder)))
    for root in below:
        if is_folder_below(root, folder):
            return LocalFolder(folder, root)
    allowed = "a folder below what GATEWAY_ADAPTER_SOURCES lists, or below GATEWAY_ADAPTER_ROOT"
    raise SourceNotAllowed("request", "source", str(source), allowed)


def is_folder_below(root: Path, folder: Path) -> bool:
    """Return True if `folder` is a folder that is inside `root` after resolving all links.

    Return False for invalid paths (NUL characters, overlong names, circular links) and for folders
    that this process may not read.
    """
    # Use the functions of os.path, which return False for invalid paths. The methods of pathlib
    # would raise exceptions.
    return os.path.isdir(folder) and Path(os.path.realpath(folder)).is_relative_to(
        os.path.realpath(root)
    )


def find_snapshot(source: Source, cache: Path, root: Path | None) -> LocalFolder:
    """Return the folder of an ``hf`` source, without downloading anything.

    The folder is the snapshot in `cache`. If there is no snapshot, a source without a revision may
    also be the folder ``OWNER/NAME`` in `root`. Raise `MissingFile` if neither folder exists.
    """
    owner, name, *inner = source.path
    model = cache / f"models--{owner}--{name}"
    commit = _find_commit(model, source.revision or "main")
    if commit is not None:
        return LocalFolder(model.joinpath("snapshots", commit, *inner), model)
    if root is not None and source.revision is None and os.path.isdir(root / owner / name):
        return LocalFolder(root.joinpath(owner, name, *inner), root)
    allowed = "what is in the Hugging Face cache of this machine (HF_HOME); nothing is downloaded"
    says = (
        f"{source} is not in the Hugging Face cache of the gateway's machine (HF_HOME), and "
        f"nothing is downloaded; run `hf download {owner}/{name}` there"
    )
    raise MissingFile("source", "source", str(source), allowed, says=says)


def _find_commit(model: Path, revision: str) -> str | None:
    """Return the full commit hash for `revision`: a branch, a tag or an abbreviated hash.

    Return None if the revision is not in the cache, or if the abbreviated hash is ambiguous.
    """
    try:
        commit = (
            (model / "refs" / revision).read_text(encoding="ascii")[: _COMMIT_CHARS + 1].strip()
        )
    except (OSError, UnicodeDecodeError):
        commit = revision
    if len(commit) < _MIN_COMMIT_CHARS or not commit.isalnum():
        return None
    try:
        found = [each.name for each in (model / "snapshots").iterdir()]
    except OSError:
        return None
    begun = [name for name in found if name.startswith(commit)]
    return begun[0] if len(begun) == 1 else None
