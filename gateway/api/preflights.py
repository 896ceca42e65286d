"""Log message about browser pages that are not allowed to call this gateway.

The browser only reports that the request failed, so the log is where operators find the reason.
"""

from __future__ import annotations

import logging
from collections.abc import Collection

from starlette.types import Scope

from gateway.api.request_log import header_of

MAX_ORIGIN_CHARS = 200

log = logging.getLogger("gateway.cors")


class PreflightHints:
    """Logger of a warning about CORS preflights from origins that are not allowed.

    Anyone may send preflights, so the warning is logged only once per process.
    """

    def __init__(self, origins: Collection[str]) -> None:
        """Create the logger.

        `origins` are the allowed origins. If they contain `*`, all origins are allowed and nothing
        is logged.
        """
        self._origins = origins
        self._is_logged = "*" in origins

    def note(self, scope: Scope) -> None:
        """Log the warning if the request is a CORS preflight from an origin that is not allowed.

        Only the first such preflight is logged.
        """
        if self._is_logged or scope["method"] != "OPTIONS":
            return
        origin = header_of(scope, b"origin")
        method = header_of(scope, b"access-control-request-method")
        if origin is None or method is None or origin in self._origins:
            return
        self._is_logged = True
        log.warning(
            "refused a CORS preflight from the origin %s; to let its pages call this gateway, add "
            "the origin to GATEWAY_CORS_ORIGINS. Further refusals are not logged.",
            ascii(origin[:MAX_ORIGIN_CHARS]),
        )
