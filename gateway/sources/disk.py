"""Sources on this machine's disks: folders, and the cache that Hugging Face's tools fill.

The cache's layout (huggingface_hub, "Understand caching"): ``models--OWNER--NAME/refs/REVISION``
holds a commit, ``snapshots/COMMIT/`` the files, as links into ``blobs/``.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from adapters.errors import MissingFile, SourceNotAllowed
from gateway.sources.source import Source

_LEAST_OF_A_COMMIT = 7
_COMMIT = 40


class OnDisk(NamedTuple):
    """A folder, and the one in which its files must really lie."""

    folder: Path
    within: Path


def hub_cache(environment: Mapping[str, str] = os.environ) -> Path:
    """Where huggingface_hub keeps what it has downloaded."""
    if cache := environment.get("HF_HUB_CACHE"):
        return Path(cache).expanduser()
    general = environment.get("XDG_CACHE_HOME", "~/.cache")
    home = environment.get("HF_HOME", os.path.join(general, "huggingface"))
    return Path(home).expanduser() / "hub"


def folder_of(source: Source, below: Iterable[Path] | None) -> OnDisk:
    """The folder of a ``file`` source.

    `below` has the folders in one of which it must lie after all links, None says that any will do.
    Raises `SourceNotAllowed`, in the same words for what is nowhere, and `MissingFile`.
    """
    folder = Path(str(source))
    if below is None:
        if not os.path.isdir(folder):
            says = f"{source} is no folder on the gateway's machine; create it, or name another one"
            raise MissingFile("source", "source", str(source), "a folder", says=says)
        return OnDisk(folder, Path(os.path.realpath(folder)))
    for root in below:
        if is_folder_below(root, folder):
            return OnDisk(folder, root)
    allowed = "a folder below what GATEWAY_ADAPTER_SOURCES lists, or below GATEWAY_ADAPTER_ROOT"
    raise SourceNotAllowed("request", "source", str(source), allowed)


def is_folder_below(root: Path, folder: Path) -> bool:
    """Whether it is a folder that really lies in `root`, after all links.

    False, too, for what cannot be a path (NUL characters, names too long, links in a circle) and
    for what this process may not look at.
    """
    # pathlib's methods raise for these, and os.path's do not.
    return os.path.isdir(folder) and Path(os.path.realpath(folder)).is_relative_to(
        os.path.realpath(root)
    )


def snapshot_of(source: Source, cache: Path, root: Path | None) -> OnDisk:
    """The folder of an ``hf`` source: its snapshot in `cache`, else ``OWNER/NAME`` below `root`.

    Nothing is downloaded. A folder below `root` has no revisions. Raises `MissingFile`.
    """
    owner, name, *inner = source.path
    model = cache / f"models--{owner}--{name}"
    commit = _commit(model, source.revision or "main")
    if commit is not None:
        return OnDisk(model.joinpath("snapshots", commit, *inner), model)
    if root is not None and source.revision is None and os.path.isdir(root / owner / name):
        return OnDisk(root.joinpath(owner, name, *inner), root)
    allowed = "what is in the Hugging Face cache of this machine (HF_HOME); nothing is downloaded"
    says = (
        f"{source} is not in the Hugging Face cache of the gateway's machine (HF_HOME), and "
        f"nothing is downloaded; run `hf download {owner}/{name}` there"
    )
    raise MissingFile("source", "source", str(source), allowed, says=says)


def _commit(model: Path, revision: str) -> str | None:
    """The commit of a branch, a tag or the beginning of a commit; None where there is no such."""
    try:
        commit = (model / "refs" / revision).read_text(encoding="ascii")[: _COMMIT + 1].strip()
    except (OSError, UnicodeDecodeError):
        commit = revision
    if len(commit) < _LEAST_OF_A_COMMIT or not commit.isalnum():
        return None
    try:
        found = [each.name for each in (model / "snapshots").iterdir()]
    except OSError:
        return None
    begun = [name for name in found if name.startswith(commit)]
    return begun[0] if len(begun) == 1 else None
