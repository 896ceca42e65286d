"""Files of the console's web pages, which are read and compressed once per process."""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

_FOLDER = Path(__file__).parent
_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


class WebFile(NamedTuple):
    """A file of the console.

    Attributes:
        media_type: value of the `content-type` header.
        body: the content.
        packed: the content, compressed with gzip.
        etag: weak ETag, valid for `body` and `packed`.
    """

    media_type: str
    body: bytes
    packed: bytes
    etag: str


@cache
def load_web_files() -> Mapping[str, WebFile]:
    """Return all files, by their path relative to this folder, such as `playground/main.js`."""
    return {
        path.relative_to(_FOLDER).as_posix(): _load_file(path)
        for path in sorted(_FOLDER.rglob("*"))
        if path.suffix in _TYPES
    }


def _load_file(path: Path) -> WebFile:
    body = path.read_bytes()
    digest = hashlib.sha256(body).hexdigest()[:20]
    packed = gzip.compress(body, mtime=0)
    return WebFile(_TYPES[path.suffix], body, packed, f'W/"{digest}"')
