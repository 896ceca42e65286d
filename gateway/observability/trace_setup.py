"""Whether traces are on, without needing their packages where they are off."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gateway.config.file import ConfigurationError
from gateway.config.settings import Settings

if TYPE_CHECKING:
    from gateway.observability.tracing import Tracer


def tracer_class(settings: Settings) -> type[Tracer] | None:
    """None where traces are off. Raises ConfigurationError when the packages are missing."""
    if settings.otlp_endpoint is None:
        return None
    try:
        from gateway.observability.tracing import Tracer  # noqa: PLC0415  # its packages are optional
    except ImportError as error:
        raise ConfigurationError(
            f"GATEWAY_OTLP_ENDPOINT: {error.name} is not installed; "
            "`pip install 'triton-openai-gateway[otel]'` brings it."
        ) from None
    return Tracer
