"""Makes a process's service from its settings, and ends in the right order what it began."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from certificates.reloading import CertificatePoller
from gateway.catalog.adapters import Adapters
from gateway.catalog.declared import Declared
from gateway.catalog.mapped import MappedModels, MappedRouter
from gateway.catalog.router import Router
from gateway.config.file import ConfigurationError, ConfigurationFile
from gateway.config.mapped import EmbeddingModel, RerankModel
from gateway.config.settings import Settings
from gateway.conversations.store import Conversations
from gateway.guiding.check import GuideCheck
from gateway.metrics.metrics import Metrics
from gateway.monitor.monitor import Monitor
from gateway.overrides.copies import OverrideCopies
from gateway.overrides.followed import FollowedOverrides
from gateway.replica_setup import make_replicas, targets_of
from gateway.scheduling.adapter_wait import AdapterWait
from gateway.scheduling.admission import Admission
from gateway.scheduling.mapped_pool import MappedPool
from gateway.scheduling.replicas import Replicas
from gateway.scheduling.start_queue import StartQueue
from gateway.service import Service
from gateway.tenancy.access import Access, configuration_file, warn_if_open
from gateway.tenancy.accounting import Accounting
from gateway.tenancy.keys.copies import KeyCopies
from gateway.tenancy.keys.disk import KeyDisk
from gateway.tenancy.keys.issued import IssuedKeys
from gateway.tenancy.keys.shared import SharedKeys
from gateway.tenancy.limits.budgets import Standings
from gateway.tenancy.limits.limits import Limits
from gateway.tenancy.limits.redis import SharedLimits
from gateway.tenancy.unknown_models import UnknownModels
from gateway.tenancy.usage_log import Usage, UsageLog
from gateway.tokenization.prompts import Prompts
from gateway.tokenization.turns import TurnThread
from gateway.triton.http2.deliveries import delivery_queue
from gateway.troubles import Troubles

if TYPE_CHECKING:
    from gateway.observability.tracing import Tracer

# For requests that outlived the grace of a shutdown and were cancelled a moment ago.
_ENDING_S = 2.0
_LARGEST_BODIES = 4
# As many answers of 2048 vectors with 1536 numbers each, written as text.
_VECTOR_BYTES = _LARGEST_BODIES * 64 * 2**20
_SHARE_OF_COLD_SENDS = 0.5
# Of one tenant. Each keeps a connection, of which all tenants together have a limit.
_WAITING_BODIES = 32
# To receive logits takes the event loop as long as the work on them does the thread. Resting in
# between, with the loop busy for longer, keeps both to a third: the rest is for everybody's tokens.
_LOGITS_REST = 2.0


def load_prompts(settings: Settings) -> Prompts:
    """The tokenizer of the settings. Raises ConfigurationError where its folder is none."""
    try:
        return Prompts.load(
            settings.tokenizer_dir,
            settings.tool_form,
            reasoning_parser=settings.reasoning_parser,
            control_tokens_in_messages=settings.control_tokens_in_messages,
            excludes_uncallable_tools=settings.exclude_tools_when_tool_choice_none,
        )
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"GATEWAY_TOKENIZER_DIR: {error}") from error


def _beside_deliveries(starts: StartQueue) -> StartQueue:
    """Have a start queue and the event loop's deliveries mind each other; return the queue."""
    deliveries = delivery_queue()
    # Requests that began come first: else each new one would make all tokens later.
    starts.yield_to(lambda: deliveries.is_late)
    deliveries.gather_while(lambda: starts.is_refusing)
    return starts


def check_configuration(settings: Settings, workers: Path | None = None) -> None:
    """Raises ConfigurationError where `running_service` would for the file of these settings."""
    configuration_file(settings, workers, MappedModels().check)


@asynccontextmanager
async def running_service(
    settings: Settings,
    prompts: Prompts,
    workers: Path | None = None,
    starts: StartQueue | None = None,
) -> AsyncIterator[Service]:
    """A service that is at work while the context is open. Raises ConfigurationError.

    `prompts`, of `load_prompts`, are closed at its end. `workers` is the folder that all workers of
    a gateway share. `starts` is where requests wait for the event loop.
    """
    starts = _beside_deliveries(starts or StartQueue())
    metrics = Metrics()
    mapped = MappedModels()
    configuration = configuration_file(settings, workers, mapped.check)
    configuration.subscribe(mapped.update)
    configuration.on_reload = metrics.count_reload
    troubles = Troubles()
    unknown_models = UnknownModels(troubles)
    access = Access(settings, unknown_models)
    configuration.subscribe(access.update)
    warn_if_open(settings, configuration.current)
    make_tracer = tracer_class(settings)
    tracer = None
    if make_tracer is not None and settings.otlp_endpoint is not None:
        tracer = make_tracer(settings.otlp_endpoint)
    replicas = make_replicas(settings, prompts, metrics)
    guides = GuideCheck(strict=settings.strict_parameters, release=settings.xgrammar_release)
    logits = TurnThread("logits", rest=_LOGITS_REST)
    try:
        async with (
            Adapters(
                settings, prompts, lambda: replicas.capabilities, mapped.__contains__
            ) as adapters,
            _keys(settings, access, metrics, workers) as keys,
            CertificatePoller() as certificates,
            _accounting(settings, configuration, metrics, certificates.read_now) as accounting,
            _conversations(settings) as conversations,
            # No model's folder has such a name, as theirs are quoted.
            FollowedOverrides(
                OverrideCopies(settings.store_dir / "@replicas", settings.redis_url),
                replicas.override,
            ) as overrides,
        ):
            router = Router(settings.model_name, adapters, mapped.refuse)
            mapped.adapters = lambda: [record.name for record in adapters.records]
            configuration.subscribe(adapters.update)
            declared = Declared(adapters, adapters.declared_dir)
            configuration.subscribe(declared.update)
            metrics.export_lora(adapters, replicas)
            metrics.export_declared(declared)
            metrics.export_conversations(conversations.stats)
            admission = _admission(settings, configuration, replicas)
            metrics.export_load(admission, starts, replicas)
            metrics.keeps_words.set(prompts.keeps_words)
            service = Service(
                settings=settings,
                prompts=prompts,
                replicas=replicas,
                overrides=overrides,
                admission=admission,
                starts=starts,
                bodies=_bytes(_LARGEST_BODIES * settings.max_body_bytes, settings, configuration),
                histories=_bytes(
                    _LARGEST_BODIES * settings.max_body_bytes, settings, configuration
                ),
                adapter_wait=AdapterWait(replicas, settings.adapter_wait),
                cold_sends=_cold_sends(settings, configuration),
                guides=guides,
                logits=logits,
                adapters=adapters,
                mapped=mapped,
                embedders=MappedRouter(mapped, router, EmbeddingModel),
                rankers=MappedRouter(mapped, router, RerankModel),
                mapped_pool=MappedPool(replicas, partial(_calls, settings, configuration)),
                vectors=_bytes(_VECTOR_BYTES, settings, configuration),
                declared=declared,
                router=router,
                troubles=troubles,
                unknown_models=unknown_models,
                metrics=metrics,
                monitor=Monitor(
                    lambda: sum([each.engine.residency.loads for each in replicas]),
                    lambda: admission.waiting + starts.waiting,
                ),
                configuration=configuration,
                access=access,
                keys=keys,
                accounting=accounting,
                conversations=conversations,
                created=int(os.stat(settings.tokenizer_dir).st_mtime),
                tracer=tracer,
            )
            # One look before the port opens: with Triton up, the first request is served.
            await replicas.configure(targets_of(settings, configuration.current))
            work = asyncio.create_task(service.run())
            work.add_done_callback(service.ended)
            try:
                yield service
            finally:
                work.cancel()
                await asyncio.wait([work])
    finally:
        await replicas.close()
        if tracer is not None:
            await tracer.close()
        guides.close()
        logits.close()
        prompts.close()


@asynccontextmanager
async def _keys(
    settings: Settings, access: Access, metrics: Metrics, workers: Path | None
) -> AsyncIterator[IssuedKeys | None]:
    if settings.config is None:
        yield None
        return
    shared = None
    if settings.redis_url is not None:
        shared = SharedKeys(settings.redis_url, metrics.keys_refused.inc)
    # No model's folder has such a name, as theirs are quoted.
    disk = KeyDisk(settings.store_dir / "@keys")
    async with IssuedKeys(KeyCopies(disk, shared, workers), access) as keys:
        yield keys


def _conversations(settings: Settings) -> Conversations:
    return Conversations(
        settings.store_dir / "@conversations",
        settings.redis_url,
        ttl_s=settings.conversations_ttl,
        tenant_bytes=settings.conversations_bytes,
        redis_timeout_s=settings.redis_timeout,
        ephemeral=settings.store_ephemeral,
    )


@asynccontextmanager
async def _accounting(
    settings: Settings,
    configuration: ConfigurationFile,
    metrics: Metrics,
    on_hangup: Callable[[], None],
) -> AsyncIterator[Accounting]:
    """Limits and usage; on SIGHUP the configuration is read and the usage log's file looked at.

    `on_hangup` is called on SIGHUP, too.
    """
    log = None
    if settings.usage_log is not None:
        log = UsageLog(settings.usage_log, on_failure=metrics.usage_lost.inc)

    def hung_up() -> None:
        configuration.reload_now()
        on_hangup()
        if log is not None:
            log.follow()

    def record(usage: Usage) -> None:
        metrics.count_usage(usage)
        if log is not None:
            log.write(usage)

    loop = asyncio.get_running_loop()
    async with AsyncExitStack() as stack:
        if log is not None:
            stack.callback(log.close)
        # Signals reach the main thread alone; elsewhere the file is still looked at.
        with suppress(ValueError, RuntimeError):
            loop.add_signal_handler(signal.SIGHUP, hung_up)
            stack.callback(loop.remove_signal_handler, signal.SIGHUP)
            # A worker is born with it blocked: what came since then is seen to now.
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})
        standings = Standings()
        metrics.export_budgets(configuration, standings)
        shared = None
        if settings.config is not None and settings.redis_url is not None:
            shared = SharedLimits(
                settings.redis_url,
                metrics.limits_shared.set,
                timeout_s=settings.redis_timeout,
                on_refused=metrics.limits_refused.inc,
                on_budget=standings.told,
            )
            await stack.enter_async_context(shared)
        limits = Limits(shared, metrics.count_refusal, standings, metrics.limits_alone.inc)
        configuration.subscribe(limits.update)
        accounting = Accounting(
            limits,
            record,
            settings.model_name,
            logged=log is not None,
            log_problem=lambda: "" if log is None else log.problem,
        )
        yield accounting
        await accounting.close(_ENDING_S)


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


def _admission(
    settings: Settings, configuration: ConfigurationFile, replicas: Replicas
) -> Admission:
    def at_most(places: int | None) -> int:
        return settings.max_in_flight if places is None else min(places, settings.max_in_flight)

    places = replicas.places
    admission = Admission(
        lambda: at_most(places.now()),
        lambda: settings.tenant_share if configuration.current.tenants else 1.0,
        capacity=lambda lane: at_most(places.capacity(lane)),
        scopes=partial(places.scopes, most=settings.max_in_flight),
        queue=settings.queue_size,
        wait_s=settings.queue_timeout,
    )
    replicas.awaited = lambda: admission.awaited
    return admission


def _calls(
    settings: Settings, configuration: ConfigurationFile, limit: Callable[[], int]
) -> Admission:
    """Of one model that answers once."""
    return Admission(
        limit,
        lambda: settings.tenant_share if configuration.current.tenants else 1.0,
        queue=settings.queue_size,
        wait_s=settings.queue_timeout,
    )


def _bytes(room: int, settings: Settings, configuration: ConfigurationFile) -> Admission:
    """Room for some of the largest, of which a tenant has that of one."""
    return Admission(
        lambda: room,
        lambda: 1 / _LARGEST_BODIES if configuration.current.tenants else 1.0,
        queue=settings.queue_size,
        queue_of_tenant=_WAITING_BODIES,
        wait_s=settings.queue_timeout,
    )


def _cold_sends(settings: Settings, configuration: ConfigurationFile) -> Admission:
    return Admission(
        lambda: settings.cold_send_bytes,
        lambda: _SHARE_OF_COLD_SENDS if configuration.current.tenants else 1.0,
        queue=settings.queue_size,
        wait_s=settings.queue_timeout,
    )
