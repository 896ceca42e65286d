"""Endpoints below /v1/adapters with which operators manage adapters.

Every call needs ``Authorization: Bearer <admin key>``.
"""

from __future__ import annotations

import shutil
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import Annotated, Literal

from fastapi import Request
from pydantic import Field
from starlette.concurrency import run_in_threadpool

from adapters.errors import InvalidName
from adapters.record import SHORT_DIGEST, Record, Version, check_name
from gateway.api.admin.adapter_upload import (
    UPLOAD,
    get_text_field,
    make_folder,
    read_upload,
    save_files,
)
from gateway.api.answer_schemas import AnswerModel, Count
from gateway.api.auth import Admin, Auditor
from gateway.api.body import get_media_type, json_body, parse_json, read_body
from gateway.api.openai.messages import Strict
from gateway.api.routing import ADMIN, BODY, ApiRouter, Name, needs, refusals
from gateway.api.sse import cancel_on_disconnect
from gateway.catalog.administration import AddedVersion
from gateway.observability.audit import Action, Audit, State
from gateway.service import Service
from gateway.sources.source import parse

_JSON = frozenset({"application/json", "text/json"})
MAX_JSON_BYTES = 64 * 1024
"""Maximum bytes of a JSON body in a request to add, load, unload or roll back an adapter."""

router = ApiRouter()


class AdapterVersion(AnswerModel):
    version: str
    digest: str
    task_id: Annotated[str, Field(description="A string, as JavaScript would round the number.")]
    created: Count
    dtype: str
    rank: Count
    bytes: Count
    modules: list[str]
    source: Annotated[
        str,
        Field(description="`upload`, another method, or the source's URL without secrets."),
    ]
    added_by: Annotated[
        str | None,
        Field(
            description="The admin, by the beginning of the key's hash; `configuration` for an "
            "adapter of the configuration file, `GATEWAY_ADAPTERS` for one of that setting; null "
            "for versions that are older than this field."
        ),
    ]
    placement: Annotated[
        dict[str, str],
        Field(
            description="For each replica that reads adapters from its own disk: held, on its way, "
            "or the reason why it is not held."
        ),
    ]


class Adapter(AnswerModel):
    object: Literal["adapter"] = "adapter"
    name: str
    base: str
    served: str
    revision: Count
    versions: list[AdapterVersion]


class DeclaredAdapter(AnswerModel):
    """An adapter that the configuration file declares.

    `state` is `waiting`, `loaded` or `failed`. After a failure, `error` is the reason, and the
    gateway tries to load the adapter again.
    """

    name: str
    source: str
    state: str
    version: str | None
    error: str | None


class Adapters(AnswerModel):
    object: Literal["list"] = "list"
    data: list[Adapter]
    declared: Annotated[
        list[DeclaredAdapter], Field(description="The adapters of the configuration file.")
    ]


class AdapterAdded(Adapter):
    shared: Annotated[
        bool | None,
        Field(
            description="True if Redis has the adapter for other gateways; false if they get it "
            "once Redis is available again; null without Redis."
        ),
    ]
    warnings: list[str]


class AdapterVerified(Adapter):
    verified: Literal[True] = True


class AdapterDeleted(AnswerModel):
    name: str
    object: Literal["adapter"] = "adapter"
    deleted: Literal[True] = True


class AdapterOfSource(Strict):
    """An adapter to fetch from `source`.

    `source` is the absolute path of a folder, or a URL with https://, s3:// or hf://. The setting
    GATEWAY_ADAPTER_SOURCES must allow the source.
    """

    name: str
    base: str
    source: str


@router.post(
    "/v1/adapters",
    summary="Add an adapter, or a new version of one.",
    status_code=201,
    responses=refusals(*BODY, *ADMIN, 503),
    openapi_extra=needs("admin_key", form=UPLOAD, json=AdapterOfSource),
)
async def add(request: Request, service: Admin, audit: Auditor) -> AdapterAdded:
    """Add an adapter by upload or from a source.

    For an upload, send a multipart form with the fields `name` and `base` and the adapter's files.
    Each file keeps its original file name. To add from a source, send JSON with the field `source`.
    The gateway then fetches the files from this source.
    """
    names_source = get_media_type(request) in _JSON
    record, notes = await (_add_from_source if names_source else _add_upload)(
        request, service, audit
    )
    shared = service.adapters.store.is_shared(record)
    warnings = [*notes, *service.adapter_admin.fit.warnings().values()]
    if shared is False:
        warnings.insert(
            0,
            f"{record.name} is not shared yet: it is served here, and other gateways get it once "
            "Redis can be used again",
        )
    return AdapterAdded(**dict(_build_adapter(service, record)), shared=shared, warnings=warnings)


async def _add_from_source(request: Request, service: Service, audit: Audit) -> AddedVersion:
    wanted = parse_json(AdapterOfSource, await read_body(request, MAX_JSON_BYTES))
    async with audit_change(audit, service, "adapters.add", wanted.name) as action:
        source = parse(wanted.source)
        service.adapter_admin.check(wanted.name, wanted.base)
        async with AsyncExitStack() as stack:
            # If the client disconnects, cancel only the fetching of the files. Do not cancel `add`
            # below: it must not leave an adapter that is added only in part.
            async with cancel_on_disconnect(request.scope):
                fetched = service.adapter_admin.sources.fetch(source, audit.admin)
                found = await stack.enter_async_context(fetched)
            added = await service.adapter_admin.add(
                wanted.name,
                wanted.base,
                found.folder,
                source=str(source),
                within=found.within,
                added_by=audit.admin,
            )
        action.after = to_audit_state(added.record)
    return added


async def _add_upload(request: Request, service: Service, audit: Audit) -> AddedVersion:
    form = await read_upload(request, service.settings.max_adapter_bytes)
    folder = await run_in_threadpool(make_folder)
    try:
        name, base = get_text_field(form, "name"), get_text_field(form, "base")
        async with audit_change(audit, service, "adapters.add", name) as action:
            await run_in_threadpool(save_files, form, folder)
            added = await service.adapter_admin.add(
                name, base, folder, source="upload", within=folder, added_by=audit.admin
            )
            action.after = to_audit_state(added.record)
    finally:
        await run_in_threadpool(shutil.rmtree, folder)
        await form.close()
    return added


@router.get(
    "/v1/adapters",
    summary="List all adapters with their versions.",
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
    data = [_build_adapter(service, record) for record in service.adapters.records]
    return Adapters(data=data, declared=declared)


class Rollback(Strict):
    """Request body that selects the version of an adapter that requests get from now on.

    `version` is the first 12 to 64 hex digits of the version's digest. If `version` is missing, the
    gateway goes back to the previous version.
    """

    version: str | None = None


@router.post(
    "/v1/adapters/{name:path}/rollback",
    summary="Serve an older version of an adapter.",
    responses=refusals(*BODY, *ADMIN, 404, 503),
    openapi_extra=needs("admin_key", json=Rollback, empty=True),
)
async def rollback(
    service: Admin,
    audit: Auditor,
    name: Name,
    wanted: Annotated[Rollback, json_body(Rollback, MAX_JSON_BYTES)],
) -> Adapter:
    async with audit_change(audit, service, "adapters.rollback", name) as action:
        record = await service.adapter_admin.rollback(name, wanted.version)
        action.after = to_audit_state(record)
    return _build_adapter(service, record)


@router.post(
    "/v1/adapters/{name:path}/verify",
    summary="Verify the checksums of all versions of an adapter.",
    responses=refusals(*ADMIN, 404, 503),
    openapi_extra=needs("admin_key"),
)
async def verify(service: Admin, audit: Auditor, name: Name) -> AdapterVerified:
    async with audit_change(audit, service, "adapters.verify", name):
        record = await service.adapter_admin.verify(name)
    return AdapterVerified(**dict(_build_adapter(service, record)))


# An adapter's name may contain slashes, so this route also matches paths with a suffix such as
# /rollback. Define this route after those with a suffix: the first matching route is used.
@router.get(
    "/v1/adapters/{name:path}",
    summary="Get an adapter with its versions.",
    responses=refusals(*ADMIN, 404),
    openapi_extra=needs("admin_key"),
)
async def show(service: Admin, name: Name) -> Adapter:
    return _build_adapter(service, service.adapters.record(name))


@router.delete(
    "/v1/adapters/{name:path}",
    summary="Delete an adapter.",
    responses=refusals(*ADMIN, 404, 503),
    openapi_extra=needs("admin_key"),
)
async def remove(service: Admin, audit: Auditor, name: Name) -> AdapterDeleted:
    async with audit_change(audit, service, "adapters.remove", name) as action:
        record = await service.adapter_admin.remove(name)
        action.after = None
    return AdapterDeleted(name=record.name)


def audit_change(
    audit: Audit, service: Service, action: str, name: str
) -> AbstractAsyncContextManager[Action]:
    """Return a context manager that records an action on the adapter `name` in the audit log.

    An invalid name is not recorded, because it may be a secret that was pasted by mistake.
    """
    try:
        target = check_name(name)
    except InvalidName:
        target = "(not a name)"
    found = (record for record in service.adapters.records if record.name == name)
    return audit.action(action, target, next(map(to_audit_state, found), None))


def to_audit_state(record: Record) -> State:
    """Return an adapter's data for the audit log.

    `served` is the version that requests get now, and `versions` are all versions of the adapter.
    `revision` is the number of changes of the adapter so far.
    """
    return {
        "served": record.version.short_digest,
        "revision": record.revision,
        "versions": [version.short_digest for version in record.versions],
    }


def _build_adapter(service: Service, record: Record) -> Adapter:
    return Adapter(
        name=record.name,
        base=record.version.base,
        served=record.version.short_digest,
        revision=record.revision,
        versions=[_build_version(service, version) for version in record.versions],
    )


def _build_version(service: Service, version: Version) -> AdapterVersion:
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
        placement=service.get_placement(version.weights),
    )
