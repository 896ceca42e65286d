"""Checks of a service's components for problems, which are reported to `Service.troubles`.

See decision 009 in docs/decisions.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from itertools import count
from logging import ERROR, WARNING
from typing import NamedTuple

from gateway.replica_setup import describe_in_flight_guess
from gateway.service import Service
from gateway.tenancy.access import describe_exposure

_POLL_INTERVAL_S = 0.5
_THOROUGH_EVERY_POLLS = 10  # number of polls per check of the adapters, which takes longer


class _Condition(NamedTuple):
    """Result of one check: descriptions of the items, such as replicas, that have a problem.

    Attributes:
        kind: the name of the checked problem in this code.
        level: the level of the problem, a level of `logging`.
        texts: the text to report for each item that has the problem; empty if no item has it.
        logs: True if the problem is logged when it is reported; False if other code logs it.
    """

    kind: str
    level: int
    texts: Mapping[str, str]
    logs: bool = False


@asynccontextmanager
async def poll_conditions(service: Service, connections: Callable[[], str]) -> AsyncIterator[None]:
    """Update `service.troubles` twice a second while the context is open.

    `connections` returns the text to report if the gateway has too many connections, else "".
    """
    work = asyncio.create_task(_follow(service, connections))
    try:
        yield
    finally:
        work.cancel()
        await asyncio.wait([work])


async def _follow(service: Service, connections: Callable[[], str]) -> None:
    troubles = service.troubles
    for number in count():
        try:
            check_conditions(service, connections(), thoroughly=number % _THOROUGH_EVERY_POLLS == 0)
        except Exception as error:  # do not end the task, so that later checks still run
            # Report only the error's type: its message may contain client data or secrets. The log
            # has the traceback.
            text = f"some troubles cannot be found: {type(error).__name__}"
            troubles.hold("conditions", ERROR, text, exc_info=True)
        else:
            troubles.clear("conditions")
        await asyncio.sleep(_POLL_INTERVAL_S)


def check_conditions(service: Service, connections: str, *, thoroughly: bool = True) -> None:
    """Report the problems that exist now, and clear problems that have ended.

    Args:
        service: The service to check.
        connections: The text to report about connections; "" if there is no problem.
        thoroughly: Also run checks that take longer with many adapters.
    """
    found = [*_find_store_conditions(service, connections), *_find_model_conditions(service)]
    if thoroughly:
        found.append(_Condition("adapter_caches", WARNING, service.adapter_admin.fit.warnings()))
    for kind, level, texts, logs in found:
        service.troubles.hold_each(kind, level, texts, logs=logs)
    service.unknown_models.step()


def _find_store_conditions(service: Service, connections: str) -> Iterator[_Condition]:
    redis = service.adapters.store.redis_failure
    redis_text = f"{redis}; changes are this gateway's alone, and adapters come from its disk"
    yield _Condition("redis", WARNING, _single(redis_text if redis else ""))
    limits_text = "limits are not shared now: each gateway counts as when_redis_is_away says"
    yield _Condition(
        "limits", WARNING, _single(limits_text if service.accounting.counts_alone else "")
    )
    yield _Condition("budgets", WARNING, service.accounting.nearly_used)
    yield _Condition("usage_log", ERROR, _single(service.accounting.log_problem()))
    disk, shared = service.conversations.problems
    yield _Condition("conversations_disk", ERROR, _single(disk))
    yield _Condition("conversations_redis", WARNING, _single(shared))
    problem = service.database.problem
    database_text = f"the database fails: {problem}; what needs it gets 503" if problem else ""
    yield _Condition("database", ERROR, _single(database_text))
    yield _Condition("overrides", WARNING, _single(service.overrides.problem), logs=True)
    yield _Condition("sharing", WARNING, _single(service.sharing.problem), logs=True)
    keys = service.keys
    yield _Condition("keys", WARNING, _single("" if keys is None else keys.problem), logs=True)
    yield _Condition("connections", WARNING, _single(connections))
    yield _Condition("busy", WARNING, _single(service.starts.problem), logs=True)
    current = service.configuration.current
    yield _Condition("keys_latch", ERROR, _single(service.configuration.problem()))
    yield _Condition("no_keys", WARNING, _single(describe_exposure(service.settings, current)))


def _find_model_conditions(service: Service) -> Iterator[_Condition]:
    adapters, warnings, files = service.adapters, {}, {}
    for replica in service.replicas:
        selection = replica.engine.last_selection
        if selection is None or not replica.ready:
            continue
        served = selection.capabilities
        guess = describe_in_flight_guess(service.settings, served)
        if warning := "; ".join(filter(None, (selection.warning, guess))):
            warnings[replica.endpoint] = f"{replica.endpoint}: {warning}"
        if served.engine_problem:
            files[replica.endpoint] = f"{replica.endpoint}: {served.engine_problem}"
    yield _Condition("engines", WARNING, warnings)
    yield _Condition("engine_files", WARNING, files)
    yield _Condition("replica_names", WARNING, _single(service.replicas.lookup_problem))
    yield _Condition("other_models", ERROR, service.mapped_pool.misfits)
    yield _Condition("disks", WARNING, {each: each for each in adapters.disks.shortfalls.lasting})
    refused = {
        name: f"adapter {name!r} of the configuration was refused: {why}"
        for name, why in service.adapter_admin.refused.items()
    }
    yield _Condition("configured_adapters", ERROR, refused)
    # Find adapters that have the same name as a configured model. Another gateway may have
    # registered such an adapter, or the model was added to the configuration later.
    hidden = {
        model.name: f"adapter {model.name!r} is hidden: the configuration has a model of its name"
        for model in service.mapped.all
        if adapters.has(model.name)
    }
    yield _Condition("hidden_adapters", WARNING, hidden, logs=True)


def _single(text: str) -> dict[str, str]:
    return {"": text} if text else {}
