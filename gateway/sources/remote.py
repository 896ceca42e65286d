"""Remote locations of adapter files: https servers and S3 buckets.

All code of this module runs in the event loop for downloads (see `fetch`), never in the event loop
that serves requests.

See decision 031 in docs/decisions.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from urllib.parse import unquote

import httpx

from adapters.errors import SourceNotAllowed, SourceUnavailable, SourceUnsupported
from certificates.contexts import ClientFiles, client_context
from certificates.reloading import ReloadedValue
from gateway.sources.source import Source, parse

_CHUNK_BYTES = 1024 * 1024
_CONNECT_TIMEOUT_S = 10.0
_READ_TIMEOUT_S = 30.0
_MAX_REDIRECTS = 5
# Status codes for which a HEAD request is repeated as GET. Some servers do not support HEAD, and
# some signed URLs are valid only for GET.
_NO_HEAD_STATUSES = (400, 401, 403, 405, 501)
_ABSENT_STATUSES = (404, 410)


class RemoteFile(NamedTuple):
    """Size and version of a remote file.

    Attributes:
        size: size in bytes; None if unknown.
        tag: the file's ETag or modification date, which changes with its content; "" if the server
            sends neither.
    """

    size: int | None
    tag: str


class RemoteLocation(Protocol):
    """A folder on another machine, from which files are read.

    Methods raise `SourceUnavailable` if reading fails, and `SourceNotAllowed` for a redirect to a
    source that is not allowed.
    """

    async def stat(self, name: str) -> RemoteFile | None:
        """Return size and tag of a file, without reading its content.

        Return None if the file does not exist.
        """

    def read(self, name: str) -> AsyncGenerator[bytes, None]:
        """Yield the content of a file in chunks."""


class Https:
    """A folder on an https server.

    Redirects are followed only to https URLs for which the callback `allowed` returns True.
    """

    def __init__(
        self, source: Source, client: httpx.AsyncClient, allowed: Callable[[Source], bool]
    ) -> None:
        self._source = source
        self._client = client
        self._allowed = allowed

    async def stat(self, name: str) -> RemoteFile | None:
        for method in ("HEAD", "GET"):
            async with self._send(method, name) as answer:
                if method == "HEAD" and answer.status_code in _NO_HEAD_STATUSES:
                    continue
                if answer.status_code in _ABSENT_STATUSES:
                    return None
                told = _require_ok(answer, name).headers
                length = told.get("content-length", "")
                tag = told.get("etag") or told.get("last-modified", "")
                return RemoteFile(int(length) if length.isdecimal() else None, tag)
        raise AssertionError("GET always answers")

    async def read(self, name: str) -> AsyncGenerator[bytes, None]:
        async with self._send("GET", name) as answer:
            async for piece in _require_ok(answer, name).aiter_raw(_CHUNK_BYTES):
                yield piece

    @asynccontextmanager
    async def _send(self, method: str, name: str) -> AsyncIterator[httpx.Response]:
        source, url = self._source, self._source.url(name)
        try:
            for _ in range(1 + _MAX_REDIRECTS):
                request = self._client.build_request(method, url)
                answer = await self._client.send(request, stream=True, auth=_build_auth(source))
                try:
                    if not answer.has_redirect_location:
                        yield answer
                        return
                    source = self._follow_redirect(name, str(answer.next_request.url))  # type: ignore[union-attr]
                    url = source.url()
                finally:
                    await answer.aclose()
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise unavailable_error(name, f"{type(error).__name__} {error}") from None
        raise unavailable_error(name, "too many redirects")

    def _follow_redirect(self, name: str, url: str) -> Source:
        """Return the target of a redirect. Raise `SourceNotAllowed` if the target is not allowed.

        The returned source has no user and password. Those of the original source are therefore
        never sent to the target.
        """
        if url.startswith("https://"):
            source = parse(url)
            if self._allowed(source):
                return source
            shown = str(source)
        else:
            shown = f"{url.partition(':')[0][:16]}:"
        raise SourceNotAllowed(name, "source", f"a redirect to {shown}", "what may be read from")


class S3:
    """A folder in an S3 bucket.

    botocore reads credentials, region and endpoint from the environment.
    """

    def __init__(self, source: Source, filesystem: Any) -> None:
        self._source = source
        self._filesystem = filesystem

    async def stat(self, name: str) -> RemoteFile | None:
        try:
            found = await self._filesystem._info(self._path(name))
        except FileNotFoundError:
            return None
        # Catch all exceptions, because those of botocore, aiohttp and the operating system have no
        # common base class.
        except Exception as error:
            raise unavailable_error(name, f"{type(error).__name__} {error}") from None
        if found["type"] != "file":
            return None
        return RemoteFile(int(found["size"]), str(found.get("ETag", "")))

    async def read(self, name: str) -> AsyncGenerator[bytes, None]:
        try:
            file = await self._filesystem.open_async(self._path(name))
            async with file:
                while piece := await file.read(_CHUNK_BYTES):
                    yield piece
        except Exception as error:  # all types, for the same reason as in `stat`
            raise unavailable_error(name, f"{type(error).__name__} {error}") from None

    def _path(self, name: str) -> str:
        return "/".join((self._source.authority, *self._source.path, name))


@asynccontextmanager
async def open_location(
    source: Source, allowed: Callable[[Source], bool]
) -> AsyncIterator[RemoteLocation]:
    """Return a context manager that opens an ``https`` or ``s3`` source.

    `allowed` is called with the target of each redirect, and returns True to follow the redirect.

    Raises:
        SourceUnavailable: the source cannot be used now.
        SourceUnsupported: the package that reads ``s3`` sources is not installed.
    """
    if source.scheme == "https":
        timeout = httpx.Timeout(_READ_TIMEOUT_S, connect=_CONNECT_TIMEOUT_S)
        headers = {"accept-encoding": "identity"}
        try:
            trust = _load_trust()
        except OSError as error:
            raise unavailable_error("request", f"SSL_CERT_FILE: {error}", "certificates") from None
        async with httpx.AsyncClient(timeout=timeout, headers=headers, verify=trust) as client:
            yield Https(source, client, allowed)
        return
    try:
        from s3fs import S3FileSystem  # noqa: PLC0415  # a large, optional package
    except ImportError as error:
        raise SourceUnsupported(
            *("request", "source", f"s3:// without {error.name}", "other sources"),
            "`pip install 'triton-openai-gateway[sources]'` installs it",
        ) from None
    filesystem = S3FileSystem(
        asynchronous=True,
        skip_instance_cache=True,
        use_listings_cache=False,
        config_kwargs={"connect_timeout": _CONNECT_TIMEOUT_S, "read_timeout": _READ_TIMEOUT_S},
    )
    try:
        session = await filesystem.set_session()
    except Exception as error:  # all types, for the same reason as in `S3.stat`
        raise unavailable_error("request", f"{type(error).__name__} {error}") from None
    try:
        yield S3(source, filesystem)
    finally:
        await session.close()


def _load_trust() -> ssl.SSLContext | bool:
    """Return the certificate authorities for https servers, as httpx's parameter `verify`.

    The result is a TLS context with the certificate authorities in SSL_CERT_FILE. If SSL_CERT_FILE
    is not set, the result is True, which means httpx's default authorities.
    """
    file = os.environ.get("SSL_CERT_FILE")
    return _watch_trust(Path(file)).value if file else True


@cache
def _watch_trust(file: Path) -> ReloadedValue[ssl.SSLContext]:
    name = "certificates of the servers of adapters"
    return ReloadedValue(name, [file], partial(client_context, ClientFiles(file)))


def unavailable_error(
    name: str, found: str, allowed: str = "a readable file, or 404 where there is none"
) -> SourceUnavailable:
    return SourceUnavailable(name, "source", found, allowed)


def _build_auth(source: Source) -> httpx.BasicAuth | None:
    if source.user is None:
        return None
    user, _, password = source.user.partition(":")
    return httpx.BasicAuth(unquote(user), unquote(password))


def _require_ok(answer: httpx.Response, name: str) -> httpx.Response:
    if answer.status_code != 200:
        raise unavailable_error(name, f"status {answer.status_code}")
    if answer.headers.get("content-encoding", "identity") != "identity":
        raise unavailable_error(name, "a compressed answer to a request for none")
    return answer
