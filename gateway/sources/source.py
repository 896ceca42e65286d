"""The name of a place that an adapter may come from, taken apart so that it means one thing only.

A source is an absolute folder, ``https://HOST/FOLDER``, ``s3://BUCKET/FOLDER`` or
``hf://OWNER/NAME[@REVISION]``; the adapter's files lie in it under their own names. What is asked
for is made anew from the parts that were checked, so that nobody reads another host out of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, get_args
from urllib.parse import unquote, urlsplit

from adapters.errors import InvalidSource

Scheme = Literal["file", "https", "s3", "hf"]

_MAX = 2048  # characters
_HOST = re.compile(r"[a-z0-9]([a-z0-9.-]{0,252})|\[[0-9a-f:.]+\]")
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,254}")
_REVISION = re.compile(r"[A-Za-z0-9._-]+(/[A-Za-z0-9._-]+)*")
_ALLOWED = "an absolute folder, https://HOST/FOLDER, s3://BUCKET/FOLDER or hf://OWNER/NAME@REVISION"


@dataclass(frozen=True, slots=True)
class Source:
    """`place` is a host, with its port if it is not 443, or a bucket; `path` the names below it,
    quoted as they were given. `user` (``NAME:PASSWORD``) and `query` are secret.
    """

    scheme: Scheme
    place: str
    path: tuple[str, ...]
    revision: str | None = None
    user: str | None = field(default=None, repr=False)
    query: str = field(default="", repr=False)

    def __str__(self) -> str:
        """The source without what is secret, as it is kept and shown."""
        inner = "/".join(self.path)
        if self.scheme == "file":
            return f"/{inner}"
        text = f"{self.scheme}://{self.place}{'/' if self.place and inner else ''}{inner}"
        return f"{text}@{self.revision}" if self.revision else text

    def url(self, name: str | None = None) -> str:
        """Of the file `name` in it, with its query, which may be secret, and without the user."""
        inner = "/".join(self.path if name is None else (*self.path, name))
        return f"{self.scheme}://{self.place}/{inner}{'?' if self.query else ''}{self.query}"

    def is_below(self, prefix: Source) -> bool:
        """Whole names count: ``s3://a/lora-2`` is not below ``s3://a/lora``."""
        return (self.scheme, self.place) == (prefix.scheme, prefix.place) and (
            self.path[: len(prefix.path)] == prefix.path
        )

    def is_allowed(self, prefixes: Iterable[Source]) -> bool:
        return any(map(self.is_below, prefixes))


def parse(text: str) -> Source:
    """The source of this name. Raises `InvalidSource`, which quotes no secret."""
    source = parse_prefix(text)
    if source.scheme == "hf" and len(source.path) < 2:
        raise _refused(source, "hf://OWNER/NAME@REVISION")
    return source


def parse_prefix(text: str) -> Source:
    """As `parse`, but ``hf://`` and ``hf://OWNER`` stand for all below them."""
    scheme, colon, _ = text.partition("://")
    if len(text) > _MAX or not text.isprintable():
        raise _refused("a text that is too long or not printable", _ALLOWED)
    if not colon and text.startswith("/"):
        return Source("file", "", _names(text, quoted=False))
    if not colon or scheme == "file" or scheme not in get_args(Scheme):
        raise _refused(f"{scheme}://" if colon else "a relative path", _ALLOWED)
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:
        raise _refused("a malformed URL", _ALLOWED) from None
    if not text.isascii() or any(each in text for each in " \\#"):
        raise _refused("a URL with a space, \\, # or other characters than ASCII", _ALLOWED)
    if scheme == "https":
        return _https(parts.netloc, port, parts.hostname or "", parts.path, parts.query)
    if parts.query or "?" in text or "%" in text:
        raise _refused("a query or %", f"{scheme}:// without")
    if scheme == "s3":
        if not _BUCKET.fullmatch(parts.netloc):
            raise _refused("no bucket", "s3://BUCKET/FOLDER; credentials come from the environment")
        return Source("s3", parts.netloc, _names(parts.path))
    named, at, revision = text.removeprefix("hf://").partition("@")
    if at and (not _REVISION.fullmatch(revision) or ".." in revision):
        raise _refused("a malformed revision", "a branch, a tag or a commit")
    return Source("hf", "", _names(f"/{named}"), revision or None)


def _https(netloc: str, port: int | None, host: str, path: str, query: str) -> Source:
    user, at, _ = netloc.rpartition("@")
    if "@" in user or (at and not user):
        raise _refused("more than one @", "https://USER:PASSWORD@HOST/FOLDER")
    host = f"[{host}]" if ":" in host else host
    if not _HOST.fullmatch(host):
        raise _refused("no host", "https://HOST/FOLDER")
    place = host if port in (None, 443) else f"{host}:{port}"
    return Source("https", place, _names(path), user=user or None, query=query)


def _names(path: str, *, quoted: bool = True) -> tuple[str, ...]:
    """The names of a path. None of them leads up, in whatever way a server reads it."""
    names = tuple(path.strip("/").split("/")) if path.strip("/") else ()
    for name in names:
        try:
            plain = unquote(name, errors="strict") if quoted else name
        except UnicodeDecodeError:  # to some servers %c0%ae is a dot
            raise _refused("a path with quoted bytes that are not UTF-8", _ALLOWED) from None
        # What follows a semicolon is no part of the name to some servers.
        meant = plain.partition(";")[0] if quoted else plain
        if meant in ("", ".", "..") or (quoted and any(each in plain for each in "/\\%\0")):
            raise _refused("a path with an empty name, '.', '..' or a quoted / \\ or %", _ALLOWED)
    return names


def _refused(found: object, allowed: str) -> InvalidSource:
    return InvalidSource("request", "source", str(found), allowed)
