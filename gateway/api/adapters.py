"""Adapters for operators: /v1/adapters, and vLLM's /v1/load_lora_adapter and its counterpart.

Every call needs ``Authorization: Bearer <admin key>``.
"""

from __future__ import annotations

import shutil
import tempfile
from contextlib import AbstractContextManager, AsyncExitStack
from pathlib import Path
from typing import Annotated, Literal

from fastapi import Depends, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import FormData, UploadFile
from starlette.requests import ClientDisconnect
from starlette.responses import PlainTextResponse
from starlette.types import Message

from adapters import chat_template, npy, peft
from adapters.errors import InvalidName
from adapters.record import SHORT_DIGEST, Record, Version, check_name
from gateway.api.answer_schemas import Answer, Count
from gateway.api.auth import Admin, Auditor
from gateway.api.body import json_body, media_type, parse_json, read_body, refuse_encoding
from gateway.api.routing import ADMIN, BODY, Name, Router, Schema, needs, refusals
from gateway.api.sse import cancel_on_disconnect
from gateway.errors import ClientDisconnected, InvalidRequest, SwitchedOff
from gateway.http.errors import ContentTooLarge, UnsupportedMediaType
from gateway.observability.audit import Action, Audit, State
from gateway.service import Service
from gateway.sources.disk import is_folder_below
from gateway.sources.source import parse

_JSON = frozenset({"application/json", "text/json"})
_FILES = frozenset(
    {peft.CONFIG, peft.WEIGHTS, peft.PICKLE, npy.CONFIG, npy.OLD_CONFIG, npy.WEIGHTS}
    | {chat_template.CONFIG, chat_template.FILE}
)
_MAX_FIELDS = 8
_FORM_OVERHEAD = 1024 * 1024


_SMALL = 64 * 1024  # bytes of a JSON body here

_UPLOAD: Schema = {
    "type": "object",
    "required": ["name", "base", "file"],
    "properties": {
        "name": {"type": "string", "minLength": 1},
        "base": {"type": "string", "minLength": 1, "description": "The base model's name."},
        "file": {
            "type": "array",
            "minItems": 1,
            "items": {"type": "string", "contentMediaType": "application/octet-stream"},
            "description": "The adapter's files under their own names: adapter_config.json and "
            "adapter_model.safetensors, or model.lora_config.npy and model.lora_weights.npy; "
            "tokenizer_config.json and chat_template.jinja where it has its own chat template.",
        },
    },
}

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
    warnings: list[str]


class AdapterVerified(Adapter):
    verified: Literal[True] = True


class AdapterDeleted(Answer):
    name: str
    object: Literal["adapter"] = "adapter"
    deleted: Literal[True] = True


class AdapterOfSource(BaseModel):
    """`source`: an absolute folder, https://, s3:// or hf://, as GATEWAY_ADAPTER_SOURCES allows."""

    model_config = ConfigDict(strict=True, extra="forbid")
    name: str
    base: str
    source: str


@router.post(
    "/v1/adapters",
    summary="Adds an adapter, or a new version of one.",
    status_code=201,
    responses=refusals(*BODY, *ADMIN, 503),
    openapi_extra=needs("admin_key", form=_UPLOAD, json=AdapterOfSource),
)
async def add(request: Request, service: Admin, audit: Auditor) -> AdapterAdded:
    """Multipart upload: fields `name` and `base`, and the adapter's files under their own names.

    Or JSON that names a source, from which this gateway fetches it.
    """
    names_source = media_type(request) in _JSON
    record = await (_add_of_source if names_source else _add_upload)(request, service, audit)
    return AdapterAdded(**dict(_adapter(service, record)), warnings=service.adapters.warnings())


async def _add_of_source(request: Request, service: Service, audit: Audit) -> Record:
    wanted = parse_json(AdapterOfSource, await read_body(request, _SMALL))
    with _audited(audit, service, "adapters.add", wanted.name) as action:
        source = parse(wanted.source)
        service.adapters.check(wanted.name, wanted.base)
        async with AsyncExitStack() as stack:
            # What is begun here after that is ended, whoever waits for it.
            async with cancel_on_disconnect(request.scope):
                fetched = service.adapters.sources.fetched(source, audit.admin)
                found = await stack.enter_async_context(fetched)
            record = await service.adapters.add(
                wanted.name,
                wanted.base,
                found.folder,
                source=str(source),
                within=found.within,
                added_by=audit.admin,
            )
        action.after = _told(record)
    return record


async def _add_upload(request: Request, service: Service, audit: Audit) -> Record:
    form = await _upload(request, service.settings.max_adapter_bytes)
    folder = Path(await run_in_threadpool(tempfile.mkdtemp, prefix="adapter-"))
    try:
        name, base = _text(form, "name"), _text(form, "base")
        with _audited(audit, service, "adapters.add", name) as action:
            await run_in_threadpool(_save, form, folder)
            record = await service.adapters.add(
                name, base, folder, source="upload", within=folder, added_by=audit.admin
            )
            action.after = _told(record)
    finally:
        await run_in_threadpool(shutil.rmtree, folder)
        await form.close()
    return record


@router.get(
    "/v1/adapters",
    summary="All adapters with their versions.",
    responses=refusals(*ADMIN),
    openapi_extra=needs("admin_key"),
)
async def list_all(service: Admin) -> Adapters:
    declared = [
        DeclaredAdapter(
            name=told.name,
            source=told.source,
            state=told.state,
            version=told.version[:SHORT_DIGEST] or None,
            error=told.error or None,
        )
        for told in await run_in_threadpool(service.declared.told)
    ]
    data = [_adapter(service, record) for record in service.adapters.records]
    return Adapters(data=data, declared=declared)


class Rollback(BaseModel):
    """`version`: 12 to 64 hex digits of a digest; without it, the version before the served one."""

    model_config = ConfigDict(strict=True, extra="forbid")
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
    wanted: Annotated[Rollback, json_body(Rollback, _SMALL)],
) -> Adapter:
    with _audited(audit, service, "adapters.rollback", name) as action:
        record = await service.adapters.rollback(name, wanted.version)
        action.after = _told(record)
    return _adapter(service, record)


@router.post(
    "/v1/adapters/{name:path}/verify",
    summary="Reads every version of an adapter with its checksums.",
    responses=refusals(*ADMIN, 404, 503),
    openapi_extra=needs("admin_key"),
)
async def verify(service: Admin, audit: Auditor, name: Name) -> AdapterVerified:
    with _audited(audit, service, "adapters.verify", name):
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
    with _audited(audit, service, "adapters.remove", name) as action:
        record = await service.adapters.remove(name)
        action.after = None
    return AdapterDeleted(name=record.name)


class LoadLoraAdapter(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    lora_name: str
    lora_path: str
    base_model_name: str | None = None
    load_inplace: bool = False


async def _adapter_root(service: Admin) -> Path:
    root = service.settings.adapter_root
    if root is None:
        raise SwitchedOff(
            "Loading from this host's folders is off; set GATEWAY_ADAPTER_ROOT.",
            setting="GATEWAY_ADAPTER_ROOT",
        )
    return root


@router.post(
    "/v1/load_lora_adapter",
    summary="Adds an adapter from a folder of the server's host; vLLM's form.",
    response_class=PlainTextResponse,
    responses=refusals(*BODY, *ADMIN, 503),
    openapi_extra=needs("admin_key", json=LoadLoraAdapter),
)
async def load(
    service: Admin,
    audit: Auditor,
    root: Annotated[Path, Depends(_adapter_root)],
    wanted: Annotated[LoadLoraAdapter, json_body(LoadLoraAdapter, _SMALL)],
) -> str:
    """vLLM's form: an adapter from a folder of this host, below GATEWAY_ADAPTER_ROOT."""
    name = wanted.lora_name
    with _audited(audit, service, "adapters.load", name) as action:
        action.after = _told(await _loaded(service, root, wanted, audit.admin))
    return f"Success: LoRA adapter '{name}' added successfully."


async def _loaded(service: Service, root: Path, wanted: LoadLoraAdapter, admin: str) -> Record:
    known = {record.name for record in service.adapters.records}
    if wanted.lora_name in known and not wanted.load_inplace:
        raise InvalidRequest(
            f"The lora adapter '{wanted.lora_name}' has already been loaded. Set load_inplace to "
            "replace it.",
            param="lora_name",
        )
    folder = root / wanted.lora_path
    # The same words for what is elsewhere and what is nowhere: others' folders are not told of.
    if not await run_in_threadpool(is_folder_below, root, folder):
        raise InvalidRequest(
            f"lora_path: found {wanted.lora_path!r}; allowed: a folder below GATEWAY_ADAPTER_ROOT.",
            param="lora_path",
        )
    return await service.adapters.add(
        wanted.lora_name,
        wanted.base_model_name or service.settings.model_name,
        folder,
        source="load_lora_adapter",
        within=root,
        added_by=admin,
    )


class UnloadLoraAdapter(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    lora_name: str
    lora_int_id: int | None = None


@router.post(
    "/v1/unload_lora_adapter",
    summary="Stops serving an adapter; vLLM's form.",
    response_class=PlainTextResponse,
    responses=refusals(*BODY, *ADMIN, 404, 503),
    openapi_extra=needs("admin_key", json=UnloadLoraAdapter),
)
async def unload(
    service: Admin,
    audit: Auditor,
    wanted: Annotated[UnloadLoraAdapter, json_body(UnloadLoraAdapter, _SMALL)],
) -> str:
    name = wanted.lora_name
    with _audited(audit, service, "adapters.unload", name) as action:
        await service.adapters.remove(name)
        action.after = None
    return f"Success: LoRA adapter '{name}' removed successfully."


async def _upload(request: Request, max_bytes: int) -> FormData:
    """The form, its files spooled to disk as they arrive; ContentTooLarge past the limit."""
    received = 0

    async def limited() -> Message:
        nonlocal received
        message = await request.receive()
        received += len(message.get("body", b""))
        if received > max_bytes + _FORM_OVERHEAD:
            raise ContentTooLarge("upload", max_bytes)
        return message

    if (given := media_type(request)) != "multipart/form-data":
        raise UnsupportedMediaType("content-type", given, "multipart/form-data, application/json")
    refuse_encoding(request)
    try:
        upload = Request(request.scope, limited)
        return await upload.form(max_files=_MAX_FIELDS, max_fields=_MAX_FIELDS)
    except ClientDisconnect:
        raise ClientDisconnected from None


def _text(form: FormData, name: str) -> str:
    value = form.get(name)
    if not isinstance(value, str) or not value:
        raise InvalidRequest(f"You must provide the form field {name}.", param=name)
    return value


def _save(form: FormData, folder: Path) -> None:
    for _, part in form.multi_items():
        if not isinstance(part, UploadFile):
            continue
        if part.filename not in _FILES:
            allowed = ", ".join(sorted(_FILES))
            raise InvalidRequest(f"file: found {part.filename!r}; allowed: {allowed}", param="file")
        with (folder / part.filename).open("wb") as file:
            shutil.copyfileobj(part.file, file)


def _audited(
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
    return audit.action(action, target, next(map(_told, found), None))


def _told(record: Record) -> State:
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
