"""Agent process that copies adapter versions from Redis to the disk of a Triton server's machine.

Some engines read adapters from the disk of their machine. The agent writes the adapters to this
disk, and reports through Redis which adapters the disk has. Gateways read the reports before they
use the adapters.

The agent connects only to Redis, and reads the adapters and the dimensions of the base model from
Redis. Requests of clients do not influence the agent. While Redis is down, the agent leaves the
disk unchanged, and engines still read adapters from the disk. If Redis loses its data, gateways
store the data again. Until then, the agent removes nothing.

See decision 030 in docs/decisions.
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
from lora_store.peft_keeper import EngineLimits, PeftDiskManager, WantedVersion, list_wanted
from lora_store.peft_notices import AgentState, GatewayState, Heartbeats, PeftNotices
from lora_store.redis import Position, RedisTier

_LOG = logging.getLogger(__name__)

BEAT_S = 2.0
_POLL_INTERVAL_S = 0.5
# Seconds after the agent's start, and after an outage or data loss of Redis, in which the agent
# removes nothing. Gateways store their reports and records in Redis again during this time.
_SETTLE_S = 30.0
_FORGET_S = 3600.0


class Agent:
    """Agent that stores and removes the adapter versions in one folder.

    `run` blocks until the agent is stopped. If another agent process already uses the folder, `run`
    first waits until the other process has ended.
    """

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
        """Prepare to work on a folder.

        Args:
            folders: the folder.
            tier: the adapter versions and records in Redis.
            notices: the reports of agents and gateways in Redis.
            replicas: endpoints (``host:port``) of the Tritons that read the folder, exactly as in
                the gateways' configuration.
            path: path of the folder in the replicas' file system.
            max_bytes: maximum size of the folder in bytes.
            grace_s: two times in seconds. A version stays on the disk for this time after the last
                record has stopped listing it. A gateway without reports for this time is ignored.
            settle_s: seconds in which nothing is removed, after a start or an outage of Redis.
            limits: largest rank and LoRA modules that the engine supports; None if unknown.
        """
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
        self._gateways: Heartbeats[GatewayState] = Heartbeats()
        self._agents: Heartbeats[str] = Heartbeats()
        self._wanted: list[WantedVersion] = []
        self._position: Position | None = None
        self._unreadable = False
        self._settled_at = 0.0
        self._is_redis_down = False
        self._state: AgentState | None = None
        self._publish_lock = threading.Lock()

    def run(self, ended: threading.Event) -> None:
        """Run until `ended` is set. Leave the files on the disk, because engines may use them."""
        waited = False
        while not self._folders.take():
            if not waited:
                _LOG.warning("another agent works on this folder; waiting for its end")
            waited = True
            if ended.wait(_POLL_INTERVAL_S):
                return
        keeper = PeftDiskManager(
            self._folders, max_bytes=self._max_bytes, grace_s=self._grace_s, limits=self._limits
        )
        self._update_state(keeper)
        self._settled_at = time.monotonic() + self._settle_s
        beats = threading.Thread(target=self._beat, args=(ended,), name="peft-beat", daemon=True)
        beats.start()
        _LOG.info("holds %d versions, %d bytes", len(keeper.available), keeper.nbytes)
        while not ended.is_set():
            if not self._step(keeper):
                ended.wait(_POLL_INTERVAL_S)
        beats.join()
        self._folders.close()

    def _step(self, keeper: PeftDiskManager) -> bool:
        poll_all()
        try:
            self._poll()
            base = self._notices.read_base()
            if self._is_redis_down:
                _LOG.info("Redis answers")
                self._is_redis_down = False
        except StoreError as error:
            if not self._is_redis_down:
                _LOG.warning("the disk stays as it is: %s", error)
                self._is_redis_down = True
            self._settled_at = time.monotonic() + self._settle_s
            return False
        # Remove nothing while a record is unreadable: a newer release may have written it, and it
        # may refer to any version.
        sure = not self._unreadable and time.monotonic() >= self._settled_at
        try:
            acted = keeper.act(self._wanted, self._fetch, base, self._is_unused if sure else None)
        except OSError as error:
            _LOG.error("the folder fails: %s", error)
            return False
        if self._state is None or self._state.revision != keeper.revision:
            self._update_state(keeper)
            self._publish()
        return acted

    def _poll(self) -> None:
        """Read the adapter records and the gateways' reports from Redis."""
        position = self._tier.position()
        if position != self._position:
            position, stored = self._tier.records()
            if self._position is not None and position[0] != self._position[0]:
                self._settled_at = time.monotonic() + self._settle_s
            records = [each.record for each in stored.values() if each.record is not None]
            self._unreadable = len(records) < len(stored)
            if position[0] is None:
                # Redis has no records: it has lost its data or was never used. Do not conclude that
                # all adapters were removed, so remove nothing.
                self._unreadable = True
            else:
                self._wanted = list_wanted(records)
            self._position = position
        self._gateways.update(self._notices.read_gateway_states())
        for gateway in self._gateways.drop(self._grace_s):
            self._notices.forget_gateway(gateway)

    def _is_unused(self, digest: str, revision: int) -> bool:
        """Return True if no gateway can use a version on this agent's replicas any longer.

        The agent has sent a report with the number `revision`, in which the version is no longer
        available. A gateway that has read this report starts no more requests with the version. The
        result is True if each gateway has read the report, and reports that no request on these
        replicas uses the version.
        """
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

    def _update_state(self, keeper: PeftDiskManager) -> None:
        self._state = AgentState(
            boot=self._boot,
            revision=keeper.revision,
            replicas=self._replicas,
            path=self._path,
            holds=keeper.available,
            refused=dict(keeper.refused),
            lacks=keeper.lacks,
        )

    def _publish(self) -> None:
        with self._publish_lock:
            if self._state is None:
                return
            try:
                self._notices.put_agent_state(self._id, self._state, secrets.token_hex(4))
            except StoreError as error:
                _LOG.debug("gateways learn of it later: %s", error)

    def _beat(self, ended: threading.Event) -> None:
        """Publish the agent's report in Redis every `BEAT_S` seconds.

        Gateways ignore an agent that sends no reports for some time. Writing a version to the disk
        may take longer than this time, so the reports are sent from a separate thread.
        """
        while True:
            self._publish()
            self._forget_others()
            if ended.wait(BEAT_S):
                return

    def _forget_others(self) -> None:
        """Remove from Redis the reports of agents that have sent no new report for an hour."""
        try:
            beats: Mapping[str, str] = self._notices.read_beats()
            self._agents.update(beats)
            for agent in self._agents.drop(_FORGET_S):
                self._notices.forget_agent(agent)
        except StoreError:
            return
