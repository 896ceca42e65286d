"""TLS of the server itself: its certificate, and whether clients must have one."""

from __future__ import annotations

import ssl
from typing import Any

from gateway.config.file import ConfigurationError
from gateway.config.settings import Settings


def check_tls(settings: Settings) -> None:
    """Raises ConfigurationError for files that cannot be served with."""
    if settings.tls_cert is None:
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(settings.tls_cert, settings.tls_key)
    except OSError as error:
        raise ConfigurationError(f"GATEWAY_TLS_CERT, GATEWAY_TLS_KEY: {error}") from None
    try:
        context.load_verify_locations(settings.tls_client_ca or settings.tls_cert)
    except OSError as error:
        raise ConfigurationError(f"GATEWAY_TLS_CLIENT_CA: {error}") from None


def uvicorn_options(settings: Settings) -> dict[str, Any]:
    """The arguments of `uvicorn.Config`; TLS 1.2 is the oldest that Python then speaks."""
    if settings.tls_cert is None:
        return {}
    options: dict[str, Any] = {
        "ssl_certfile": settings.tls_cert,
        "ssl_keyfile": settings.tls_key,
    }
    if settings.tls_client_ca is not None:
        options |= {"ssl_ca_certs": settings.tls_client_ca, "ssl_cert_reqs": ssl.CERT_REQUIRED}
    return options
