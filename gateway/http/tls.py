"""TLS context of the server, with its certificate and, if configured, a CA for client certificates.

See decision 082 in docs/decisions.
"""

from __future__ import annotations

import ssl
from functools import partial

from certificates.contexts import server_context
from certificates.reloading import ReloadedValue
from gateway.config.file import ConfigurationError
from gateway.config.settings import Settings


def load_server_context(settings: Settings) -> ReloadedValue[ssl.SSLContext] | None:
    """Return the server's TLS context, which is reloaded when the certificate or key files change.

    Return None if TLS is not configured. Raise ConfigurationError if a file cannot be used.
    """
    cert, key, client_ca = settings.tls_cert, settings.tls_key, settings.tls_client_ca
    if cert is None:
        return None
    files = {"GATEWAY_TLS_CERT": cert, "GATEWAY_TLS_KEY": key, "GATEWAY_TLS_CLIENT_CA": client_ca}
    given = {name: path for name, path in files.items() if path is not None}
    names = ", ".join(given)
    try:
        return ReloadedValue(names, given.values(), partial(server_context, cert, key, client_ca))
    except OSError as error:
        raise ConfigurationError(f"{names}: {error}") from None
