"""Selection of the adapter versions on an engine's disk, within a size limit.

A record lists the versions of one adapter. One of these versions is the served version: requests
for the adapter's name use this version. Clients can request the other versions by digest.
`PeftDiskManager` stores as many versions as fit, in this order of priority:

1. the served versions; those of the most recently changed records come first,
2. the other versions, the newest first.

A version is removed in two steps. First the version is withdrawn: the agent reports that the
version is no longer available. When each gateway has read this report and runs no request with the
version, the manager deletes the files. A version is withdrawn if no record has listed it for a
grace time (`grace_s`), or if a version with a higher priority needs the space.

See decisions 028 and 029 in docs/decisions.
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
_RESCAN_INTERVAL_S = 10.0


@dataclass(frozen=True, slots=True)
class WantedVersion:
    """An adapter version that `PeftDiskManager` should store in its folder.

    Attributes:
        digest: digest of the version's weights.
        nbytes: estimated size in the folder, in bytes. `PeftDiskManager` replaces the estimate once
            it has computed the real size.
        rank: largest rank of the version's modules.
        modules: the modules that the version changes, by TensorRT-LLM's names.
        tp_size: tensor parallel size for which the tensors were laid out; None if unknown.
    """

    digest: str
    nbytes: int
    rank: int = 0
    modules: frozenset[str] = frozenset()
    tp_size: int | None = None


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Largest LoRA rank and the LoRA modules that an engine was built for. None means unknown.

    `modules` has TensorRT-LLM's names of the modules, such as "attn_q".
    """

    max_rank: int | None = None
    modules: frozenset[str] | None = None

    def find_problem(self, wanted: WantedVersion) -> str | None:
        """Return the reason why the engine cannot run this version. Return None if it can."""
        if self.max_rank is not None and wanted.rank > self.max_rank:
            return f"its rank is {wanted.rank}; the engine's max_lora_rank is {self.max_rank}"
        surely = wanted.modules
        if self._find_unsupported(_QKV) != _QKV:
            # Do not check the version's modules q, k and v here. Some of them may contain only
            # zeros, which were added for the C++ runtime. Such modules are not written to the PEFT
            # files. `find_module_problem` checks the modules of these files later.
            surely -= _QKV
        return self.find_module_problem(surely)

    def find_module_problem(self, modules: frozenset[str]) -> str | None:
        """Return the reason why the engine cannot run these modules. Return None if it can."""
        if self.modules is None or not (more := self._find_unsupported(modules)):
            return None
        return (
            f"it has {', '.join(sorted(more))}; the engine's lora_target_modules are "
            f"{', '.join(sorted(self.modules))}"
        )

    def _find_unsupported(self, modules: frozenset[str]) -> frozenset[str]:
        """Return the modules that the engine does not support."""
        if self.modules is None:
            return frozenset()
        return modules - self.modules.union(*(_FUSED.get(each, ()) for each in self.modules))


def list_wanted(records: Iterable[Record]) -> list[WantedVersion]:
    """Return the versions of all records, except removed records, in descending priority.

    The served versions come first. This module's docstring describes the priority.
    """
    live = sorted((r for r in records if not r.is_removed), key=lambda r: r.updated, reverse=True)
    served = [record.version for record in live]
    older = [v for record in live for v in record.versions if v.digest != record.served]
    older.sort(key=lambda version: version.created, reverse=True)
    found: dict[str, WantedVersion] = {}
    for version in (*served, *older):
        modules = frozenset(rows.module for rows in version.modules)
        known = found.get(version.weights)
        if known is None or known.tp_size is None:
            found[version.weights] = WantedVersion(
                *(version.weights, version.nbytes, version.rank, modules, version.tp_size)
            )
    return list(found.values())


_ANY = EngineLimits()


class PeftDiskManager:
    """Manager that stores and removes versions in a folder. Use an instance in one thread only.

    The agent reports `available`, `lacks` and `refused` to gateways. Each change of one of these
    attributes increases `revision`, the number that the agent's next report will have.
    """

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
        self._stored: dict[str, int] = {}
        self._scanned_at = -math.inf
        self._withdrawn: dict[str, int] = {}
        self._unnamed: dict[str, float] = {}
        self._sizes: dict[str, int] = {}
        self._retry: dict[str, tuple[float, str]] = {}
        # Earliest time of the next write after the disk has failed, for example because it is full.
        # `_disk_pause_s` is the pause before that time, which grows with each failure.
        self._disk_retry = -math.inf
        self._disk_pause_s = 0.0
        self.revision = 0
        self.lacks: Mapping[str, str] = {}
        """Reasons why wanted versions cannot be stored now, by the version's digest."""
        self.refused: dict[str, str] = {}
        """Reasons why wanted versions will never be stored, by the version's digest.

        Such a version cannot be written as PEFT files, or the engine cannot run it.
        """
        self._too_many: frozenset[str] = frozenset()
        self._rescan()

    @property
    def available(self) -> frozenset[str]:
        """Digests of the versions that requests may use."""
        return frozenset(self._stored.keys() - self._withdrawn.keys())

    @property
    def nbytes(self) -> int:
        """Total size of the stored versions in bytes."""
        return sum(self._stored.values())

    def act(
        self,
        wanted: list[WantedVersion],
        fetch: Callable[[str], Converted],
        base: BaseModel | None,
        unused: Callable[[str, int], bool] | None,
    ) -> bool:
        """Perform at most one action: store or remove a version, or withdraw several versions.

        Return False if there was nothing to do.

        Args:
            wanted: the wanted versions, in descending order of priority.
            fetch: returns a version by digest; raises StoreError if the version is not available
                now.
            base: the base model; None if it is unknown, in which case no version is written.
            unused: called with the digest of a withdrawn version, and the `revision` of the first
                report without this version. The function returns True if every gateway has read
                this report, and no gateway uses the version. If `unused` is None, no version is
                withdrawn or removed.

        Raises:
            OSError: the folder cannot be read or written.
        """
        acted = self._act(wanted, fetch, base, unused)
        lacks = self._find_lacking(wanted)
        if lacks != self.lacks:
            self.lacks = lacks
            self.revision += 1
        return acted

    def _act(
        self,
        wanted: list[WantedVersion],
        fetch: Callable[[str], Converted],
        base: BaseModel | None,
        unused: Callable[[str, int], bool] | None,
    ) -> bool:
        self._rescan()
        self._refuse(wanted)
        wanted = [each for each in wanted if each.digest not in self.refused]
        target = self._select_target(wanted)
        self._note_unnamed(wanted)
        for digest in [digest for digest in self._withdrawn if digest in target]:
            del self._withdrawn[digest]
            self.revision += 1
        for digest, revision in self._withdrawn.items():
            if unused is not None and unused(digest, revision):
                self._remove(digest)
                return True
        missing = [] if base is None else self._find_missing(target)
        leave = self._select_withdrawals(wanted, target, missing[0] if missing else None)
        if leave and unused is not None:
            self.revision += 1
            self._withdrawn.update(dict.fromkeys(leave, self.revision))
            return True
        for each in missing:
            if base is not None and self._fits(self._size(each)) and self._load(each, fetch, base):
                return True
            if self._clock() < self._disk_retry:
                break
        return False

    def _rescan(self) -> None:
        """Read which versions the folder has, at most once per `_RESCAN_INTERVAL_S` seconds.

        The folder is read repeatedly because an operator may remove versions from it.
        """
        now = self._clock()
        if now - self._scanned_at < _RESCAN_INTERVAL_S:
            return
        self._scanned_at = now
        found = self._folders.list_versions()
        if found.keys() != self._stored.keys():
            self.revision += 1
        self._stored = found
        self._withdrawn = {d: r for d, r in self._withdrawn.items() if d in found}

    def _size(self, wanted: WantedVersion) -> int:
        return self._stored.get(wanted.digest) or self._sizes.get(wanted.digest) or wanted.nbytes

    def _fits(self, nbytes: int) -> bool:
        return self._max_bytes is None or self.nbytes + nbytes <= self._max_bytes

    def _select_target(self, wanted: list[WantedVersion]) -> Mapping[str, WantedVersion]:
        """Return the wanted versions that fit into `max_bytes`, by digest.

        Versions are selected in the order of `wanted`.
        """
        target: dict[str, WantedVersion] = {}
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

    def _refuse(self, wanted: list[WantedVersion]) -> None:
        for digest in self.refused.keys() - {each.digest for each in wanted}:
            del self.refused[digest]
            self.revision += 1
        for each in wanted:
            why = None if each.digest in self.refused else self._limits.find_problem(each)
            if why is not None:
                self._refuse_one(each, why)

    def _refuse_one(self, each: WantedVersion, why: str) -> None:
        self.refused[each.digest] = why
        self.revision += 1
        _LOG.error("%s: %s", each.digest[:12], why)

    def _find_lacking(self, wanted: list[WantedVersion]) -> dict[str, str]:
        found = {}
        for each in wanted:
            if each.digest in self._stored or each.digest in self.refused:
                continue
            if each.digest in self._too_many:
                found[each.digest] = f"it does not fit into {self._max_bytes} bytes"
            elif each.digest in self._retry:
                found[each.digest] = self._retry[each.digest][1]
        return found

    def _note_unnamed(self, wanted: list[WantedVersion]) -> None:
        now, named = self._clock(), {each.digest for each in wanted}
        since = {d: self._unnamed.get(d, now) for d in self._stored if d not in named}
        self._unnamed = since

    def _find_missing(self, target: Mapping[str, WantedVersion]) -> list[WantedVersion]:
        now = self._clock()
        if now < self._disk_retry:
            return []
        return [
            each
            for digest, each in target.items()
            if digest not in self._stored and self._retry.get(digest, (0.0, ""))[0] <= now
        ]

    def _select_withdrawals(
        self,
        wanted: list[WantedVersion],
        target: Mapping[str, WantedVersion],
        missing: WantedVersion | None,
    ) -> list[str]:
        now = self._clock()
        old = [d for d, since in self._unnamed.items() if now - since >= self._grace_s]
        leave = [digest for digest in old if digest not in self._withdrawn]
        if self._max_bytes is None:
            return leave
        needed = 0 if missing is None else self._size(missing)
        # Count the space of withdrawn versions as free, because they will be deleted.
        going = [*self._withdrawn, *leave]
        room = self._max_bytes - self.nbytes + sum(self._stored[digest] for digest in going)
        order = {each.digest: index for index, each in enumerate(wanted)}
        spare = [d for d in self._stored if d not in target and d not in going]
        spare.sort(key=lambda digest: order.get(digest, len(order)), reverse=True)
        for digest in spare:
            if room >= needed:
                break
            leave.append(digest)
            room += self._stored[digest]
        return leave

    def _load(
        self, each: WantedVersion, fetch: Callable[[str], Converted], base: BaseModel
    ) -> bool:
        # Import this module only here: it needs numpy, which most processes do not need.
        from adapters.peft_files import peft_files  # noqa: PLC0415

        try:
            converted = replace(fetch(each.digest), tp_size=each.tp_size)
            files = peft_files(converted, base)
            self._sizes[each.digest] = files.nbytes
            if (why := self._limits.find_module_problem(files.modules)) is not None:
                self._refuse_one(each, why)
            elif self._fits(files.nbytes):
                self._folders.put(each.digest, files)
                self._stored[each.digest] = files.nbytes
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
        self._disk_retry = -math.inf  # retry at once: space is free again
        del self._withdrawn[digest], self._stored[digest]
        _LOG.info("removed %s", digest[:12])
