"""Strict parser for sources of LoRA adapters.

A source is an absolute folder, ``https://HOST/FOLDER``, ``s3://BUCKET/FOLDER`` or
``hf://OWNER/NAME[@REVISION]``. The folder contains the adapter's files. HTTP requests are built
only from the validated parts of the URL, never from the original text. HTTP libraries and servers
may parse an unusual URL differently than this module.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, get_args
from urllib.parse import unquote, urlsplit

from adapters.errors import InvalidSource

Scheme = Literal["file", "https", "s3", "hf"]

_MAX_CHARS = 2048  # characters of a source's name
_HOST = re.compile(r"[a-z0-9]([a-z0-9.-]{0,252})|\[[0-9a-f:.]+\]")
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,254}")
_REVISION = re.compile(r"[A-Za-z0-9._-]+(/[A-Za-z0-9._-]+)*")
_ALLOWED = "an absolute folder, https://HOST/FOLDER, s3://BUCKET/FOLDER or hf://OWNER/NAME@REVISION"


@dataclass(frozen=True, slots=True)
class Source:
    """Parsed location of a LoRA adapter's files, or a prefix of such locations.

    Attributes:
        scheme: the type of the source; "file" for a folder on this machine.
        authority: the host of an ``https`` source, with the port unless it is 443; the bucket of an
            ``s3`` source; "" for other sources.
        path: the components of the path, with the %-encoding of the original text.
        revision: branch, tag or commit of an ``hf`` source; None if not given.
        user: ``NAME:PASSWORD`` of an ``https`` source; None if not given. This is a secret.
        query: query string of an ``https`` source. This is a secret, for example a signature.
    """

    scheme: Scheme
    authority: str
    path: tuple[str, ...]
    revision: str | None = None
    user: str | None = field(default=None, repr=False)
    query: str = field(default="", repr=False)

    def __str__(self) -> str:
        """Return the source as text without secrets: without user, password and query."""
        inner = "/".join(self.path)
        if self.scheme == "file":
            return f"/{inner}"
        text = f"{self.scheme}://{self.authority}{'/' if self.authority and inner else ''}{inner}"
        return f"{text}@{self.revision}" if self.revision else text

    def url(self, name: str | None = None) -> str:
        """Return the URL of the file `name` in the source. Without `name`, return the source's URL.

        The URL includes the query, which may be secret. It does not include user and password.
        """
        inner = "/".join(self.path if name is None else (*self.path, name))
        return f"{self.scheme}://{self.authority}/{inner}{'?' if self.query else ''}{self.query}"

    def is_below(self, prefix: Source) -> bool:
        """Return True if this source equals `prefix` or is in a folder below `prefix`.

        Complete folder names are compared: ``s3://a/lora-2`` is not below ``s3://a/lora``.
        """
        return (self.scheme, self.authority) == (prefix.scheme, prefix.authority) and (
            self.path[: len(prefix.path)] == prefix.path
        )

    def is_allowed(self, prefixes: Iterable[Source]) -> bool:
        return any(map(self.is_below, prefixes))


def parse(text: str) -> Source:
    """Parse the text of a source. Raise `InvalidSource` if the text is invalid.

    The error's message contains no secret.
    """
    source = parse_prefix(text)
    if source.scheme == "hf" and len(source.path) < 2:
        raise _invalid_source(source, "hf://OWNER/NAME@REVISION")
    return source


def parse_prefix(text: str) -> Source:
    """Parse a source, or a prefix of sources such as ``hf://`` or ``hf://OWNER``."""
    scheme, colon, _ = text.partition("://")
    if len(text) > _MAX_CHARS or not text.isprintable():
        raise _invalid_source("a text that is too long or not printable", _ALLOWED)
    if not colon and text.startswith("/"):
        return Source("file", "", _parse_path(text, quoted=False))
    if not colon or scheme == "file" or scheme not in get_args(Scheme):
        raise _invalid_source(f"{scheme}://" if colon else "a relative path", _ALLOWED)
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:
        raise _invalid_source("a malformed URL", _ALLOWED) from None
    if not text.isascii() or any(each in text for each in " \\#"):
        raise _invalid_source("a URL with a space, \\, # or other characters than ASCII", _ALLOWED)
    if scheme == "https":
        return _parse_https(parts.netloc, port, parts.hostname or "", parts.path, parts.query)
    if parts.query or "?" in text or "%" in text:
        raise _invalid_source("a query or %", f"{scheme}:// without")
    if scheme == "s3":
        if not _BUCKET.fullmatch(parts.netloc):
            raise _invalid_source(
                "no bucket", "s3://BUCKET/FOLDER; credentials come from the environment"
            )
        return Source("s3", parts.netloc, _parse_path(parts.path))
    named, at, revision = text.removeprefix("hf://").partition("@")
    if at and (not _REVISION.fullmatch(revision) or ".." in revision):
        raise _invalid_source("a malformed revision", "a branch, a tag or a commit")
    return Source("hf", "", _parse_path(f"/{named}"), revision or None)


def _parse_https(netloc: str, port: int | None, host: str, path: str, query: str) -> Source:
    user, at, _ = netloc.rpartition("@")
    if "@" in user or (at and not user):
        raise _invalid_source("more than one @", "https://USER:PASSWORD@HOST/FOLDER")
    host = f"[{host}]" if ":" in host else host
    if not _HOST.fullmatch(host):
        raise _invalid_source("no host", "https://HOST/FOLDER")
    authority = host if port in (None, 443) else f"{host}:{port}"
    return Source("https", authority, _parse_path(path), user=user or None, query=query)


def _parse_path(path: str, *, quoted: bool = True) -> tuple[str, ...]:
    """Return the folder and file names in a path.

    Raise `InvalidSource` for a name that some server might interpret as ``..``, or as several
    names.
    """
    names = tuple(path.strip("/").split("/")) if path.strip("/") else ()
    for name in names:
        try:
            plain = unquote(name, errors="strict") if quoted else name
        except UnicodeDecodeError:  # some servers decode the invalid bytes %c0%ae to a dot
            raise _invalid_source("a path with quoted bytes that are not UTF-8", _ALLOWED) from None
        # Check only the text before a semicolon, because some servers ignore the text after it.
        meant = plain.partition(";")[0] if quoted else plain
        if meant in ("", ".", "..") or (quoted and any(each in plain for each in "/\\%\0")):
            raise _invalid_source(
                "a path with an empty name, '.', '..' or a quoted / \\ or %", _ALLOWED
            )
    return names


def _invalid_source(found: object, allowed: str) -> InvalidSource:
    return InvalidSource("request", "source", str(found), allowed)
