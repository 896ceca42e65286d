"""Adapters for operators: /v1/adapters, and vLLM's /v1/load_lora_adapter and its counterpart.

Every call needs ``Authorization: Bearer <admin key>``.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from fastapi import Request
from pydantic import BaseModel, ConfigDict
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import FormData, UploadFile
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.types import Message

from adapters import npy, peft
from adapters.record import Record, Version
from gateway.api.auth import admin
from gateway.api.body import media_type, read_json, refuse_encoding
from gateway.errors import ClientDisconnected, InvalidRequest, SwitchedOff
from gateway.http.errors import ContentTooLarge, UnsupportedMediaType

_FILES = frozenset(
    {peft.CONFIG, peft.WEIGHTS, peft.PICKLE, npy.CONFIG, npy.OLD_CONFIG, npy.WEIGHTS}
)
_MAX_FIELDS = 8
_FORM_OVERHEAD = 1024 * 1024


async def add(request: Request) -> Response:
    """Multipart upload: fields `name` and `base`, and the adapter's files under their own names."""
    service = admin(request)
    form = await _upload(request, service.settings.max_adapter_bytes)
    folder = Path(await run_in_threadpool(tempfile.mkdtemp, prefix="adapter-"))
    try:
        name, base = _text(form, "name"), _text(form, "base")
        await run_in_threadpool(_save, form, folder)
        record = await service.adapters.add(name, base, folder, source="upload", within=folder)
    finally:
        await run_in_threadpool(shutil.rmtree, folder)
        await form.close()
    body = _record(record) | {"warnings": service.adapters.warnings()}
    return JSONResponse(body, status_code=201)


async def list_all(request: Request) -> Response:
    service = admin(request)
    data = [_record(record) for record in service.adapters.records]
    return JSONResponse({"object": "list", "data": data})


async def show(request: Request) -> Response:
    service = admin(request)
    return JSONResponse(_record(service.adapters.record(request.path_params["name"])))


async def remove(request: Request) -> Response:
    service = admin(request)
    record = await service.adapters.remove(request.path_params["name"])
    return JSONResponse({"name": record.name, "object": "adapter", "deleted": True})


class Rollback(BaseModel):
    """`version`: 12 to 64 hex digits of a digest; without it, the version before the served one."""

    model_config = ConfigDict(strict=True, extra="forbid")
    version: str | None = None


async def rollback(request: Request) -> Response:
    service = admin(request)
    wanted = await read_json(request, Rollback)
    record = await service.adapters.rollback(request.path_params["name"], wanted.version)
    return JSONResponse(_record(record))


async def verify(request: Request) -> Response:
    """Reads every version with its checksums."""
    service = admin(request)
    record = await service.adapters.verify(request.path_params["name"])
    return JSONResponse(_record(record) | {"verified": True})


class LoadLoraAdapter(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    lora_name: str
    lora_path: str
    base_model_name: str | None = None
    load_inplace: bool = False


async def load(request: Request) -> Response:
    """vLLM's form: an adapter from a folder of this host, below GATEWAY_ADAPTER_ROOT."""
    service = admin(request)
    root = service.settings.adapter_root
    if root is None:
        raise SwitchedOff(
            "Loading from this host's folders is off; set GATEWAY_ADAPTER_ROOT.",
            setting="GATEWAY_ADAPTER_ROOT",
        )
    wanted = await read_json(request, LoadLoraAdapter)
    known = {record.name for record in service.adapters.records}
    if wanted.lora_name in known and not wanted.load_inplace:
        raise InvalidRequest(
            f"The lora adapter '{wanted.lora_name}' has already been loaded. Set load_inplace to "
            "replace it.",
            param="lora_name",
        )
    folder = root / wanted.lora_path
    # The same words for what is elsewhere and what is nowhere: others' folders are not told of.
    if not await run_in_threadpool(_is_folder_below, root, folder):
        raise InvalidRequest(
            f"lora_path: found {wanted.lora_path!r}; allowed: a folder below GATEWAY_ADAPTER_ROOT.",
            param="lora_path",
        )
    await service.adapters.add(
        wanted.lora_name,
        wanted.base_model_name or service.settings.model_name,
        folder,
        source="load_lora_adapter",
        within=root,
    )
    return PlainTextResponse(f"Success: LoRA adapter '{wanted.lora_name}' added successfully.")


def _is_folder_below(root: Path, folder: Path) -> bool:
    # isdir is false for whatever cannot be a path as well: NUL characters, names too long.
    return os.path.isdir(folder) and folder.resolve().is_relative_to(root.resolve())


class UnloadLoraAdapter(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    lora_name: str
    lora_int_id: int | None = None


async def unload(request: Request) -> Response:
    service = admin(request)
    wanted = await read_json(request, UnloadLoraAdapter)
    await service.adapters.remove(wanted.lora_name)
    return PlainTextResponse(f"Success: LoRA adapter '{wanted.lora_name}' removed successfully.")


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
        raise UnsupportedMediaType("content-type", given, "multipart/form-data")
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


def _record(record: Record) -> dict[str, Any]:
    return {
        "object": "adapter",
        "name": record.name,
        "base": record.version.base,
        "served": record.version.short_digest,
        "revision": record.revision,
        "versions": [_version(version) for version in record.versions],
    }


def _version(version: Version) -> dict[str, Any]:
    return {
        "version": version.short_digest,
        "digest": version.digest,
        # A string: JavaScript would round it.
        "task_id": str(version.task_id),
        "created": int(version.created),
        "dtype": version.dtype,
        "rank": version.rank,
        "bytes": version.nbytes,
        "modules": sorted({rows.module for rows in version.modules}),
        "source": version.source,
    }
