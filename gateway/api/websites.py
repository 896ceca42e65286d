"""Protection of a gateway without API keys against requests from other websites' pages.

A browser sends a page's requests to any address that it can reach, including this machine. The page
cannot read the response, but the engine has done the work. With DNS rebinding, a website's host
name later resolves to this machine. The browser then treats this gateway as part of the website, so
the page can also read the responses. API keys prevent both attacks, as websites do not have a key.
"""

from __future__ import annotations

import re
from functools import lru_cache

from starlette.types import Scope

from gateway.api.request_log import header_of, service_of
from gateway.http.http_errors import ForWebsites

_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
# Origins of websites. Browser extensions and desktop applications have other URL schemes.
_WEBSITE_ORIGINS = re.compile(r"(?:https?://.*|null)?")
# `Host` headers that no website can have: IP addresses, names without a dot, and names in reserved
# top-level domains.
_LOCAL_NAMES = re.compile(
    r"(?:\d+(?:\.\d+){3}|\[[0-9a-f:.]+\]|[^.:]+|[^:]+\.(?:localhost|local|internal))\.?(?::\d*)?",
    re.IGNORECASE,
)


def check_website(scope: Scope) -> None:
    """Raise ForWebsites if another website's page may have sent the request.

    Call this function only if the gateway needs no keys.
    """
    settings = service_of(scope).settings
    # With `allow_anonymous`, the operator accepts requests by any host name.
    if not settings.allow_anonymous and not _is_local_name(host := header_of(scope, b"host") or ""):
        raise ForWebsites(
            f"host: found {host[:200]!r}; without keys this gateway is for this machine alone, by "
            "names that no website can have, such as localhost. Configure tenants, or set "
            "GATEWAY_ALLOW_ANONYMOUS=true."
        )
    if header_of(scope, b"sec-fetch-site") != "cross-site" or scope["method"] in _SAFE_METHODS:
        return
    origin = header_of(scope, b"origin") or ""
    allowed = settings.cors_origins
    if origin not in allowed and "*" not in allowed and _WEBSITE_ORIGINS.fullmatch(origin):
        raise ForWebsites(
            f"origin: found {origin[:200]!r}; without keys this gateway takes nothing from other "
            "websites but those of GATEWAY_CORS_ORIGINS."
        )


def passes_website_check(scope: Scope) -> bool:
    """Return True if `check_website` accepts the request."""
    try:
        check_website(scope)
    except ForWebsites:
        return False
    return True


@lru_cache(maxsize=16)
def _is_local_name(host: str) -> bool:
    return not host or _LOCAL_NAMES.fullmatch(host) is not None
