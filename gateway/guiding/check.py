"""Compiles each guide once before an engine is given it.

An engine compiles guides inside a step, and one that it cannot compile ends the requests of all.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict

from gateway.errors import InvalidRequest, UnsupportedParameter
from gateway.generation import Guide, Options
from gateway.guiding.process import GuideProcess
from gateway.tokenization.turns import TurnThread
from guides.kinds import MAX_CHARS, Backend

# Characters of guides that may wait, of all tenants and of one.
_WAITING, _WAITING_OF_ONE = 16 * 2**20, 4 * 2**20
# A verdict is some 200 bytes.
_KEPT = 4096
# So many parts of a guide are looked at for the one that is wrong: each takes a turn.
_PARTS = 8
_UNKNOWN = ""  # no guide is refused without a reason


class GuideCheck:
    """Tenants take turns, one guide at a time; verdicts are kept. Belongs to one event loop."""

    def __init__(self) -> None:
        self._process = GuideProcess()
        self._turns = TurnThread("guides", _WAITING, _WAITING_OF_ONE, waits_to_be="compiled")
        self._refusals: OrderedDict[bytes, str | None] = OrderedDict()

    async def check(self, options: Options, backend: Backend) -> None:
        """Raises InvalidRequest, which names the parameter, for a guide that is none, and
        UnsupportedParameter for a tenant that may not use any.

        Overloaded when too much waits already. Cancelled before its turn, it is not compiled.
        """
        guide, param = options.params.guide, options.guide_param
        caller = options.caller
        if guide is None or caller.guides == "unchecked":
            return
        if caller.guides == "none":
            raise UnsupportedParameter(
                f"{param}: this key may not use guided decoding.", param=param
            )
        refusal = await self._refusal(guide, backend, caller.tenant)
        if refusal is None:
            return
        # A guide of several is made of each one's own; the first that is wrong is named.
        parts = () if len(guide.text) > MAX_CHARS else options.guide_parts()
        for part, name in parts[:_PARTS]:
            if (alone := await self._refusal(part, backend, caller.tenant)) is not None:
                refusal, param = alone, name
                break
        else:
            if len(parts) > _PARTS:
                param = "tools"
        raise InvalidRequest(f"{param}: cannot be enforced: {refusal}.", param=param)

    def close(self) -> None:
        self._turns.close()
        self._process.close()

    async def _refusal(self, guide: Guide, backend: Backend, tenant: str) -> str | None:
        if len(guide.text) > MAX_CHARS:
            return f"it has {len(guide.text)} characters; allowed: {MAX_CHARS}"
        text = guide.text.encode()
        key = hashlib.sha256(f"{backend} {guide.type} ".encode() + text).digest()
        known = self._refusals.get(key, _UNKNOWN)
        if known is not _UNKNOWN:
            self._refusals.move_to_end(key)
            return known

        loop = asyncio.get_running_loop()

        def compiled() -> str | None:
            # Another's request may have brought the same one in the meantime.
            known = self._refusals.get(key, _UNKNOWN)
            if known is not _UNKNOWN:
                return known
            refusal = self._process.refusal(guide, backend)
            # Before the next turn begins, and even if the client has left.
            loop.call_soon_threadsafe(self._keep, key, refusal)
            return refusal

        return await self._turns.run(tenant, len(text), compiled)

    def _keep(self, key: bytes, refusal: str | None) -> None:
        self._refusals[key] = refusal
        while len(self._refusals) > _KEPT:
            self._refusals.popitem(last=False)
