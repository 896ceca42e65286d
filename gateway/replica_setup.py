"""The replicas as the settings and the configuration describe them."""

from __future__ import annotations

import math
from functools import partial

from gateway.config.file import Configuration
from gateway.config.settings import Settings
from gateway.metrics import Metrics
from gateway.scheduling.replicas import Replicas
from gateway.tokenization.prompts import Prompts
from gateway.triton.engine import Engine
from gateway.triton.model_capabilities import ModelCapabilities
from gateway.triton.transport import ConnectionOptions


def make_replicas(settings: Settings, prompts: Prompts, metrics: Metrics) -> Replicas:
    """None yet: `Replicas.configure` is told their endpoints."""
    return Replicas(
        partial(
            Engine,
            model=settings.triton_model,
            vocab_size=prompts.vocab_size,
            max_seq_len=settings.max_seq_len,
            on_stop=metrics.count_stop,
            on_cold_send=metrics.count_cold_send,
            connection=_connection_options(settings),
            mode=settings.triton_mode,
            text_model=settings.triton_text_model,
            first_response_timeout=settings.first_response_timeout,
            tokens_per_block=settings.tokens_per_block,
        ),
        partial(_places, settings),
    )


def endpoints_of(settings: Settings, configuration: Configuration) -> list[str]:
    if configuration.replicas is not None:
        return list(configuration.replicas)
    return settings.triton_endpoints


def _places(settings: Settings, capabilities: ModelCapabilities) -> int | None:
    """How many requests a replica gets at once.

    A few more than it runs: the next ones are at hand when some end.
    """
    if settings.replica_in_flight is not None or capabilities.max_batch_size is None:
        return settings.replica_in_flight
    return math.ceil(1.25 * capabilities.max_batch_size)


def _connection_options(settings: Settings) -> ConnectionOptions:
    return ConnectionOptions(
        transport=settings.triton_transport,
        tls_ca=settings.triton_tls_ca,
        tls_cert=settings.triton_tls_cert,
        tls_key=settings.triton_tls_key,
        metadata={
            name: value.get_secret_value() for name, value in settings.triton_metadata.items()
        },
    )
