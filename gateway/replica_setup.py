"""The replicas as the settings and the configuration describe them."""

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

# Fewer than an engine for chats runs at once, so that little waits in it; a small one's throughput
# is not lost by it.
_GUESSED_PLACES = 64


def make_replicas(settings: Settings, prompts: Prompts, metrics: Metrics) -> Replicas:
    """None yet: `Replicas.configure` is told their endpoints."""
    return Replicas(
        partial(
            Engine,
            model=settings.triton_model,
            vocab_size=prompts.vocab_size,
            tokenizer=TokenizerIdentity(settings.tokenizer_dir, prompts),
            tokenizer_policy=settings.tokenizer_check,
            max_seq_len=settings.max_seq_len,
            on_stop=metrics.count_stop,
            on_cold_send=metrics.count_upload,
            connection=_connection_options(settings),
            mode=settings.triton_mode,
            text_model=settings.triton_text_model,
            first_response_timeout=settings.first_response_timeout,
            tokens_per_block=settings.tokens_per_block,
        ),
        partial(_places, settings),
        drain_grace_s=settings.replica_drain_grace,
    )


def targets_of(settings: Settings, configuration: Configuration) -> list[Target]:
    if configuration.replicas is not None:
        return [Target(r.endpoint, r.weight, r.drain) for r in configuration.replicas]
    return [Target(endpoint) for endpoint in settings.triton_endpoints]


def guessed(settings: Settings, capabilities: ModelCapabilities) -> str | None:
    """What an operator should know where the number of a replica's requests is a guess."""
    if settings.replica_in_flight is not None or capabilities.llmapi is None:
        return None
    return (
        f"each Triton gets {_GUESSED_PLACES} requests at once, which is a guess: a model of the "
        "llmapi repository does not tell how many it runs. Set GATEWAY_REPLICA_IN_FLIGHT to 5/4 of "
        "max_batch_size of its model.yaml"
    )


def _places(settings: Settings, capabilities: ModelCapabilities) -> int | None:
    """How many requests a replica gets at once.

    A few more than it runs: the next ones are at hand when some end. Of llmapi it is unknown; with
    none at all whatever one tenant sends would stand before the others' in the engine's own queue.
    """
    if settings.replica_in_flight is not None:
        return settings.replica_in_flight
    if capabilities.llmapi is not None:
        return _GUESSED_PLACES
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
