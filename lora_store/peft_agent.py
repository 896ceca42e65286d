"""Beside a Triton: keeps its disk true to the names in Redis, and tells gateways what it holds.

It needs nothing but Redis: names, tensors and the base model are there, or some gateway puts them
there again. It does as it is told by nobody's request. While Redis is away, or has just lost
everything, the disk stays as it is and engines go on with it.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import threading
import time
from collections.abc import Mapping, Sequence

from adapters.adapter import Converted
from adapters.errors import StoreError
from certificates.reloading import poll_all
from lora_store.codec import CorruptBlob, decode
from lora_store.peft_folders import PeftFolders
from lora_store.peft_keeper import EngineLimits, Keeper, Wanted, wanted_of
from lora_store.peft_notices import Heard, Held, Named, PeftNotices
from lora_store.redis import Position, RedisTier

_LOG = logging.getLogger(__name__)

BEAT_S = 2.0
_POLL_S = 0.5
# After a start, an outage or a loss of all data: until names and gateways are all there again.
_SETTLE_S = 30.0
_FORGET_S = 3600.0


class Agent:
    """`run` blocks. One process at a time works on a folder; another one waits until it ends."""

    def __init__(
        self,
        folders: PeftFolders,
        tier: RedisTier,
        notices: PeftNotices,
        *,
        replicas: Sequence[str],
        path: str,
        max_bytes: int,
        grace_s: float,
        settle_s: float = _SETTLE_S,
        limits: EngineLimits | None = None,
    ) -> None:
        """`replicas`: endpoints as gateways know them, ``host:port``; `path`: the folder as they
        see it. `grace_s`: how long a version outlives its last name, and how long a gateway that
        is not heard any more is taken to use what it used. `limits` are the engine's."""
        self._folders = folders
        self._tier = tier
        self._notices = notices
        self._replicas = tuple(sorted(replicas))
        self._path = path
        self._max_bytes = max_bytes
        self._grace_s = grace_s
        self._settle_s = settle_s
        self._limits = limits or EngineLimits()
        self._id = hashlib.sha256(repr((self._replicas, path)).encode()).hexdigest()[:16]
        self._boot = secrets.token_hex(4)
        self._gateways: Heard[Named] = Heard()
        self._agents: Heard[str] = Heard()
        self._wanted: list[Wanted] = []
        self._position: Position | None = None
        self._unreadable = False
        self._settled = 0.0
        self._away = False
        self._state: Held | None = None
        self._telling = threading.Lock()

    def run(self, ended: threading.Event) -> None:
        """Until `ended` is set. What is on the disk stays, and so does what gateways know of it."""
        waited = False
        while not self._folders.take():
            if not waited:
                _LOG.warning("another agent works on this folder; waiting for its end")
            waited = True
            if ended.wait(_POLL_S):
                return
        keeper = Keeper(
            self._folders, max_bytes=self._max_bytes, grace_s=self._grace_s, limits=self._limits
        )
        self._note(keeper)
        self._settled = time.monotonic() + self._settle_s
        beats = threading.Thread(target=self._beat, args=(ended,), name="peft-beat", daemon=True)
        beats.start()
        _LOG.info("holds %d versions, %d bytes", len(keeper.held), keeper.nbytes)
        while not ended.is_set():
            if not self._step(keeper):
                ended.wait(_POLL_S)
        beats.join()
        self._folders.close()

    def _step(self, keeper: Keeper) -> bool:
        poll_all()
        try:
            self._look()
            base = self._notices.base()
            if self._away:
                _LOG.info("Redis answers")
                self._away = False
        except StoreError as error:
            if not self._away:
                _LOG.warning("the disk stays as it is: %s", error)
                self._away = True
            self._settled = time.monotonic() + self._settle_s
            return False
        # A name that cannot be read, a newer release's perhaps, may be that of any version.
        sure = not self._unreadable and time.monotonic() >= self._settled
        try:
            acted = keeper.act(self._wanted, self._fetch, base, self._unused if sure else None)
        except OSError as error:
            _LOG.error("the folder fails: %s", error)
            return False
        if self._state is None or self._state.revision != keeper.revision:
            self._note(keeper)
            self._tell()
        return acted

    def _look(self) -> None:
        """What names there are, and what gateways use."""
        position = self._tier.position()
        if position != self._position:
            position, stored = self._tier.records()
            if self._position is not None and position[0] != self._position[0]:
                self._settled = time.monotonic() + self._settle_s
            records = [each.record for each in stored.values() if each.record is not None]
            self._unreadable = len(records) < len(stored)
            if position[0] is None:
                # Nothing at all is a Redis that has lost it, or one that nobody has used yet.
                self._unreadable = True
            else:
                self._wanted = wanted_of(records)
            self._position = position
        self._gateways.take(self._notices.named())
        for gateway in self._gateways.drop(self._grace_s):
            self._notices.forget_gateway(gateway)

    def _unused(self, digest: str, revision: int) -> bool:
        """Whether every gateway knows that it was withdrawn, and has nothing running with it."""
        for named in self._gateways.recent().values():
            boot, seen = named.seen.get(self._id, ("", 0))
            if boot != self._boot or seen < revision:
                return False
            if named.in_use.get(digest, frozenset()) & set(self._replicas):
                return False
        return True

    def _fetch(self, digest: str) -> Converted:
        chunks = self._tier.fetch(digest)
        try:
            if chunks is not None:
                return decode(b"".join(chunks), digest)
        except CorruptBlob as error:
            _LOG.error("copy of %s in Redis deleted: %s", digest[:12], error)
            self._tier.delete(digest)
        self._tier.want(digest)
        raise StoreError("it is not in Redis; gateways were asked for it")

    def _note(self, keeper: Keeper) -> None:
        self._state = Held(
            boot=self._boot,
            revision=keeper.revision,
            replicas=self._replicas,
            path=self._path,
            holds=keeper.held,
            refused=dict(keeper.refused),
            lacks=keeper.lacks,
        )

    def _tell(self) -> None:
        with self._telling:
            if self._state is None:
                return
            try:
                self._notices.tell_held(self._id, self._state, secrets.token_hex(4))
            except StoreError as error:
                _LOG.debug("gateways are told later: %s", error)

    def _beat(self, ended: threading.Event) -> None:
        """Apart from the work: a large version may take longer than gateways wait for a word."""
        while True:
            self._tell()
            self._forget_others()
            if ended.wait(BEAT_S):
                return

    def _forget_others(self) -> None:
        """Takes away what agents left in Redis that have told nothing for an hour."""
        try:
            beats: Mapping[str, str] = self._notices.beats()
            self._agents.take(beats)
            for agent in self._agents.drop(_FORGET_S):
                self._notices.forget_agent(agent)
        except StoreError:
            return
