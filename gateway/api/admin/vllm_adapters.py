"""vLLM's endpoints for adapters: /v1/load_lora_adapter and /v1/unload_lora_adapter.

Every call needs ``Authorization: Bearer <admin key>``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from fastapi import Depends
from starlette.concurrency import run_in_threadpool
from starlette.responses import PlainTextResponse

from adapters.record import Record
from gateway.api.admin.adapters import MAX_JSON_BYTES, audit_change, to_audit_state
from gateway.api.auth import Admin, Auditor
from gateway.api.body import json_body
from gateway.api.openai.messages import Strict
from gateway.api.routing import ADMIN, BODY, ApiRouter, needs, refusals
from gateway.errors import InvalidRequest, SwitchedOff
from gateway.service import Service
from gateway.sources.disk import is_folder_below

router = ApiRouter()


class LoadLoraAdapter(Strict):
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
    summary="Add an adapter from a folder of the server's host, in vLLM's form.",
    response_class=PlainTextResponse,
    responses=refusals(*BODY, *ADMIN, 503),
    openapi_extra=needs("admin_key", json=LoadLoraAdapter),
)
async def load(
    service: Admin,
    audit: Auditor,
    root: Annotated[Path, Depends(_adapter_root)],
    wanted: Annotated[LoadLoraAdapter, json_body(LoadLoraAdapter, MAX_JSON_BYTES)],
) -> str:
    """Add an adapter from a folder of this host.

    The folder must be below GATEWAY_ADAPTER_ROOT. Request and response are the same as vLLM's.
    """
    name = wanted.lora_name
    async with audit_change(audit, service, "adapters.load", name) as action:
        action.after = to_audit_state(await _load_adapter(service, root, wanted, audit.admin))
    return f"Success: LoRA adapter '{name}' added successfully."


async def _load_adapter(
    service: Service, root: Path, wanted: LoadLoraAdapter, admin: str
) -> Record:
    known = {record.name for record in service.adapters.records}
    if wanted.lora_name in known and not wanted.load_inplace:
        raise InvalidRequest(
            f"The lora adapter '{wanted.lora_name}' has already been loaded. Set load_inplace to "
            "replace it.",
            param="lora_name",
        )
    folder = root / wanted.lora_path
    # Raise the same error for a missing folder and for a folder outside the root. Different errors
    # would reveal which paths exist outside.
    if not await run_in_threadpool(is_folder_below, root, folder):
        raise InvalidRequest(
            f"lora_path: found {wanted.lora_path!r}; allowed: a folder below GATEWAY_ADAPTER_ROOT.",
            param="lora_path",
        )
    added = await service.adapter_admin.add(
        wanted.lora_name,
        wanted.base_model_name or service.settings.model_name,
        folder,
        source="load_lora_adapter",
        within=root,
        added_by=admin,
    )
    return added.record


class UnloadLoraAdapter(Strict):
    lora_name: str
    lora_int_id: int | None = None


@router.post(
    "/v1/unload_lora_adapter",
    summary="Delete an adapter, in vLLM's form.",
    response_class=PlainTextResponse,
    responses=refusals(*BODY, *ADMIN, 404, 503),
    openapi_extra=needs("admin_key", json=UnloadLoraAdapter),
)
async def unload(
    service: Admin,
    audit: Auditor,
    wanted: Annotated[UnloadLoraAdapter, json_body(UnloadLoraAdapter, MAX_JSON_BYTES)],
) -> str:
    name = wanted.lora_name
    async with audit_change(audit, service, "adapters.unload", name) as action:
        await service.adapter_admin.remove(name)
        action.after = None
    return f"Success: LoRA adapter '{name}' removed successfully."
