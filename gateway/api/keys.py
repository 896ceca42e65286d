"""Keys of tenants for operators: /v1/keys. The configuration file has keys, too; these are others.

Every call needs ``Authorization: Bearer <admin key>``.
"""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import Depends
from pydantic import Field

from gateway.api.answer_schemas import Answer, Count
from gateway.api.auth import Admin, Auditor
from gateway.api.body import json_body
from gateway.api.messages import Strict
from gateway.api.routing import ADMIN, BODY, Name, Router, needs, refusals
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

_SMALL = 64 * 1024  # bytes of a JSON body here
_LONGEST_S = 100 * 366 * 24 * 3600

router = Router()


class Key(Answer):
    id: str
    object: Literal["key"] = "key"
    tenant: str
    note: str
    created_at: Count
    created_by: Annotated[str, Field(description="The beginning of the hash of an admin's key.")]
    expires_at: Annotated[Count | None, Field(description="From then on the key is refused.")]
    last_used_at: Annotated[Count | None, Field(description="To the minute, and a minute late.")]


class Keys(Answer):
    object: Literal["list"] = "list"
    data: list[Key]


class KeyCreated(Key):
    value: Annotated[str, Field(description="The key, which nobody can be shown again.")]


class KeyDeleted(Answer):
    id: str
    object: Literal["key"] = "key"
    deleted: Literal[True] = True


class NewKey(Strict):
    """`expires_in` is in seconds; without it the key is valid until it is deleted."""

    tenant: str
    note: Annotated[str, Field(max_length=MAX_NOTE_CHARS, pattern=NOTE_PATTERN)] = ""
    expires_in: Annotated[int | None, Field(ge=1, le=_LONGEST_S)] = None


async def _keys(service: Admin) -> IssuedKeys:
    if service.keys is None:
        raise SwitchedOff(
            "Keys are those of tenants; set GATEWAY_CONFIG to a file that names some.",
            setting="GATEWAY_CONFIG",
        )
    return service.keys


Issued = Annotated[IssuedKeys, Depends(_keys)]


@router.post(
    "/v1/keys",
    summary="Makes a key for a tenant of the configuration file.",
    status_code=201,
    responses=refusals(*BODY, *ADMIN, 503),
    openapi_extra=needs("admin_key", json=NewKey),
)
async def create(
    service: Admin,
    keys: Issued,
    audit: Auditor,
    wanted: Annotated[NewKey, json_body(NewKey, _SMALL)],
) -> KeyCreated:
    named = [tenant.name for tenant in service.configuration.current.tenants or ()]
    if wanted.tenant not in named:
        raise InvalidRequest(
            f"tenant: found {wanted.tenant!r}; allowed: {', '.join(named) or 'none'}",
            param="tenant",
        )
    record, value = make_record(wanted.tenant, wanted.note, wanted.expires_in, audit.admin)
    with audit.action("keys.create", record.id, None) as action:
        try:
            await keys.add(record)
        finally:
            action.after = _state(keys, record.id)
    return KeyCreated(**dict(_key(record, None)), value=value)


@router.get(
    "/v1/keys",
    summary="All keys that were made here, oldest first, but those that were deleted.",
    responses=refusals(*ADMIN, 503),
    openapi_extra=needs("admin_key"),
)
async def list_all(keys: Issued) -> Keys:
    uses = await keys.uses()
    return Keys(data=[_key(record, uses.get(record.id)) for record in keys.records])


@router.delete(
    "/v1/keys/{key_id}",
    summary="Ends a key, on all gateways and for good.",
    responses=refusals(*ADMIN, 404, 503),
    openapi_extra=needs("admin_key"),
)
async def delete(keys: Issued, audit: Auditor, key_id: Name) -> KeyDeleted:
    # What cannot be an id is not written: somebody may have pasted the key.
    target = key_id if is_key_id(key_id) else "(not an id)"
    with audit.action("keys.delete", target, _state(keys, key_id)) as action:
        try:
            await keys.revoke(key_id)
        finally:  # it may have ended here alone
            action.after = _state(keys, key_id)
    return KeyDeleted(id=key_id)


def _state(keys: IssuedKeys, key_id: str) -> State:
    record = keys.find(key_id)
    return None if record is None else {"tenant": record.tenant, "expires_at": record.expires}


def _key(record: KeyRecord, used: int | None) -> Key:
    return Key(
        id=record.id,
        tenant=record.tenant,
        note=record.note,
        created_at=record.created,
        created_by=record.created_by,
        expires_at=record.expires,
        last_used_at=used,
    )
