"""Creation of a process's `Service` from its settings, and shutdown of the service."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from certificates.reloading import CertificatePoller
from gateway.catalog.adapters import AdapterCatalog
from gateway.catalog.administration import AdapterAdmin
from gateway.catalog.conversion import Converter
from gateway.catalog.declared import DeclaredAdapters
from gateway.catalog.engine_fit import EngineFit
from gateway.catalog.mapped import MappedModels, MappedRouter
from gateway.catalog.router import ModelRouter
from gateway.config.file import ConfigurationError, ConfigurationFile
from gateway.config.mapped import EmbeddingModel, RerankModel
from gateway.config.settings import Settings
from gateway.conversations.store import Conversations
from gateway.guiding.check import GuideCheck
from gateway.metrics.metrics import Metrics
from gateway.monitor.monitor import Monitor
from gateway.replica_setup import list_targets, make_replicas
from gateway.scheduling.adapter_wait import AdapterWait
from gateway.scheduling.engine_queue import EngineQueue
from gateway.scheduling.fair_budget import FairBudget
from gateway.scheduling.mapped_pool import MappedPool
from gateway.scheduling.replicas import Replicas
from gateway.scheduling.start_queue import StartQueue
from gateway.service import Service
from gateway.state_setup import DatabaseState, open_state
from gateway.tenancy.access import Access, load_configuration_file, warn_if_open
from gateway.tenancy.accounting import Accounting
from gateway.tenancy.limits.budgets import BudgetReport, BudgetUsage
from gateway.tenancy.limits.limits import Limits
from gateway.tenancy.limits.redis import SharedLimits
from gateway.tenancy.unknown_models import UnknownModels
from gateway.tenancy.usage_log import UsageLog, UsageRecord
from gateway.tokenization.prompts import Prompts
from gateway.tokenization.threads import FairThread
from gateway.triton.http2.deliveries import delivery_queue
from gateway.troubles import Troubles

if TYPE_CHECKING:
    from gateway.observability.tracing import Tracer

log = logging.getLogger(__name__)

# Maximum seconds that the shutdown waits until the usage of cancelled requests is recorded.
_CLOSE_TIMEOUT_S = 2.0
# Size of a byte budget as a multiple of the largest item in it, such as the largest request body.
_BUDGET_BODIES = 4
# Byte budget for large embedding responses: four responses of 64 MiB. A response with 2048 vectors
# of 1536 numbers has about this size as JSON.
_VECTOR_BYTES = _BUDGET_BODIES * 64 * 2**20
# Fraction of the upload budget that one tenant may use.
_TENANT_UPLOAD_SHARE = 0.5
# Maximum number of requests of one tenant that wait for bytes of a budget. Each of them occupies a
# connection. With more waiting requests, one tenant could occupy the connections of all tenants.
_MAX_WAITING_BODIES_PER_TENANT = 32
# Pause of the logits thread after each job, as a multiple of the job's duration. For each job, the
# event loop needs about as much CPU time as the thread, to receive the logits. With this pause,
# each of them uses a third of a core, and a third remains for all other requests.
_LOGITS_REST_RATIO = 2.0


def load_prompts(settings: Settings) -> Prompts:
    """Load the configured tokenizer.

    Raise ConfigurationError if its folder does not contain a valid tokenizer.
    """
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


def connect_to_deliveries(starts: StartQueue) -> StartQueue:
    """Connect a start queue with the delivery queue of the event loop. Return the start queue.

    The start queue has the requests that wait to start; the delivery queue has the tokens to send.
    While one queue is overloaded, the other queue does less work.
    """
    deliveries = delivery_queue()
    # While the tokens of running requests are sent late, start fewer new requests.
    starts.yield_to(lambda: deliveries.is_late)
    starts.on_refusal = lambda: deliveries.gather_while(lambda: starts.is_refusing)
    return starts


def check_configuration(settings: Settings, workers: Path | None = None) -> None:
    """Raise ConfigurationError if `run_service` would refuse the configuration file."""
    load_configuration_file(settings, workers, MappedModels().check)


@asynccontextmanager
async def run_service(
    settings: Settings,
    prompts: Prompts,
    workers: Path | None = None,
    starts: StartQueue | None = None,
) -> AsyncIterator[Service]:
    """Yield a service that runs while the context is open.

    Args:
        settings: the settings of the gateway.
        prompts: from `load_prompts`; closed at the end.
        workers: the folder that all workers of a gateway share; None for a single process.
        starts: the queue of requests that wait to start while the event loop is busy; None to
            create one.

    Raises:
        ConfigurationError: The configuration file or a setting is wrong.
    """
    starts = connect_to_deliveries(starts or StartQueue())
    metrics = Metrics()
    mapped = MappedModels()
    configuration = load_configuration_file(settings, workers, mapped.check)
    configuration.subscribe(mapped.update)
    configuration.on_reload = metrics.count_reload
    troubles = Troubles()
    unknown_models = UnknownModels(troubles)
    access = Access(settings, unknown_models)
    configuration.subscribe(access.update)
    _log_warnings(settings, configuration)
    make_tracer = load_tracer_class(settings)
    tracer = None
    if make_tracer is not None and settings.otlp_endpoint is not None:
        tracer = make_tracer(settings.otlp_endpoint)
    replicas = make_replicas(settings, prompts, metrics)
    guides = GuideCheck(strict=settings.strict_parameters, release=settings.xgrammar_release)
    logits = FairThread("logits", rest=_LOGITS_REST_RATIO)
    try:
        async with (
            _open_adapters(settings, prompts, replicas, mapped) as (adapters, adapter_admin),
            open_state(settings, access, replicas, metrics) as state,
            CertificatePoller() as certificates,
            _open_accounting(
                settings, configuration, metrics, state, certificates.read_now
            ) as accounting,
            _make_conversations(settings) as conversations,
        ):
            router = ModelRouter(settings.model_name, adapters, mapped.refuse)
            mapped.adapters = lambda: [record.name for record in adapters.records]
            configuration.subscribe(adapter_admin.update)
            declared = DeclaredAdapters(adapters, adapter_admin)
            configuration.subscribe(declared.update)
            metrics.export_lora(adapters, adapter_admin.fit, replicas)
            metrics.export_declared(declared)
            metrics.export_conversations(conversations.stats)
            admission = _make_admission(settings, configuration, replicas)
            metrics.export_load(admission, starts, replicas)
            metrics.keeps_words.set(prompts.caches_words)
            service = Service(
                settings=settings,
                database=state.database,
                sharing=state.sharing,
                changes=state.changes,
                prompts=prompts,
                replicas=replicas,
                overrides=state.overrides,
                admission=admission,
                starts=starts,
                body_budget=_make_byte_budget(
                    _BUDGET_BODIES * settings.max_body_bytes, settings, configuration
                ),
                history_budget=_make_byte_budget(
                    _BUDGET_BODIES * settings.max_body_bytes, settings, configuration
                ),
                adapter_wait=AdapterWait(replicas, settings.adapter_wait),
                upload_budget=_make_upload_budget(settings, configuration),
                guides=guides,
                logits=logits,
                adapters=adapters,
                adapter_admin=adapter_admin,
                mapped=mapped,
                embedders=MappedRouter(mapped, router, EmbeddingModel),
                rankers=MappedRouter(mapped, router, RerankModel),
                mapped_pool=MappedPool(
                    replicas, partial(_make_call_limit, settings, configuration)
                ),
                vector_budget=_make_byte_budget(_VECTOR_BYTES, settings, configuration),
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
                keys=state.keys,
                accounting=accounting,
                budget_totals=state.totals,
                usage_rows=state.usage_rows,
                conversations=conversations,
                created=int(os.stat(settings.tokenizer_dir).st_mtime),
                tracer=tracer,
            )
            # Poll replicas once before the port opens, so that the first request finds them ready.
            await replicas.configure(list_targets(settings, configuration.current))
            work = asyncio.create_task(service.run())
            work.add_done_callback(service.on_run_end)
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


def _make_conversations(settings: Settings) -> Conversations:
    return Conversations(
        settings.store_dir / "@conversations",
        settings.redis_url,
        ttl_s=settings.conversations_ttl,
        tenant_bytes=settings.conversations_bytes,
        redis_timeout_s=settings.redis_timeout,
        ephemeral=settings.store_ephemeral,
    )


@asynccontextmanager
async def _open_accounting(
    settings: Settings,
    configuration: ConfigurationFile,
    metrics: Metrics,
    state: DatabaseState,
    on_hangup: Callable[[], None],
) -> AsyncIterator[Accounting]:
    """Yield the accounting of limits and usage.

    SIGHUP reloads the configuration, reopens the usage log if its file was moved, and calls
    `on_hangup`.
    """
    log = None
    if settings.usage_log is not None:
        log = UsageLog(settings.usage_log, on_failure=metrics.usage_lost.inc)

    def reload() -> None:
        configuration.reload_now()
        on_hangup()
        if log is not None:
            log.reopen_if_moved()

    def record(usage: UsageRecord) -> None:
        metrics.count_usage(usage)
        if log is not None:
            log.write(usage)
        if state.usage_rows is not None:
            state.usage_rows.add(usage)

    loop = asyncio.get_running_loop()
    async with AsyncExitStack() as stack:
        if log is not None:
            stack.callback(log.close)
        # Outside the main thread, `add_signal_handler` raises one of these errors. Ignore the
        # error: without the signal, polling detects changes of the files.
        with suppress(ValueError, RuntimeError):
            loop.add_signal_handler(signal.SIGHUP, reload)
            stack.callback(loop.remove_signal_handler, signal.SIGHUP)
            # Unblock SIGHUP, which was blocked at the start of the worker. A signal that arrived
            # meanwhile is delivered now.
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})
        standings = BudgetUsage()
        metrics.export_budgets(configuration, standings)

        def on_budget(report: BudgetReport) -> None:
            standings.update(report)
            state.totals.update(report)

        shared = None
        if settings.config is not None and settings.redis_url is not None:
            shared = SharedLimits(
                settings.redis_url,
                metrics.limits_shared.set,
                timeout_s=settings.redis_timeout,
                on_refused=metrics.limits_refused.inc,
                on_budget=on_budget,
                totals=state.totals.get_totals,
            )
            await stack.enter_async_context(shared)
        limits = Limits(shared, metrics.count_refusal, standings, metrics.limits_alone.inc)
        configuration.subscribe(limits.update)
        accounting = Accounting(
            limits,
            record,
            settings.model_name,
            logs_anonymous=log is not None or state.usage_rows is not None,
            log_problem=lambda: "" if log is None else log.problem,
        )
        yield accounting
        await accounting.close(_CLOSE_TIMEOUT_S)


def load_tracer_class(settings: Settings) -> type[Tracer] | None:
    """Return the tracer class. Return None if tracing is not configured.

    Raise ConfigurationError if tracing is configured but its packages are not installed.
    """
    if settings.otlp_endpoint is None:
        return None
    try:
        from gateway.observability.tracing import Tracer  # noqa: PLC0415  # OpenTelemetry is optional
    except ImportError as error:
        raise ConfigurationError(
            f"GATEWAY_OTLP_ENDPOINT: {error.name} is not installed; "
            "`pip install 'triton-openai-gateway[otel]'` installs it."
        ) from None
    return Tracer


@asynccontextmanager
async def _open_adapters(
    settings: Settings, prompts: Prompts, replicas: Replicas, mapped: MappedModels
) -> AsyncIterator[tuple[AdapterCatalog, AdapterAdmin]]:
    converter = Converter(settings, lambda: replicas.capabilities)
    base_model, is_taken = converter.base_model, mapped.__contains__
    async with AdapterCatalog(
        settings, lambda: replicas.capabilities, base_model, is_taken
    ) as adapters:
        fit = EngineFit(adapters, lambda: replicas.capabilities, base_model)
        async with AdapterAdmin(
            settings, adapters, converter, prompts, fit, is_taken
        ) as adapter_admin:
            yield adapters, adapter_admin


def _make_admission(
    settings: Settings, configuration: ConfigurationFile, replicas: Replicas
) -> EngineQueue:
    def cap(places: int | None) -> int:
        return settings.max_in_flight if places is None else min(places, settings.max_in_flight)

    places = replicas.slots
    admission = EngineQueue(
        lambda: cap(places.current_limit()),
        lambda: settings.tenant_share if configuration.current.tenants else 1.0,
        capacity=lambda lane: cap(places.capacity(lane)),
        scopes=partial(places.scopes, max_slots=settings.max_in_flight),
        queue=settings.queue_size,
        wait_s=settings.queue_timeout,
    )
    replicas.queued_lanes = lambda: admission.queued_lanes
    return admission


def _make_call_limit(
    settings: Settings, configuration: ConfigurationFile, limit: Callable[[], int]
) -> FairBudget:
    """Return the budget for concurrent calls of one embedding or rerank model.

    `limit` returns the maximum number of calls.
    """
    return FairBudget(
        limit,
        lambda: settings.tenant_share if configuration.current.tenants else 1.0,
        queue=settings.queue_size,
        wait_s=settings.queue_timeout,
    )


def _log_warnings(settings: Settings, configuration: ConfigurationFile) -> None:
    warn_if_open(settings, configuration.current)
    if settings.wait_warning:
        log.warning("%s", settings.wait_warning)


def _make_byte_budget(
    nbytes: int, settings: Settings, configuration: ConfigurationFile
) -> FairBudget:
    """Return a budget of `nbytes` bytes, which must be four times the size of the largest item.

    If the configuration has tenants, one tenant may use a quarter of the budget.
    """
    return FairBudget(
        lambda: nbytes,
        lambda: 1 / _BUDGET_BODIES if configuration.current.tenants else 1.0,
        queue=settings.queue_size,
        queue_of_tenant=_MAX_WAITING_BODIES_PER_TENANT,
        wait_s=settings.queue_timeout,
    )


def _make_upload_budget(settings: Settings, configuration: ConfigurationFile) -> FairBudget:
    return FairBudget(
        lambda: settings.cold_send_bytes,
        lambda: _TENANT_UPLOAD_SHARE if configuration.current.tenants else 1.0,
        queue=settings.queue_size,
        wait_s=settings.queue_timeout,
    )
