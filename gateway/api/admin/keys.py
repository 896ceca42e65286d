"""Endpoints below /v1/keys with which operators manage tenants' keys.

The keys created here exist in addition to the keys in the configuration file.

Every call needs ``Authorization: Bearer <admin key>``.
"""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import Depends
from pydantic import Field

from gateway.api.answer_schemas import AnswerModel, Count
from gateway.api.auth import Admin, Auditor
from gateway.api.body import json_body
from gateway.api.openai.messages import Strict
from gateway.api.routing import ADMIN, BODY, ApiRouter, Name, needs, refusals
from gateway.errors import InvalidRequest, SwitchedOff
from gateway.observability.audit import State
from gateway.tenancy.keys.issued import IssuedKeys
from gateway.tenancy.keys.record import (
    MAX_NOTE_CHARS,
    NOTE_PATTERN,
    KeyRecord,
    is_key_id,
    make_record,
)

_MAX_JSON_BYTES = 64 * 1024
_MAX_LIFETIME_S = 100 * 366 * 24 * 3600

router = ApiRouter()


class Key(AnswerModel):
    id: str
    object: Literal["key"] = "key"
    tenant: str
    note: str
    created_at: Count
    created_by: Annotated[str, Field(description="The beginning of the hash of an admin's key.")]
    expires_at: Annotated[
        Count | None, Field(description="Unix time from which the key is refused.")
    ]
    last_used_at: Annotated[
        Count | None, Field(description="Unix time, to the minute and up to a minute late.")
    ]


class Keys(AnswerModel):
    object: Literal["list"] = "list"
    data: list[Key]


class KeyCreated(Key):
    value: Annotated[str, Field(description="The key, which cannot be shown again.")]


class KeyDeleted(AnswerModel):
    id: str
    object: Literal["key"] = "key"
    deleted: Literal[True] = True


class NewKey(Strict):
    """A key to create. `expires_in` is in seconds; by default the key never expires."""

    tenant: str
    note: Annotated[str, Field(max_length=MAX_NOTE_CHARS, pattern=NOTE_PATTERN)] = ""
    expires_in: Annotated[int | None, Field(ge=1, le=_MAX_LIFETIME_S)] = None


async def _get_issued_keys(service: Admin) -> IssuedKeys:
    if service.keys is None:
        raise SwitchedOff(
            "Keys are those of tenants; set GATEWAY_CONFIG to a file that names some.",
            setting="GATEWAY_CONFIG",
        )
    return service.keys


Issued = Annotated[IssuedKeys, Depends(_get_issued_keys)]


@router.post(
    "/v1/keys",
    summary="Create a key for a tenant of the configuration file.",
    status_code=201,
    responses=refusals(*BODY, *ADMIN, 503),
    openapi_extra=needs("admin_key", json=NewKey),
)
async def create(
    service: Admin,
    keys: Issued,
    audit: Auditor,
    wanted: Annotated[NewKey, json_body(NewKey, _MAX_JSON_BYTES)],
) -> KeyCreated:
    named = [tenant.name for tenant in service.configuration.current.tenants or ()]
    if wanted.tenant not in named:
        raise InvalidRequest(
            f"tenant: found {wanted.tenant!r}; allowed: {', '.join(named) or 'none'}",
            param="tenant",
        )
    record, value = make_record(wanted.tenant, wanted.note, wanted.expires_in, audit.admin)
    async with audit.action("keys.create", record.id, None) as action:
        try:
            await keys.add(record)
        finally:
            action.after = _to_audit_state(keys, record.id)
    return KeyCreated(**dict(_build_key(record, None)), value=value)


@router.get(
    "/v1/keys",
    summary="List the keys created over this API, oldest first, without deleted ones.",
    responses=refusals(*ADMIN, 503),
    openapi_extra=needs("admin_key"),
)
async def list_all(keys: Issued) -> Keys:
    uses = await keys.uses()
    return Keys(data=[_build_key(record, uses.get(record.id)) for record in keys.records])


@router.delete(
    "/v1/keys/{key_id}",
    summary="Revoke a key on all gateways.",
    responses=refusals(*ADMIN, 404, 503),
    openapi_extra=needs("admin_key"),
)
async def delete(keys: Issued, audit: Auditor, key_id: Name) -> KeyDeleted:
    # Do not log a string that is not a key's id: it may be an API key, pasted by mistake.
    target = key_id if is_key_id(key_id) else "(not an id)"
    async with audit.action("keys.delete", target, _to_audit_state(keys, key_id)) as action:
        try:
            await keys.revoke(key_id)
        finally:
            # Log the key's data also if `revoke` raises an error. In that case, the key may be
            # revoked on this gateway, but not on the other gateways.
            action.after = _to_audit_state(keys, key_id)
    return KeyDeleted(id=key_id)


def _to_audit_state(keys: IssuedKeys, key_id: str) -> State:
    record = keys.find(key_id)
    return None if record is None else {"tenant": record.tenant, "expires_at": record.expires}


def _build_key(record: KeyRecord, used: int | None) -> Key:
    return Key(
        id=record.id,
        tenant=record.tenant,
        note=record.note,
        created_at=record.created,
        created_by=record.created_by,
        expires_at=record.expires,
        last_used_at=used,
    )
