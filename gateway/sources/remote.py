"""What `fetch` asks of a place on another machine, and the two kinds of places.

Everything here runs in the event loop of `fetch`, never in the one that serves.
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

_PIECE = 1024 * 1024
_CONNECT_S = 10.0
_SILENT_S = 30.0
_REDIRECTS = 5
# Servers that do not know HEAD, or sign URLs for GET alone, say so with these.
_NO_HEAD = (400, 401, 403, 405, 501)
_ABSENT = (404, 410)


class Found(NamedTuple):
    """A file: its bytes, if that is told, and what tells one content of it from the next."""

    size: int | None
    tag: str


class Place(Protocol):
    """Raises `SourceUnavailable`, and `SourceNotAllowed` where it leads elsewhere."""

    async def look(self, name: str) -> Found | None:
        """What is known of a file before it is read; None where it does not exist."""

    def read(self, name: str) -> AsyncGenerator[bytes, None]:
        """The file's bytes."""


class Https:
    """Follows redirects to what is allowed, and from https to https alone."""

    def __init__(
        self, source: Source, client: httpx.AsyncClient, allowed: Callable[[Source], bool]
    ) -> None:
        self._source = source
        self._client = client
        self._allowed = allowed

    async def look(self, name: str) -> Found | None:
        for method in ("HEAD", "GET"):
            async with self._answer(method, name) as answer:
                if method == "HEAD" and answer.status_code in _NO_HEAD:
                    continue
                if answer.status_code in _ABSENT:
                    return None
                told = _checked(answer, name).headers
                length = told.get("content-length", "")
                tag = told.get("etag") or told.get("last-modified", "")
                return Found(int(length) if length.isdecimal() else None, tag)
        raise AssertionError("GET always answers")

    async def read(self, name: str) -> AsyncGenerator[bytes, None]:
        async with self._answer("GET", name) as answer:
            async for piece in _checked(answer, name).aiter_raw(_PIECE):
                yield piece

    @asynccontextmanager
    async def _answer(self, method: str, name: str) -> AsyncIterator[httpx.Response]:
        source, url = self._source, self._source.url(name)
        try:
            for _ in range(1 + _REDIRECTS):
                request = self._client.build_request(method, url)
                answer = await self._client.send(request, stream=True, auth=_auth(source))
                try:
                    if not answer.has_redirect_location:
                        yield answer
                        return
                    source = self._next(name, str(answer.next_request.url))  # type: ignore[union-attr]
                    url = source.url()
                finally:
                    await answer.aclose()
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise unavailable(name, f"{type(error).__name__} {error}") from None
        raise unavailable(name, "too many redirects")

    def _next(self, name: str, url: str) -> Source:
        """Where a redirect leads; without the user, whose password is for the first place."""
        if url.startswith("https://"):
            source = parse(url)
            if self._allowed(source):
                return source
            shown = str(source)
        else:
            shown = f"{url.partition(':')[0][:16]}:"
        raise SourceNotAllowed(name, "source", f"a redirect to {shown}", "what may be read from")


class S3:
    """Credentials, region and endpoint are what botocore finds in the environment."""

    def __init__(self, source: Source, filesystem: Any) -> None:
        self._source = source
        self._filesystem = filesystem

    async def look(self, name: str) -> Found | None:
        try:
            found = await self._filesystem._info(self._path(name))
        except FileNotFoundError:
            return None
        except Exception as error:  # botocore's, aiohttp's and the system's have no common class
            raise unavailable(name, f"{type(error).__name__} {error}") from None
        if found["type"] != "file":
            return None
        return Found(int(found["size"]), str(found.get("ETag", "")))

    async def read(self, name: str) -> AsyncGenerator[bytes, None]:
        try:
            file = await self._filesystem.open_async(self._path(name))
            async with file:
                while piece := await file.read(_PIECE):
                    yield piece
        except Exception as error:  # as in `look`
            raise unavailable(name, f"{type(error).__name__} {error}") from None

    def _path(self, name: str) -> str:
        return "/".join((self._source.place, *self._source.path, name))


@asynccontextmanager
async def opened(source: Source, allowed: Callable[[Source], bool]) -> AsyncIterator[Place]:
    """The place of an ``https`` or ``s3`` source.

    Raises `SourceUnavailable`, and `SourceUnsupported` where a package is missing.
    """
    if source.scheme == "https":
        timeout = httpx.Timeout(_SILENT_S, connect=_CONNECT_S)
        headers = {"accept-encoding": "identity"}
        try:
            trust = _trust()
        except OSError as error:
            raise unavailable("request", f"SSL_CERT_FILE: {error}", "certificates") from None
        async with httpx.AsyncClient(timeout=timeout, headers=headers, verify=trust) as client:
            yield Https(source, client, allowed)
        return
    try:
        from s3fs import S3FileSystem  # noqa: PLC0415  # an optional package, and a large one
    except ImportError as error:
        raise SourceUnsupported(
            *("request", "source", f"s3:// without {error.name}", "other sources"),
            "`pip install 'triton-openai-gateway[sources]'` brings it",
        ) from None
    filesystem = S3FileSystem(
        asynchronous=True,
        skip_instance_cache=True,
        use_listings_cache=False,
        config_kwargs={"connect_timeout": _CONNECT_S, "read_timeout": _SILENT_S},
    )
    try:
        session = await filesystem.set_session()
    except Exception as error:  # as in `S3.look`
        raise unavailable("request", f"{type(error).__name__} {error}") from None
    try:
        yield S3(source, filesystem)
    finally:
        await session.close()


def _trust() -> ssl.SSLContext | bool:
    """Whom to trust: the authorities of SSL_CERT_FILE as they could be read last, else httpx's."""
    file = os.environ.get("SSL_CERT_FILE")
    return _watched(Path(file)).value if file else True


@cache
def _watched(file: Path) -> ReloadedValue[ssl.SSLContext]:
    name = "certificates of the servers of adapters"
    return ReloadedValue(name, [file], partial(client_context, ClientFiles(file)))


def unavailable(
    name: str, found: str, allowed: str = "a readable file, or 404 where there is none"
) -> SourceUnavailable:
    return SourceUnavailable(name, "source", found, allowed)


def _auth(source: Source) -> httpx.BasicAuth | None:
    if source.user is None:
        return None
    user, _, password = source.user.partition(":")
    return httpx.BasicAuth(unquote(user), unquote(password))


def _checked(answer: httpx.Response, name: str) -> httpx.Response:
    if answer.status_code != 200:
        raise unavailable(name, f"status {answer.status_code}")
    if answer.headers.get("content-encoding", "identity") != "identity":
        raise unavailable(name, "a compressed answer to a request for none")
    return answer
