"""Detection of files with another format than their names suggest, by their first bytes.

Such files occur in downloaded models and adapters. Examples are a pickle, a GGUF file for
llama.cpp, and the pointer file that Git writes if Git LFS is not installed.
"""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass
from pathlib import Path

HEAD_BYTES = 64
_MAX_ENTRIES = 10_000
_LFS = b"version https://git-lfs.github.com/spec/v1"
_PICKLE_PROTOCOLS = b"\x02\x03\x04\x05"


@dataclass(frozen=True, slots=True)
class FileKind:
    """A file format that is often found in place of the expected format.

    `name` begins with an article. `fix` is advice to the operator.
    """

    name: str
    fix: str

    @property
    def words(self) -> str:
        """Message "is <name>; <fix>", to be written after the file's name."""
        return f"is {self.name}; {self.fix}"


LFS_POINTER = FileKind(
    "a Git LFS pointer, not the file that it stands for",
    "install git-lfs and run `git lfs pull` in the folder that was cloned, or download the file",
)
PICKLE = FileKind(
    "a pickle, which runs code when it is read",
    "save it in safetensors form (safe_serialization=True)",
)
GGUF = FileKind(
    "a GGUF file of llama.cpp, which TensorRT-LLM cannot read",
    "take the Hugging Face form (safetensors) that it was made from",
)
WEB_PAGE = FileKind(
    "a web page, as a download that needs a login leaves it",
    "download the file again, with a token that may read it",
)


def kind_of(head: bytes) -> FileKind | None:
    """Return the format of a file that begins with the bytes `head`.

    Return None if it is none of the known formats.
    """
    if head.startswith(_LFS):
        return LFS_POINTER
    if head.startswith(b"GGUF"):
        return GGUF
    if head.startswith(b"PK\x03\x04"):  # torch.save writes a zip archive that contains a pickle
        return PICKLE
    # Check byte 8, too. A safetensors file may also begin with these two bytes, but its byte 8 is
    # always `{`.
    if head[:1] == b"\x80" and head[1:2] in _PICKLE_PROTOCOLS and head[8:9] != b"{":
        return PICKLE
    if head.lstrip().lower().startswith((b"<!doctype html", b"<html")):
        return WEB_PAGE
    return None


def kind_of_file(path: Path) -> FileKind | None:
    """Return the format of a file. Return None if it is unknown, or the file cannot be read."""
    if not path.is_file():  # do not open a pipe: the call would wait for the other end
        return None
    try:
        with path.open("rb") as file:
            return kind_of(file.read(HEAD_BYTES))
    except OSError:
        return None


def find_gguf(folder: Path) -> str | None:
    """Return the name of a GGUF file in a folder. Return None if the folder has no GGUF file."""
    try:
        with os.scandir(folder) as entries:
            names = [entry.name for entry in itertools.islice(entries, _MAX_ENTRIES)]
    except OSError:
        return None
    return min((name for name in names if name.lower().endswith(".gguf")), default=None)


def describe_gguf(folder: Path, lead: str) -> str:
    """Return a message about a GGUF file in a folder. The message begins with `lead`.

    The rest is the file's name and the advice in `GGUF`. Return "" if there is no GGUF file.
    """
    name = find_gguf(folder)
    return "" if name is None else f"{lead}{name} {GGUF.words}"
