"""Construction of the replicas from the settings and the configuration."""

from __future__ import annotations

import math
from functools import partial

from gateway.config.file import Configuration
from gateway.config.settings import Settings
from gateway.metrics.metrics import Metrics
from gateway.scheduling.discovery import Target
from gateway.scheduling.replicas import Replicas
from gateway.tokenization.identity import TokenizerIdentity
from gateway.tokenization.prompts import Prompts
from gateway.triton.engine import Engine
from gateway.triton.model_capabilities import ModelCapabilities
from gateway.triton.transport import ConnectionOptions

# Number of requests that the gateway sends concurrently to a replica whose maximum batch size is
# unknown. Most chat engines run more requests at once, so that none of the requests queue inside
# the engine. An engine that runs fewer requests at once queues the others, but stays fully used.
_DEFAULT_IN_FLIGHT = 64


def make_replicas(settings: Settings, prompts: Prompts, metrics: Metrics) -> Replicas:
    """Return the set of replicas without endpoints. `Replicas.configure` sets the endpoints."""
    return Replicas(
        partial(
            Engine,
            model=settings.triton_model,
            vocab_size=prompts.vocab_size,
            tokenizer=TokenizerIdentity(settings.tokenizer_dir, prompts),
            tokenizer_policy=settings.tokenizer_check,
            max_seq_len=settings.max_seq_len,
            on_stop=metrics.count_stop,
            on_upload=metrics.count_upload,
            connection=_connection_options(settings),
            mode=settings.triton_mode,
            text_model=settings.triton_text_model,
            first_response_timeout=settings.first_response_timeout,
            tokens_per_block=settings.tokens_per_block,
        ),
        partial(_max_in_flight, settings),
        drain_grace_s=settings.replica_drain_grace,
    )


def list_targets(settings: Settings, configuration: Configuration) -> list[Target]:
    if configuration.replicas is not None:
        return [Target(r.endpoint, r.weight, r.drain) for r in configuration.replicas]
    return [Target(endpoint) for endpoint in settings.triton_endpoints]


def describe_in_flight_guess(settings: Settings, capabilities: ModelCapabilities) -> str | None:
    """Return a message for operators if the maximum of requests in flight per replica is a guess.

    Return None if the maximum is configured or known from the model.
    """
    if settings.replica_in_flight is not None or capabilities.llmapi is None:
        return None
    return (
        f"each Triton gets {_DEFAULT_IN_FLIGHT} requests at once, which is a guess: a model of the "
        "llmapi repository does not report how many it runs. Set GATEWAY_REPLICA_IN_FLIGHT to 5/4 "
        "of max_batch_size of its model.yaml"
    )


def _max_in_flight(settings: Settings, capabilities: ModelCapabilities) -> int | None:
    """Return the maximum number of requests in flight on a replica; None for no limit.

    If no maximum is configured, use 5/4 of the number of requests that the engine runs at once.
    The engine can then start another request as soon as a request ends. For an llmapi model, use a
    default, because the model does not report how many requests it runs. Without a limit, one
    tenant could fill the engine's own queue, and delay the requests of other tenants.
    """
    if settings.replica_in_flight is not None:
        return settings.replica_in_flight
    if capabilities.llmapi is not None:
        return _DEFAULT_IN_FLIGHT
    if capabilities.max_batch_size is None:
        return None
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
