"""The copy in Redis, for all gateways that share it.

``conversations:{.TENANT}:``  what the keys of one tenant begin with: see ``script.lua``
``conversations:{all}:NAME``  what the gateways know of each other: see ``look.lua``
``conversations:{all}:deleted``  stream: TENANT and ID of what was deleted, or GROUP of what had no
                             more room, for the others' disks

What is there was perhaps written by somebody else: what does not fit is counted and left alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from importlib.resources import files
from typing import Any, NamedTuple

from gateway.conversations.record import (
    DELETED,
    FINAL,
    GROWING,
    MAX_MEMBERS,
    MAX_READ,
    TOO_LARGE,
    Record,
    is_id,
)
from gateway.errors import ConversationTooLarge
from lora_store import redis_url
from lora_store.connect import errors
from lora_store.primary import Primary, writing
from lora_store.redis_role import ROLE_CHECK_S
from lora_store.refusals import Refusals

_SCRIPT = files(__package__).joinpath("script.lua").read_text(encoding="utf-8")
_LOOK = files(__package__).joinpath("look.lua").read_text(encoding="utf-8")
_ALL = "conversations:{all}:"
_NAMES = ("epoch", "since", "run", "seen", "kept", "gateways", "dirty", "left", "lost")
_HEAD = re.compile(rb"c1 (\d{20}) (\d{20}) (\d{20}) ([A-Za-z0-9_/-]{0,160})\n")
_SLACK = 300  # bytes of HEAD, with the longest of names
_TOLD = 100_000  # deletions that a gateway which was away can still be told of
GONE_MS = 3600 * 1000
"""After which a gateway that does not look any more, and what its disk has, is given up."""
EPHEMERAL = "ephemeral:"
"""What the name of a gateway begins with whose disk ends with it."""
_BEHIND_MS = 30_000  # which each gateway still knows to bring again
# All gateways look each second: by then whoever has something to bring has said so.
_SETTLED_MS = 3000


class Known(NamedTuple):
    """What a process knows of Redis from its last look.

    Attributes:
        epoch: changes when Redis has lost everything, or much; 0 before the first look.
        since: changes when it may have lost something.
        seen: the time of Redis.
        left: when the last gateway went for good, with its disk.
        lost: what was brought is all there is of it only if it began later: else a part may have
            gone with such a gateway.
        gateways: those that share it.
    """

    epoch: int = 0
    since: int = 0
    seen: int = 0
    left: int = 0
    lost: int = 0
    gateways: tuple[str, ...] = ()


class Look(NamedTuple):
    """
    Attributes:
        known: as it is now.
        settled: whether what Redis lacks is nowhere else, as far as is known.
        whole: whether it has all that the disk of the gateway that looks has; of one that has said
            goodbye, whether that is so and it is waited for no more.
        dirty: how often that one has said that there is more.
        at: when this was, in ms of Redis' clock.
        oldest: when the gateway that shares it and has not looked for longest did so; `at` where
            there is none.
    """

    known: Known
    settled: bool
    whole: bool
    dirty: int
    at: int
    oldest: int


class Copy(NamedTuple):
    """A record as Redis has it, and the epoch in which it was put: 0 if it was brought."""

    record: Record
    epoch: int

    @property
    def changes(self) -> bool:
        """Whether another copy may be of a later version, and not deleted."""
        return self.record.version < FINAL


class Members(NamedTuple):
    """Some members of a group.

    Attributes:
        ids: by order.
        copies: those of them that there are.
        epoch: that of the record that the group is called by; -1 where there is none.
        began: the order of that record; 0 where there is none.
    """

    ids: list[str]
    copies: dict[str, Copy]
    epoch: int
    began: int


class Gone(NamedTuple):
    """What a disk is to forget: a record that was deleted, or a group that there is no room for."""

    tenant: str
    id: str
    is_group: bool


class SharedPut(NamedTuple):
    """What became of a put.

    Attributes:
        done: else it has to be asked again, as there was much to remove.
        evicted: how many records were.
        taken: whether Redis has all of them, or higher versions; else there is what does not fit.
        higher: the ids of which it has higher versions.
    """

    done: bool
    evicted: int
    taken: bool
    higher: list[str]


class SharedConversations:
    """Blocks; for any thread. Raises `lora_store.primary.failures`."""

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float,
        ttl_ms: int,
        tenant_bytes: int,
        renew_ms: int,
        on_refused: Callable[[], object] = lambda: None,
    ) -> None:
        """`url` in a form of `lora_store.redis_url`; `timeout_s` bounds each call."""
        self._primary = Primary(redis_url.parse(url), timeout_s)
        self.stale_s = ROLE_CHECK_S + timeout_s
        """Seconds for which another process may still write to a server that was replaced."""
        self._times = (ttl_ms, renew_ms)
        self._tenant_bytes = tenant_bytes
        self._refusals = Refusals(on_refused)
        self._deleted_after = "0"

    def close(self) -> None:
        self._primary.close()

    def put(
        self, tenant: str, records: Sequence[Record], epoch: int = 0, used_ms: int = -1
    ) -> SharedPut:
        """`epoch`: the last that was seen, 0 for those that are brought; `used_ms`: when these were
        used last, else now.

        Raises ConversationTooLarge.
        """
        arguments: list[object] = [self._tenant_bytes, MAX_MEMBERS, used_ms]
        for record in records:
            version, order = b"%020d" % record.version, b"%020d" % record.order
            head = b"c1 %020d %b %b %b\n" % (epoch, version, order, record.group.encode())
            arguments += (record.id, version, record.group, order, head + record.data)
        answer = self._run(tenant, "put", arguments)
        if answer is None:
            return SharedPut(True, 0, False, [])
        if answer[0] < 0:
            raise ConversationTooLarge(TOO_LARGE.format(self._tenant_bytes))
        # There are none where it is not done.
        states = [(each.id, state) for each, state in zip(records, answer[3:], strict=False)]
        unfit = [id_ for id_, state in states if state == 3]
        for id_ in unfit:
            self._refusals.add(self._key(tenant, f"r:{id_}"), "no record")
        done = answer[0] == 1
        dropped = [raw.decode(errors="replace") for raw in answer[2]]
        self._tell(tenant, "u", [unit for unit in dropped if unit.startswith(GROWING)])
        if done:
            self._tell(tenant, "i", [each.id for each in records if each.version == DELETED])
        higher = [id_ for id_, state in states if state == 2]
        return SharedPut(done, answer[1], not unfit, higher)

    def get(self, tenant: str, ids: Sequence[str]) -> dict[str, Copy]:
        """What there is of these, tombstones too. Raises ConversationTooLarge."""
        answer = self._run(tenant, "get", [MAX_READ + _SLACK * len(ids), *ids])
        return self._records(tenant, ids, answer)

    def members(self, tenant: str, group: str, after: int, limit: int) -> Members:
        """Raises ConversationTooLarge."""
        bound = MAX_READ + _SLACK * limit
        answer = self._run(tenant, "members", [bound, group, b"%020d" % (after + 1), limit])
        head, *told = answer[1] if answer is not None and answer[0] > 0 else (b"",)
        ids = [raw.decode(errors="replace") for raw in told]
        copies = self._records(tenant, ids, answer)
        found = _HEAD.match(head)
        epoch, began = (int(found[1]), int(found[3])) if found else (-1, 0)
        own = {id_: copy for id_, copy in copies.items() if copy.record.group == group}
        return Members(ids, own, epoch, began)

    def look(
        self, known: Known, gateway: str = "", says: str = "", of: tuple[int, int] = (0, 0)
    ) -> Look:
        """`gateway` says of itself that its disk has more, "dirty", or is not all brought yet,
        "open", or is: "whole", or that it goes for good, with all of that in Redis: "bye"; `of` the
        epoch and number that it was told before."""
        keys = [f"{_ALL}{name}" for name in _NAMES]
        heard = (known.epoch, known.since, known.seen, known.left, _BEHIND_MS, GONE_MS)
        told = (gateway, says, *of, *known.gateways)
        with self._primary.use() as client:
            answer = client.eval(_LOOK, len(keys), *keys, *heard, *told)
        epoch, since, age_ms, seen, left, lost, others, dirty, whole, at, oldest = map(
            int, answer[:-1]
        )
        names = tuple(sorted(raw.decode(errors="replace") for raw in answer[-1]))
        settled = age_ms >= _SETTLED_MS and others == 0
        now = Known(epoch=epoch, since=since, seen=seen, left=left, lost=lost, gateways=names)
        return Look(now, settled, whole == 1, dirty, at=at, oldest=oldest)

    def deleted(self, limit: int = 1000) -> list[Gone]:
        """Some of what went since the last call."""
        after = f"({self._deleted_after}"
        with self._primary.use() as client:
            entries = client.xrange(f"{_ALL}deleted", min=after, count=limit)
        found: list[Gone] = []
        for position, fields in entries:
            self._deleted_after = position.decode()
            tenant, id_, unit = (
                fields.get(name, b"").decode(errors="replace") for name in (b"t", b"i", b"u")
            )
            if is_id(unit or id_):
                found.append(Gone(tenant, unit or id_, bool(unit)))
        return found

    def _tell(self, tenant: str, kind: str, names: Sequence[str]) -> None:
        if names:
            with self._primary.use() as client:
                at_once = client.pipeline(transaction=False)
                for name in names:
                    told = {"t": tenant, kind: name}
                    at_once.xadd(f"{_ALL}deleted", told, maxlen=_TOLD, approximate=True)
                at_once.execute()

    def _key(self, tenant: str, name: str) -> str:
        # No tenant's name begins with a dot, and an empty one would be no hash tag.
        return f"conversations:{{.{tenant}}}:{name}"

    def _run(self, tenant: str, operation: str, arguments: Sequence[object]) -> list[Any] | None:
        """None where a key is of another kind."""
        key = self._key(tenant, "")
        try:
            with self._primary.use() as client:
                told = (operation, *self._times, *arguments)
                asking = writing(client) if operation == "put" else nullcontext(client)
                with asking as bound:
                    answer: list[Any] = bound.eval(_SCRIPT, 1, key, *told)
        except errors().ResponseError as error:
            if "WRONGTYPE" not in str(error):
                raise
            self._refusals.add(key, error)
            return None
        return answer

    def _records(
        self, tenant: str, ids: Sequence[str], answer: list[Any] | None
    ) -> dict[str, Copy]:
        if answer is None:
            return {}
        if answer[0] < 0:
            raise ConversationTooLarge("It is too large to be read at once.")
        found: dict[str, Copy] = {}
        for id_, raw in zip(ids, answer[2], strict=False):
            if raw is None:
                continue
            head = _HEAD.match(raw)
            epoch, version, order = map(int, head.groups()[:3]) if head else (0, 2**63, 0)
            if head is None or not is_id(id_) or max(version, order) >= 2**63:
                self._refusals.add(self._key(tenant, f"r:{id_}"), "no record")
                continue
            record = Record(id_, raw[head.end() :], version, head[4].decode(), order)
            found[id_] = Copy(record, epoch)
        return found
