"""Which adapter versions a disk holds for its engine, within a bound: one act at a time.

What is wanted comes from the records alone, never from requests: versions that names now serve come
first, the latest change before the others, then the older ones that can be asked for by digest. As
many as fit are held.

A version is removed in three steps. It is withdrawn: told as not held any more. When everybody who
may have named it has seen that and runs nothing with it, it is removed. It is withdrawn when no
record has named it for `grace_s`, or when a better one needs the room.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from adapters.adapter import Converted
from adapters.base_model import BaseModel
from adapters.errors import AdapterError, StoreError
from adapters.record import Record
from lora_store.peft_folders import PeftFolders

_LOG = logging.getLogger(__name__)

_RETRY_S = 1.0
_RETRY_FULL_S = 60.0
_QKV = frozenset({"attn_q", "attn_k", "attn_v"})
_FUSED = {"attn_qkv": _QKV, "mlp_gate_up": {"mlp_h_to_4h", "mlp_gate"}}
_LOOK_S = 10.0


@dataclass(frozen=True, slots=True)
class Wanted:
    """`nbytes` is about what the folder will take; what it did take is remembered.

    `rank` is the largest of any of its `modules`, which have TensorRT-LLM's names. `tp_size` is
    that of the engine that its tensors were laid out for, where that is known.
    """

    digest: str
    nbytes: int
    rank: int = 0
    modules: frozenset[str] = frozenset()
    tp_size: int | None = None


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What an engine was loaded for; None is not known. `modules` have TensorRT-LLM's names."""

    max_rank: int | None = None
    modules: frozenset[str] | None = None

    def why_not(self, wanted: Wanted) -> str | None:
        """Why the engine would fail each request with it; None where nothing is known of that."""
        if self.max_rank is not None and wanted.rank > self.max_rank:
            return f"its rank is {wanted.rank}; the engine's max_lora_rank is {self.max_rank}"
        surely = wanted.modules
        if self._beyond(_QKV) != _QKV:
            # Some of these may be rows of zeros for the C++ runtime: only the files tell.
            surely -= _QKV
        return self.why_not_modules(surely)

    def why_not_modules(self, modules: frozenset[str]) -> str | None:
        """As `why_not`, of what PEFT files hold."""
        if self.modules is None or not (more := self._beyond(modules)):
            return None
        return (
            f"it has {', '.join(sorted(more))}; the engine's lora_target_modules are "
            f"{', '.join(sorted(self.modules))}"
        )

    def _beyond(self, modules: frozenset[str]) -> frozenset[str]:
        if self.modules is None:
            return frozenset()
        return modules - self.modules.union(*(_FUSED.get(each, ()) for each in self.modules))


def wanted_of(records: Iterable[Record]) -> list[Wanted]:
    """All versions of these names, the most wanted first."""
    live = sorted((r for r in records if not r.is_removed), key=lambda r: r.updated, reverse=True)
    served = [record.version for record in live]
    older = [v for record in live for v in record.versions if v.digest != record.served]
    older.sort(key=lambda version: version.created, reverse=True)
    found: dict[str, Wanted] = {}
    for version in (*served, *older):
        modules = frozenset(rows.module for rows in version.modules)
        known = found.get(version.weights)
        if known is None or known.tp_size is None:
            found[version.weights] = Wanted(
                *(version.weights, version.nbytes, version.rank, modules, version.tp_size)
            )
    return list(found.values())


_ANY = EngineLimits()


class Keeper:
    """For one thread. `revision` grows with each change of what is held, and of why not."""

    def __init__(
        self,
        folders: PeftFolders,
        *,
        max_bytes: int | None,
        grace_s: float,
        limits: EngineLimits = _ANY,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folders = folders
        self._max_bytes = max_bytes
        self._grace_s = grace_s
        self._clock = clock
        self._limits = limits
        self._here: dict[str, int] = {}
        self._looked = -math.inf
        self._withdrawn: dict[str, int] = {}
        self._unnamed: dict[str, float] = {}
        self._sizes: dict[str, int] = {}
        self._retry: dict[str, tuple[float, str]] = {}
        # A disk that takes no more is tried after a while that grows, whatever the version.
        self._disk_retry = -math.inf
        self._disk_pause_s = 0.0
        self.revision = 0
        self.lacks: Mapping[str, str] = {}
        """Versions that are wanted and not here, and cannot come now, with the reason."""
        self.refused: dict[str, str] = {}
        """Versions that have no PEFT form, or that the engine cannot run, with the reason."""
        self._too_many: frozenset[str] = frozenset()
        self._look()

    @property
    def held(self) -> frozenset[str]:
        """What requests may name."""
        return frozenset(self._here.keys() - self._withdrawn.keys())

    @property
    def nbytes(self) -> int:
        return sum(self._here.values())

    def act(
        self,
        wanted: list[Wanted],
        fetch: Callable[[str], Converted],
        base: BaseModel | None,
        unused: Callable[[str, int], bool] | None,
    ) -> bool:
        """One step towards what is wanted; False when there was nothing to do.

        `fetch` raises StoreError for what cannot be had now. Without `base` nothing is written.
        `unused` says whether nobody names a version who has seen this revision; while it is None
        nothing is withdrawn or removed. Raises `OSError`.
        """
        acted = self._act(wanted, fetch, base, unused)
        lacks = self._lacking(wanted)
        if lacks != self.lacks:
            self.lacks = lacks
            self.revision += 1
        return acted

    def _act(
        self,
        wanted: list[Wanted],
        fetch: Callable[[str], Converted],
        base: BaseModel | None,
        unused: Callable[[str, int], bool] | None,
    ) -> bool:
        self._look()
        self._refuse(wanted)
        wanted = [each for each in wanted if each.digest not in self.refused]
        target = self._target(wanted)
        self._note_unnamed(wanted)
        for digest in [digest for digest in self._withdrawn if digest in target]:
            del self._withdrawn[digest]
            self.revision += 1
        for digest, revision in self._withdrawn.items():
            if unused is not None and unused(digest, revision):
                self._remove(digest)
                return True
        missing = [] if base is None else self._missing(target)
        leave = self._to_withdraw(wanted, target, missing[0] if missing else None)
        if leave and unused is not None:
            self.revision += 1
            self._withdrawn.update(dict.fromkeys(leave, self.revision))
            return True
        for each in missing:
            if base is not None and self._fits(self._size(each)) and self._bring(each, fetch, base):
                return True
            if self._clock() < self._disk_retry:
                break
        return False

    def _look(self) -> None:
        """What is on the disk: somebody may have taken folders away."""
        now = self._clock()
        if now - self._looked < _LOOK_S:
            return
        self._looked = now
        found = self._folders.held()
        if found.keys() != self._here.keys():
            self.revision += 1
        self._here = found
        self._withdrawn = {d: r for d, r in self._withdrawn.items() if d in found}

    def _size(self, wanted: Wanted) -> int:
        return self._here.get(wanted.digest) or self._sizes.get(wanted.digest) or wanted.nbytes

    def _fits(self, nbytes: int) -> bool:
        return self._max_bytes is None or self.nbytes + nbytes <= self._max_bytes

    def _target(self, wanted: list[Wanted]) -> Mapping[str, Wanted]:
        """As many as fit, in their order."""
        target: dict[str, Wanted] = {}
        left = self._max_bytes
        for each in wanted:
            size = self._size(each)
            if left is None or size <= left:
                target[each.digest] = each
                left = None if left is None else left - size
        too_many = frozenset(each.digest for each in wanted if each.digest not in target)
        if too_many - self._too_many:
            _LOG.error(
                "%d of %d adapter versions do not fit in %s bytes",
                *(len(too_many), len(wanted), self._max_bytes),
            )
        self._too_many = too_many
        return target

    def _refuse(self, wanted: list[Wanted]) -> None:
        for digest in self.refused.keys() - {each.digest for each in wanted}:
            del self.refused[digest]
            self.revision += 1
        for each in wanted:
            why = None if each.digest in self.refused else self._limits.why_not(each)
            if why is not None:
                self._refuse_one(each, why)

    def _refuse_one(self, each: Wanted, why: str) -> None:
        self.refused[each.digest] = why
        self.revision += 1
        _LOG.error("%s: %s", each.digest[:12], why)

    def _lacking(self, wanted: list[Wanted]) -> dict[str, str]:
        found = {}
        for each in wanted:
            if each.digest in self._here or each.digest in self.refused:
                continue
            if each.digest in self._too_many:
                found[each.digest] = f"there is no room for it in {self._max_bytes} bytes"
            elif each.digest in self._retry:
                found[each.digest] = self._retry[each.digest][1]
        return found

    def _note_unnamed(self, wanted: list[Wanted]) -> None:
        now, named = self._clock(), {each.digest for each in wanted}
        since = {d: self._unnamed.get(d, now) for d in self._here if d not in named}
        self._unnamed = since

    def _missing(self, target: Mapping[str, Wanted]) -> list[Wanted]:
        now = self._clock()
        if now < self._disk_retry:
            return []
        return [
            each
            for digest, each in target.items()
            if digest not in self._here and self._retry.get(digest, (0.0, ""))[0] <= now
        ]

    def _to_withdraw(
        self, wanted: list[Wanted], target: Mapping[str, Wanted], missing: Wanted | None
    ) -> list[str]:
        now = self._clock()
        old = [d for d, since in self._unnamed.items() if now - since >= self._grace_s]
        leave = [digest for digest in old if digest not in self._withdrawn]
        if self._max_bytes is None:
            return leave
        needed = 0 if missing is None else self._size(missing)
        # What is withdrawn already will make its room by itself.
        going = [*self._withdrawn, *leave]
        room = self._max_bytes - self.nbytes + sum(self._here[digest] for digest in going)
        order = {each.digest: place for place, each in enumerate(wanted)}
        spare = [d for d in self._here if d not in target and d not in going]
        spare.sort(key=lambda digest: order.get(digest, len(order)), reverse=True)
        for digest in spare:
            if room >= needed:
                break
            leave.append(digest)
            room += self._here[digest]
        return leave

    def _bring(self, each: Wanted, fetch: Callable[[str], Converted], base: BaseModel) -> bool:
        # numpy is needed here alone; who imports this to look at folders does without.
        from adapters.peft_files import peft_files  # noqa: PLC0415

        try:
            converted = replace(fetch(each.digest), tp_size=each.tp_size)
            files = peft_files(converted, base)
            self._sizes[each.digest] = files.nbytes
            if (why := self._limits.why_not_modules(files.modules)) is not None:
                self._refuse_one(each, why)
            elif self._fits(files.nbytes):
                self._folders.put(each.digest, files)
                self._here[each.digest] = files.nbytes
                self._retry.pop(each.digest, None)
                self._disk_pause_s = 0.0
                self.revision += 1
                _LOG.info("holds %s: %d bytes", each.digest[:12], files.nbytes)
            return True
        except AdapterError as error:
            self._refuse_one(each, str(error))
            return True
        except (StoreError, OSError) as error:
            why = error.strerror or str(error) if isinstance(error, OSError) else str(error)
            known = self._retry.get(each.digest)
            self._retry[each.digest] = self._clock() + _RETRY_S, why
            if known is None or known[1] != why:
                _LOG.warning("cannot hold %s yet: %s", each.digest[:12], error)
            if isinstance(error, OSError):
                self._disk_pause_s = min(2 * self._disk_pause_s or _RETRY_S, _RETRY_FULL_S)
                self._disk_retry = self._clock() + self._disk_pause_s
            return False

    def _remove(self, digest: str) -> None:
        self._folders.remove(digest)
        self._disk_retry = -math.inf  # there is room again
        del self._withdrawn[digest], self._here[digest]
        _LOG.info("removed %s", digest[:12])
