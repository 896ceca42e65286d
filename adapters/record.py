"""What is known of one adapter name: its versions and the one now served. Frozen.

Records are kept in several places at once (each gateway's disk, Redis), and any of them may have
missed a change. `merge` joins two copies; it is commutative, associative and idempotent, so all
places agree once they have seen each other, in whatever order:

- A removal is final in its `life`; adding the name again starts the next life, which wins. An old
  copy can therefore never bring a removed adapter back.
- Within a life versions are only ever added, so the union of both copies loses nothing.
- The version served is the one of the later change (`revision`, then `updated`), and so is what was
  served before it.
- So is the content that was declared last, by the `revision` with which it was.
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
"""Who adds what the configuration file declares."""
SETTINGS = "GATEWAY_ADAPTERS"
"""Who adds what that setting names."""
_SEGMENT = re.compile(r"[A-Za-z0-9._-]{1,64}")
_SELECTED = re.compile(r"[0-9a-f]{12,64}")
_DIGEST = re.compile(r"[0-9a-f]{64}")


def is_digest(text: str) -> bool:
    """Whether this is a whole content digest, and so safe as part of a path and of a key."""
    return _DIGEST.fullmatch(text) is not None


def check_name(name: str) -> str:
    """`name`, or ``tenant/name``. Raises `InvalidName`."""
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
    """``NAME@DIGEST``: a version's own name as a model, which no rollback moves."""
    return f"{name}@{digest[:SHORT_DIGEST]}"


def selected_name(model: str) -> str:
    """The name in ``NAME`` or ``NAME@DIGEST``, whatever the digest is."""
    return model.partition("@")[0]


def split_selector(model: str) -> tuple[str, str | None]:
    """``NAME`` or ``NAME@DIGEST`` as (name, digest or None); a digest has 12 to 64 hex digits."""
    name, at, digest = model.partition("@")
    if at and not _SELECTED.fullmatch(digest):
        allowed = f"NAME@ and {SHORT_DIGEST} to 64 lower-case hex digits"
        raise InvalidName("adapter", "model", model, allowed)
    return name, digest if at else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Version:
    """One immutable content of an adapter. `created` is in seconds since 1970.

    `nbytes` is the size of the weights as sent; `source` says where it came from, in words or as a
    URL without what is secret, `added_by` who added it: an admin by the beginning of the key's
    hash, `DECLARED` or `SETTINGS`; None in what is from before, or an older gateway wrote.
    `task_id` is what engines know it by, 1 to 2**63 - 1. `weights` is the content digest of the
    tensors, by which stores keep them; `digest` is the same, but of the `chat_template` as well
    where there is one. `tp_size` is as in `Converted`, None as well where a gateway wrote it that
    did not know of it.
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
        """The largest rank of any module."""
        return max(rows.rank for rows in self.modules)


class DeclaredContent(NamedTuple):
    """What the configuration file's source of a name held, and the revision that took it over."""

    revision: int
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One name. `versions` is sorted by `created`; a removed record has none.

    `served` is the digest of the version that the bare name stands for, "" when removed.
    `revision` counts the changes of the name, over all its lives. `declared` is None as well where
    gateways that do not know of it have written all copies. `before` has digests of what was served
    before, each once and the last one last; None where a gateway that does not know of it made the
    last change, and when removed.
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
        """The version now served. Raises `UnknownVersion` when the record is removed."""
        return self.find(self.served)

    @property
    def earlier(self) -> tuple[str, ...]:
        """What a rollback goes back to, the last one first to be served again.

        Where it is not known what was served before, it is what was added before.
        """
        if self.before is not None:
            return self.before
        return tuple(v.digest for v in self.versions[: self.versions.index(self.version)])

    def with_served(self, digest: str, now: float) -> Record:
        """After a change of this name that serves this version of it."""
        before = tuple(each for each in (*self.earlier, self.served) if each != digest)
        revision = self.revision + 1
        return replace(self, revision=revision, updated=now, served=digest, before=before)

    def with_rollback(self, digest: str, now: float) -> Record:
        """The same, but what was served after this version is not gone back to any more."""
        changed, earlier = self.with_served(digest, now), self.earlier
        if digest not in earlier:
            return changed
        return replace(changed, before=earlier[: earlier.index(digest)])

    def find(self, digest: str) -> Version:
        """The version whose digest starts so. Raises `UnknownVersion`."""
        found = [version for version in self.versions if version.digest.startswith(digest)]
        if len(found) != 1 or not digest:
            known = ", ".join(version.short_digest for version in self.versions)
            raise UnknownVersion(self.name, "version", digest or "none", known or "none: removed")
        return found[0]


def draw_task_id() -> int:
    """A `lora_task_id` for new content, 1 to 2**63 - 1.

    An engine ignores new weights under an id that it holds, and nobody knows for how long it holds
    one: until it needs the room or restarts. So no id is given twice. It is drawn and not computed
    from the content: the first 63 bits of a digest are few enough to search for two contents that
    share them, and to have the one served under the other's name.
    """
    return secrets.randbelow(2**63 - 1) + 1


def merge(one: Record, other: Record) -> Record:
    """The record that knows what both know; see the rule at the top of this file."""
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
    # Of two copies of one change that which knows what was served before wins.
    before = record.before
    return record.revision, record.updated, record.served, before is not None, before or ()


def _age(version: Version) -> tuple[float, str, str, str, int, bool, bool, str, float]:
    # A gateway that knows no templates writes versions without: the copies that have one win. So do
    # those that say who added them, and for which tp_size.
    bare, unsigned = version.chat_template is None, version.added_by is None
    first = version.created, version.digest, version.base, version.source, version.task_id
    return *first, bare, unsigned, version.added_by or "", version.tp_size or math.inf
