"""Adapters for operators: /v1/adapters.

Every call needs ``Authorization: Bearer <admin key>``.
"""

from __future__ import annotations

import shutil
from contextlib import AbstractContextManager, AsyncExitStack
from typing import Annotated, Literal

from fastapi import Request
from pydantic import Field
from starlette.concurrency import run_in_threadpool

from adapters.errors import InvalidName
from adapters.record import SHORT_DIGEST, Record, Version, check_name
from gateway.api.adapter_upload import UPLOAD, new_folder, read_upload, save_files, text_field
from gateway.api.answer_schemas import Answer, Count
from gateway.api.auth import Admin, Auditor
from gateway.api.body import json_body, media_type, parse_json, read_body
from gateway.api.messages import Strict
from gateway.api.routing import ADMIN, BODY, Name, Router, needs, refusals
from gateway.api.sse import cancel_on_disconnect
from gateway.catalog.adapters import AddedVersion
from gateway.observability.audit import Action, Audit, State
from gateway.service import Service
from gateway.sources.source import parse

_JSON = frozenset({"application/json", "text/json"})
SMALL = 64 * 1024
"""Bytes of a JSON body about an adapter."""

router = Router()


class AdapterVersion(Answer):
    version: str
    digest: str
    task_id: Annotated[str, Field(description="A string: JavaScript would round the number.")]
    created: Count
    dtype: str
    rank: Count
    bytes: Count
    modules: list[str]
    source: Annotated[
        str,
        Field(description="`upload`, another way in, or where it was fetched, without secrets."),
    ]
    added_by: Annotated[
        str | None,
        Field(
            description="The admin, by the beginning of the key's hash; `configuration` for what "
            "the configuration file declares, and `GATEWAY_ADAPTERS` for what that names; null for "
            "what is older than this record."
        ),
    ]
    placement: Annotated[
        dict[str, str],
        Field(
            description="By replica that reads adapters from its own disk: held, on its way, or "
            "why it is not held."
        ),
    ]


class Adapter(Answer):
    object: Literal["adapter"] = "adapter"
    name: str
    base: str
    served: str
    revision: Count
    versions: list[AdapterVersion]


class DeclaredAdapter(Answer):
    """`state`: waiting, loaded or failed; `error` then says why. It is tried again."""

    name: str
    source: str
    state: str
    version: str | None
    error: str | None


class Adapters(Answer):
    object: Literal["list"] = "list"
    data: list[Adapter]
    declared: Annotated[
        list[DeclaredAdapter], Field(description="Those of the configuration file.")
    ]


class AdapterAdded(Adapter):
    shared: Annotated[
        bool | None,
        Field(
            description="Whether Redis has it, for the other gateways; false: they get it once "
            "Redis can be used again, null without a Redis."
        ),
    ]
    warnings: list[str]


class AdapterVerified(Adapter):
    verified: Literal[True] = True


class AdapterDeleted(Answer):
    name: str
    object: Literal["adapter"] = "adapter"
    deleted: Literal[True] = True


class AdapterOfSource(Strict):
    """`source`: an absolute folder, https://, s3:// or hf://, as GATEWAY_ADAPTER_SOURCES allows."""

    name: str
    base: str
    source: str


@router.post(
    "/v1/adapters",
    summary="Adds an adapter, or a new version of one.",
    status_code=201,
    responses=refusals(*BODY, *ADMIN, 503),
    openapi_extra=needs("admin_key", form=UPLOAD, json=AdapterOfSource),
)
async def add(request: Request, service: Admin, audit: Auditor) -> AdapterAdded:
    """Multipart upload: fields `name` and `base`, and the adapter's files under their own names.

    Or JSON that names a source, from which this gateway fetches it.
    """
    names_source = media_type(request) in _JSON
    record, notes = await (_add_of_source if names_source else _add_upload)(request, service, audit)
    shared = service.adapters.store.is_shared(record)
    warnings = [*notes, *service.adapters.warnings().values()]
    if shared is False:
        warnings.insert(
            0,
            f"{record.name} is not shared yet: it is served here, and other gateways get it once "
            "Redis can be used again",
        )
    return AdapterAdded(**dict(_adapter(service, record)), shared=shared, warnings=warnings)


async def _add_of_source(request: Request, service: Service, audit: Audit) -> AddedVersion:
    wanted = parse_json(AdapterOfSource, await read_body(request, SMALL))
    with audited(audit, service, "adapters.add", wanted.name) as action:
        source = parse(wanted.source)
        service.adapters.check(wanted.name, wanted.base)
        async with AsyncExitStack() as stack:
            # What is begun here after that is ended, whoever waits for it.
            async with cancel_on_disconnect(request.scope):
                fetched = service.adapters.sources.fetch(source, audit.admin)
                found = await stack.enter_async_context(fetched)
            added = await service.adapters.add(
                wanted.name,
                wanted.base,
                found.folder,
                source=str(source),
                within=found.within,
                added_by=audit.admin,
            )
        action.after = told(added.record)
    return added


async def _add_upload(request: Request, service: Service, audit: Audit) -> AddedVersion:
    form = await read_upload(request, service.settings.max_adapter_bytes)
    folder = await run_in_threadpool(new_folder)
    try:
        name, base = text_field(form, "name"), text_field(form, "base")
        with audited(audit, service, "adapters.add", name) as action:
            await run_in_threadpool(save_files, form, folder)
            added = await service.adapters.add(
                name, base, folder, source="upload", within=folder, added_by=audit.admin
            )
            action.after = told(added.record)
    finally:
        await run_in_threadpool(shutil.rmtree, folder)
        await form.close()
    return added


@router.get(
    "/v1/adapters",
    summary="All adapters with their versions.",
    responses=refusals(*ADMIN),
    openapi_extra=needs("admin_key"),
)
async def list_all(service: Admin) -> Adapters:
    declared = [
        DeclaredAdapter(
            name=one.name,
            source=one.source,
            state=one.state,
            version=one.version[:SHORT_DIGEST] or None,
            error=one.error or None,
        )
        for one in await run_in_threadpool(service.declared.read_report)
    ]
    data = [_adapter(service, record) for record in service.adapters.records]
    return Adapters(data=data, declared=declared)


class Rollback(Strict):
    """`version`: 12 to 64 hex digits of a digest; without it, the one that was served before."""

    version: str | None = None


@router.post(
    "/v1/adapters/{name:path}/rollback",
    summary="Serves an older version of an adapter.",
    responses=refusals(*BODY, *ADMIN, 404, 503),
    openapi_extra=needs("admin_key", json=Rollback, empty=True),
)
async def rollback(
    service: Admin,
    audit: Auditor,
    name: Name,
    wanted: Annotated[Rollback, json_body(Rollback, SMALL)],
) -> Adapter:
    with audited(audit, service, "adapters.rollback", name) as action:
        record = await service.adapters.rollback(name, wanted.version)
        action.after = told(record)
    return _adapter(service, record)


@router.post(
    "/v1/adapters/{name:path}/verify",
    summary="Reads every version of an adapter with its checksums.",
    responses=refusals(*ADMIN, 404, 503),
    openapi_extra=needs("admin_key"),
)
async def verify(service: Admin, audit: Auditor, name: Name) -> AdapterVerified:
    with audited(audit, service, "adapters.verify", name):
        record = await service.adapters.verify(name)
    return AdapterVerified(**dict(_adapter(service, record)))


# A name may have slashes: these come after the paths that end in a word of their own.
@router.get(
    "/v1/adapters/{name:path}",
    summary="One adapter with its versions.",
    responses=refusals(*ADMIN, 404),
    openapi_extra=needs("admin_key"),
)
async def show(service: Admin, name: Name) -> Adapter:
    return _adapter(service, service.adapters.record(name))


@router.delete(
    "/v1/adapters/{name:path}",
    summary="Stops serving an adapter.",
    responses=refusals(*ADMIN, 404, 503),
    openapi_extra=needs("admin_key"),
)
async def remove(service: Admin, audit: Auditor, name: Name) -> AdapterDeleted:
    with audited(audit, service, "adapters.remove", name) as action:
        record = await service.adapters.remove(name)
        action.after = None
    return AdapterDeleted(name=record.name)


def audited(
    audit: Audit, service: Service, action: str, name: str
) -> AbstractContextManager[Action]:
    """The audit log's line for what happens to `name`.

    What cannot be an adapter's name is not written: it may be anything that somebody pasted.
    """
    try:
        target = check_name(name)
    except InvalidName:
        target = "(not a name)"
    found = (record for record in service.adapters.records if record.name == name)
    return audit.action(action, target, next(map(told, found), None))


def told(record: Record) -> State:
    """What the audit log says of an adapter."""
    return {
        "served": record.version.short_digest,
        "revision": record.revision,
        "versions": [version.short_digest for version in record.versions],
    }


def _adapter(service: Service, record: Record) -> Adapter:
    return Adapter(
        name=record.name,
        base=record.version.base,
        served=record.version.short_digest,
        revision=record.revision,
        versions=[_version(service, version) for version in record.versions],
    )


def _version(service: Service, version: Version) -> AdapterVersion:
    return AdapterVersion(
        version=version.short_digest,
        digest=version.digest,
        task_id=str(version.task_id),
        created=int(version.created),
        dtype=version.dtype,
        rank=version.rank,
        bytes=version.nbytes,
        modules=sorted({rows.module for rows in version.modules}),
        source=version.source,
        added_by=version.added_by,
        placement=service.placement(version.weights),
    )
