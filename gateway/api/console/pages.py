"""GET / and /operators, the pages of the web consoles, and GET /web/{path}, files of these pages.

Pages and files are served without a key, as they contain no data. The pages call the API with the
user's key.
"""

from __future__ import annotations

import re

from fastapi import Request, Response

from gateway.api.auth import is_for_admins
from gateway.api.request_log import service_of
from gateway.api.routing import ApiRouter
from gateway.http.http_errors import UnknownUrl
from gateway.web.files import WebFile, load_web_files

router = ApiRouter()

_PLAYGROUND, _OPERATORS = "index.html", "operators.html"

_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        # Make the browser refuse to convert strings to HTML, scripts or script URLs (no XSS).
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
_HEADERS = {
    # Make browsers revalidate each file, usually with the response 304. Otherwise a page could load
    # cached modules of an older release and fail.
    "cache-control": "no-cache",
    "content-security-policy": _POLICY,
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "vary": "accept-encoding",
    "x-content-type-options": "nosniff",
}
_GZIP = re.compile(r"(?:^|,)\s*(?:gzip|\*)\s*(?:;\s*q=(?!0(?:\.0*)?\s*(?:,|$))[0-9.]+\s*)?(?:,|$)")


@router.get("/", include_in_schema=False)
async def page(request: Request) -> Response:
    """Return the playground page. On a separate admin port, return the operators' page instead."""
    port = request.app.state.admin_port
    alone = port is not None and is_for_admins(request)
    return _build_response(request, _OPERATORS if alone else _PLAYGROUND)


@router.get("/operators", include_in_schema=False)
async def operators_page(request: Request) -> Response:
    if not is_for_admins(request):
        raise UnknownUrl(request.method, request.url.path)
    return _build_response(request, _OPERATORS)


@router.get("/web/{path:path}", include_in_schema=False)
async def web_file(request: Request, path: str) -> Response:
    if path.endswith(".html"):  # pages are served at / and /operators only
        raise UnknownUrl(request.method, request.url.path)
    return _build_response(request, path)


def _build_response(request: Request, name: str) -> Response:
    found = load_web_files().get(name) if service_of(request.scope).settings.console else None
    if found is None:
        raise UnknownUrl(request.method, request.url.path)
    headers = _HEADERS | {"etag": found.etag}
    if _is_cached(found, request.headers.get("if-none-match", "")):
        return Response(status_code=304, headers=headers)
    body = found.body
    if _GZIP.search(request.headers.get("accept-encoding", "")):
        body = found.packed
        headers["content-encoding"] = "gzip"
    return Response(body, headers=headers | {"content-type": found.media_type})


def _is_cached(file: WebFile, tags: str) -> bool:
    """Return True if the client has the current version of the file.

    `tags` is the header `if-none-match`. Entity tags are compared weakly (RFC 9110, 13.1.2).
    """
    wanted = file.etag.removeprefix("W/")
    return any(tag.strip().removeprefix("W/") in (wanted, "*") for tag in tags.split(","))
