"""A gateway that serves only HTTPS, and a test's access to it."""

from __future__ import annotations

import ssl
from pathlib import Path

import httpx

from tests.support.authority import Authority
from tests.support.gateway_process import GatewayProcess
from tests.support.local_stack import Stack
from tests.support.patience import PATIENCE_S


class SecureGateway(GatewayProcess):
    """A gateway that serves only HTTPS. `trust` is the test's TLS context."""

    def __init__(self, trust: ssl.SSLContext, folder: Path, stack: Stack, **settings: object):
        super().__init__(folder, stack, **settings)
        self.url = self.url.replace("http:", "https:")
        self.trust = trust

    def _is_ready(self) -> bool:
        try:
            return (
                httpx.get(
                    f"{self.url}/health/ready", verify=self.trust, timeout=PATIENCE_S
                ).status_code
                == 200
            )
        except httpx.TransportError:
            return False


def trust_of(authority: Authority, pair: tuple[Path, Path] | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=authority.file)
    if pair is not None:
        context.load_cert_chain(*pair)
    return context
