"""JSON format of records, on disk and in Redis. The input of the parser is not trusted."""

from __future__ import annotations

import sys
from typing import Any, cast

from adapters.adapter import DTYPES, MODULE_IDS, ModuleRows, task_id
from adapters.chat_template import MAX_CHARACTERS, ChatTemplate
from adapters.errors import InvalidName
from adapters.record import DeclaredContent, Record, Version, check_name, is_digest

_MAX_COUNT = 2**53  # the largest integer that every JSON reader represents exactly
_MAX_TASK_ID = 2**63 - 1
_MAX_TEXT = 4096


def as_json(record: Record) -> dict[str, Any]:
    return {
        "name": record.name,
        "life": record.life,
        "revision": record.revision,
        "updated": record.updated,
        "served": record.served,
        "versions": [_version_as_json(version) for version in record.versions],
        **({} if record.before is None else {"before": list(record.before)}),
    } | _declared_as_json(record.declared)


def _declared_as_json(declared: DeclaredContent | None) -> dict[str, Any]:
    if declared is None:
        return {}
    return {"declared": {"revision": declared.revision, "digest": declared.digest}}


def _version_as_json(version: Version) -> dict[str, Any]:
    return {
        "digest": version.digest,
        "base": version.base,
        "dtype": version.dtype,
        "created": version.created,
        "nbytes": version.nbytes,
        "modules": [[rows.module, rows.rank, list(rows.layers)] for rows in version.modules],
        "source": version.source,
        "task_id": str(version.task_id),
        **({} if version.added_by is None else {"added_by": version.added_by}),
        **({} if version.tp_size is None else {"tp_size": version.tp_size}),
    } | _template_as_json(version)


def _template_as_json(version: Version) -> dict[str, Any]:
    template = version.chat_template
    if template is None:
        return {}
    fields = {"source": template.source, "eos_token": template.eos_token}
    return {"weights": version.weights, "chat_template": fields}


def from_json(value: object) -> Record:
    """Parse a record. Raise ValueError if it is invalid. The message names the field."""
    fields = _parse_object("record", value)
    name = _parse_text("name", fields.get("name"))
    try:
        check_name(name)
    except InvalidName as error:
        raise ValueError("name: not the name of an adapter") from error
    versions = tuple(map(_parse_version, _parse_list("versions", fields.get("versions"))))
    served = _parse_text("served", fields.get("served"))
    digests = [version.digest for version in versions]
    if len(set(digests)) != len(digests):
        raise ValueError("versions: one digest twice")
    if served not in (digests or [""]):
        raise ValueError("served: none of the versions")
    return Record(
        name=name,
        life=_parse_int("life", fields.get("life"), 1, _MAX_COUNT),
        revision=_parse_int("revision", fields.get("revision"), 1, _MAX_COUNT),
        updated=_parse_time("updated", fields.get("updated")),
        served=served,
        versions=versions,
        declared=_parse_declared(fields["declared"]) if versions and "declared" in fields else None,
        before=_parse_before(fields["before"], {*digests} - {served})
        if "before" in fields
        else None,
    )


def _parse_before(value: object, others: set[str]) -> tuple[str, ...]:
    digests = tuple(_parse_text("before", digest) for digest in _parse_list("before", value))
    if len(set(digests)) != len(digests) or not others.issuperset(digests):
        raise ValueError("before: not other versions than the served one, each once")
    return digests


def _parse_declared(value: object) -> DeclaredContent:
    fields = _parse_object("declared", value)
    digest = _parse_text("declared", fields.get("digest"))
    if not is_digest(digest):
        raise ValueError("declared: not 64 lower-case hex digits")
    return DeclaredContent(_parse_int("declared", fields.get("revision"), 1, _MAX_COUNT), digest)


def _parse_version(value: object) -> Version:
    fields = _parse_object("versions", value)
    digest = fields.get("digest")
    if not isinstance(digest, str) or not is_digest(digest):
        raise ValueError("digest: not 64 lower-case hex digits")
    dtype = fields.get("dtype")
    if dtype not in DTYPES:
        raise ValueError(f"dtype: not one of {', '.join(DTYPES)}")
    modules = tuple(map(_parse_module, _parse_list("modules", fields.get("modules"))))
    if not modules:
        raise ValueError("modules: none")
    weights, template = digest, None
    if "chat_template" in fields:
        weights, template = _parse_text("weights", fields.get("weights")), _parse_template(fields)
        if not is_digest(weights):
            raise ValueError("weights: not 64 lower-case hex digits")
        if template.digest(weights) != digest:
            raise ValueError("digest: not that of weights and chat_template")
    return Version(
        digest=digest,
        weights=weights,
        base=_parse_text("base", fields.get("base")),
        dtype=dtype,
        created=_parse_time("created", fields.get("created")),
        nbytes=_parse_int("nbytes", fields.get("nbytes"), 1, _MAX_COUNT),
        modules=modules,
        source=_parse_text("source", fields.get("source")),
        # Compute the id if it is missing: older gateways derived ids from the weights and did not
        # store them.
        task_id=_parse_task_id(fields["task_id"]) if "task_id" in fields else task_id(digest),
        chat_template=template,
        added_by=_parse_text("added_by", fields["added_by"]) if "added_by" in fields else None,
        tp_size=_parse_int("tp_size", fields["tp_size"], 1, _MAX_COUNT)
        if "tp_size" in fields
        else None,
    )


def _parse_template(version: dict[str, object]) -> ChatTemplate:
    fields = _parse_object("chat_template", version["chat_template"])
    source, eos_token = fields.get("source"), fields.get("eos_token")
    if not isinstance(source, str) or len(source) > MAX_CHARACTERS:
        raise ValueError(f"chat_template: not a text of up to {MAX_CHARACTERS} characters")
    # Intern the text. If many versions have the same template, it takes memory only once.
    return ChatTemplate(
        sys.intern(source), None if eos_token is None else _parse_text("eos_token", eos_token)
    )


def _parse_module(value: object) -> ModuleRows:
    parts = _parse_list("modules", value)
    if len(parts) != 3 or not isinstance(parts[0], str) or parts[0] not in MODULE_IDS:
        raise ValueError("modules: not [MODULE, RANK, [LAYER, ...]]")
    layers = _parse_list("modules", parts[2])
    return ModuleRows(
        parts[0],
        _parse_int("modules", parts[1], 1, 2**31 - 1),
        tuple(_parse_int("modules", layer, 0, 2**31 - 1) for layer in layers),
    )


def _parse_task_id(value: object) -> int:
    # Require a string: some JSON readers cannot represent 63-bit numbers, so ids are written as
    # strings.
    if not isinstance(value, str) or not (value.isascii() and value.isdecimal()):
        raise ValueError("task_id: not digits")
    return _parse_int("task_id", int(value[:20]), 1, _MAX_TASK_ID)


def _parse_object(field: str, value: object) -> dict[str, object]:
    if not isinstance(value, dict):
        raise ValueError(f"{field}: not an object")
    return value


def _parse_list(field: str, value: object) -> list[object]:
    if not isinstance(value, list):
        raise ValueError(f"{field}: not a list")
    return value


def _parse_text(field: str, value: object) -> str:
    if not isinstance(value, str) or len(value) > _MAX_TEXT:
        raise ValueError(f"{field}: not a text of up to {_MAX_TEXT} characters")
    return value


def _parse_int(field: str, value: object, least: int, most: int) -> int:
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{field}: not an integer from {least} to {most}")
    return value


def _parse_time(field: str, value: object) -> float:
    # Compare types, because isinstance(True, int) is True. `not ... <` also refuses NaN, because
    # every comparison with NaN is False. The check works for integers of any size.
    if type(value) not in (int, float) or not abs(cast(float, value)) < _MAX_COUNT:
        raise ValueError(f"{field}: not a time in seconds")
    return cast(float, value)
