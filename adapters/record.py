"""The record of one adapter name: its versions, and the version that is currently served.

Records are immutable. Each gateway's disk and Redis have copies of a record, and any copy may have
missed a change. `merge` combines two copies. It is commutative, associative and idempotent, so all
copies converge in any order of merging:

- A name's `life` is a number that grows when a removed name is added again. The copy with the
  higher `life` wins. If both copies have the same `life`, a removed copy wins. An old copy can
  therefore never restore a removed adapter.
- Until the name is removed, versions are only added. The merged record therefore has the versions
  of both copies.
- The served version and the history of served versions come from the copy that was changed last.
  This is the copy with the higher `revision`. If the revisions are equal, the copy with the higher
  `updated` wins.
- `declared` comes from the copy with the higher `declared.revision`.

See decision 022 in docs/decisions.
"""

from __future__ import annotations

import math
import re
import secrets
from dataclasses import dataclass, replace
from typing import NamedTuple

from adapters.adapter import Converted, Dtype, ModuleRows
from adapters.chat_template import ChatTemplate
from adapters.errors import InvalidName, UnknownVersion

SHORT_DIGEST = 12
DECLARED = "configuration"
"""Value of `Version.added_by` if the configuration file lists the version."""
SETTINGS = "GATEWAY_ADAPTERS"
"""Value of `Version.added_by` if this setting lists the version."""
_SEGMENT = re.compile(r"[A-Za-z0-9._-]{1,64}")
_SELECTED = re.compile(r"[0-9a-f]{12,64}")
_DIGEST = re.compile(r"[0-9a-f]{64}")


def is_digest(text: str) -> bool:
    """Return True if `text` is a full content digest: 64 lower-case hex digits.

    A full digest can safely be used in a file path or in a Redis key.
    """
    return _DIGEST.fullmatch(text) is not None


def check_name(name: str) -> str:
    """Return `name` if it is a valid ``NAME`` or ``TENANT/NAME``, else raise `InvalidName`."""
    segments = name.split("/")
    if (
        len(segments) > 2
        or not all(_SEGMENT.fullmatch(segment) for segment in segments)
        or any(".." in segment or segment == "." for segment in segments)
    ):
        allowed = "NAME or TENANT/NAME, each 1 to 64 of A-Z a-z 0-9 . _ - without '..'"
        raise InvalidName("adapter", "name", name, allowed)
    return name


def selector(name: str, digest: str) -> str:
    """Return ``NAME@DIGEST``, the model name that selects this version.

    Unlike ``NAME``, this name selects the same version even after a rollback.
    """
    return f"{name}@{digest[:SHORT_DIGEST]}"


def selected_name(model: str) -> str:
    """Return NAME from ``NAME`` or ``NAME@DIGEST``, without validating the digest."""
    return model.partition("@")[0]


def split_selector(model: str) -> tuple[str, str | None]:
    """Split ``NAME`` or ``NAME@DIGEST`` into (name, digest); the digest is None for ``NAME``.

    Raise `InvalidName` for a DIGEST that does not have 12 to 64 hex digits in lower case.
    """
    name, at, digest = model.partition("@")
    if at and not _SELECTED.fullmatch(digest):
        allowed = f"NAME@ and {SHORT_DIGEST} to 64 lower-case hex digits"
        raise InvalidName("adapter", "model", model, allowed)
    return name, digest if at else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Version:
    """An immutable version of an adapter.

    Attributes:
        digest: identifier of the version: a digest of `weights` and of `chat_template`. Without a
            chat template, it equals `weights`.
        weights: the `content_digest` of the converted tensors. Stores use this digest as the key of
            the tensors.
        created: time when the version was added, in seconds since 1970.
        nbytes: size of the converted weights in bytes.
        source: where the adapter came from, as text or as a URL without secrets.
        task_id: `lora_task_id` that identifies the weights to engines, from 1 to 2**63 - 1.
        added_by: `DECLARED`, `SETTINGS`, or the first characters of the hash of an admin's API key.
            None in records that older gateways wrote.
        tp_size: `Converted.tp_size`. None in records that older gateways wrote.
    """

    digest: str
    weights: str
    base: str
    dtype: Dtype
    created: float
    nbytes: int
    modules: tuple[ModuleRows, ...]
    source: str
    task_id: int
    chat_template: ChatTemplate | None = None
    added_by: str | None = None
    tp_size: int | None = None

    @classmethod
    def of(
        cls,
        converted: Converted,
        base: str,
        created: float,
        source: str,
        task_id: int,
        chat_template: ChatTemplate | None = None,
        added_by: str | None = None,
    ) -> Version:
        weights = converted.digest
        return cls(
            digest=chat_template.digest(weights) if chat_template else weights,
            weights=weights,
            base=base,
            dtype=converted.dtype,
            created=created,
            nbytes=converted.nbytes,
            modules=converted.modules,
            source=source,
            task_id=task_id,
            chat_template=chat_template,
            added_by=added_by,
            tp_size=converted.tp_size,
        )

    @property
    def short_digest(self) -> str:
        return self.digest[:SHORT_DIGEST]

    @property
    def rank(self) -> int:
        """Largest rank of any module in this version."""
        return max(rows.rank for rows in self.modules)


class DeclaredContent(NamedTuple):
    """The version that the configuration file last specified for a name.

    `digest` is the version's digest. `revision` is the `Record.revision` after the change that set
    this digest.
    """

    revision: int
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """The record of one adapter name.

    Attributes:
        life: number that grows when a removed name is added again.
        revision: number of changes of the name, over all its lives.
        updated: time of the last change, in seconds since 1970.
        served: digest of the version that requests for the name get; "" if the name is removed.
        versions: all versions, sorted by `created`; empty if the name is removed.
        declared: the version that the configuration file last specified. None if the file never
            specified the name, or if the record comes from gateways of older releases, which do
            not have this field.
        before: digests of the versions that were served earlier, in this order, without
            repetitions. A rollback removes the versions that were served after its target. None if
            the name is removed, or if the last change was made by a gateway of an older release,
            which does not have this field.
    """

    name: str
    life: int
    revision: int
    updated: float
    served: str
    versions: tuple[Version, ...]
    declared: DeclaredContent | None = None
    before: tuple[str, ...] | None = None

    @property
    def is_removed(self) -> bool:
        return not self.versions

    @property
    def version(self) -> Version:
        """The version that is currently served.

        Raises `UnknownVersion` if the record is removed.
        """
        return self.find(self.served)

    @property
    def earlier(self) -> tuple[str, ...]:
        """Digests of the versions that a rollback can return to. The last is the default target.

        If `before` is None, the rollback targets are the versions that were added before the served
        version.
        """
        if self.before is not None:
            return self.before
        return tuple(v.digest for v in self.versions[: self.versions.index(self.version)])

    def with_served(self, digest: str, now: float) -> Record:
        """Return the record after a change to serve the version `digest`.

        `now` is the time of the change, in seconds since 1970.
        """
        before = tuple(each for each in (*self.earlier, self.served) if each != digest)
        revision = self.revision + 1
        return replace(self, revision=revision, updated=now, served=digest, before=before)

    def with_rollback(self, digest: str, now: float) -> Record:
        """Return the record after a rollback to the version `digest`.

        Versions that were served after this version are no longer rollback targets.
        """
        changed, earlier = self.with_served(digest, now), self.earlier
        if digest not in earlier:
            return changed
        return replace(changed, before=earlier[: earlier.index(digest)])

    def find(self, digest: str) -> Version:
        """Return the version whose digest begins with `digest`.

        Raise `UnknownVersion` if there is no such version, or more than one.
        """
        found = [version for version in self.versions if version.digest.startswith(digest)]
        if len(found) != 1 or not digest:
            known = ", ".join(version.short_digest for version in self.versions)
            raise UnknownVersion(self.name, "version", digest or "none", known or "none: removed")
        return found[0]


def draw_task_id() -> int:
    """Return a random `lora_task_id` for new weights, 1 to 2**63 - 1.

    If an engine has weights in its cache under an id, it ignores other weights that are sent with
    this id. The gateway does not know the cache's contents, so an id must never be used for other
    weights. Ids are not computed from the weights: with 63 bits, an attacker could construct two
    adapters with the same id, and an engine would then use the weights of the wrong adapter.
    """
    return secrets.randbelow(2**63 - 1) + 1


def merge(one: Record, other: Record) -> Record:
    """Return the record that combines two copies, by the rules in the module's docstring."""
    if one.life != other.life:
        return one if one.life > other.life else other
    latest = max(one, other, key=_change)
    if one.is_removed and other.is_removed:
        return latest
    if one.is_removed or other.is_removed:
        return one if one.is_removed else other
    known: dict[str, Version] = {}
    for version in (*one.versions, *other.versions):
        kept = known.setdefault(version.digest, version)
        known[version.digest] = min(kept, version, key=_age)
    declared = max(filter(None, (one.declared, other.declared)), default=None)
    return replace(latest, versions=tuple(sorted(known.values(), key=_age)), declared=declared)


def _change(record: Record) -> tuple[int, float, str, bool, tuple[str, ...]]:
    # Return a sort key for `merge`: the copy with the larger key was changed last. If two copies
    # differ only in `before`, the copy whose `before` is not None has the larger key.
    before = record.before
    return record.revision, record.updated, record.served, before is not None, before or ()


def _age(version: Version) -> tuple[float, str, str, str, int, bool, bool, str, float]:
    # Return a sort key for `merge`: of two copies of a version, the copy with the smaller key wins.
    # Gateways of older releases drop the fields `chat_template`, `added_by` and `tp_size`. Copies
    # with these fields therefore have smaller keys.
    bare, unsigned = version.chat_template is None, version.added_by is None
    first = version.created, version.digest, version.base, version.source, version.task_id
    return *first, bare, unsigned, version.added_by or "", version.tp_size or math.inf
