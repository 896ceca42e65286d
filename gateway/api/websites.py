"""A gateway without keys lets in whoever reaches it, but not the websites that they visit.

A browser sends what a page tells it to, to any address that it reaches, this machine's own among
them. The answer is not shown to the page, but the engine has worked for it. And a website whose
name leads to this machine from the second look on ("DNS rebinding") is the same site for the
browser: it reads the answers, too. Keys end both, as no browser has them.
"""

from __future__ import annotations

import re
from functools import lru_cache

from starlette.types import Scope

from gateway.api.request_log import header_of, service_of
from gateway.http.errors import ForWebsites

_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
# Extensions and applications of browsers' kind have schemes of their own.
_WEBSITE_ORIGINS = re.compile(r"(?:https?://.*|null)?")
# No website can have these: addresses, names of one word, and ends that no registry gives out.
_LOCAL_NAMES = re.compile(
    r"(?:\d+(?:\.\d+){3}|\[[0-9a-f:.]+\]|[^.:]+|[^:]+\.(?:localhost|local|internal))\.?(?::\d*)?",
    re.IGNORECASE,
)


def check_website(scope: Scope) -> None:
    """Of a request that needs no key. Raises ForWebsites for one that a website has sent."""
    settings = service_of(scope).settings
    # Else an operator has said that everybody is let in, by whatever name.
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
    """As `check_website`."""
    try:
        check_website(scope)
    except ForWebsites:
        return False
    return True


@lru_cache(maxsize=16)
def _is_local_name(host: str) -> bool:
    return not host or _LOCAL_NAMES.fullmatch(host) is not None
