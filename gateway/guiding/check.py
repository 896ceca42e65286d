"""Compiles each guide once before an engine is given it.

An engine compiles guides inside a step, and one that it cannot compile ends the requests of all.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from dataclasses import replace

from gateway.errors import InvalidRequest, UnsupportedParameter
from gateway.generation import Guide, Options, Unenforced
from gateway.guiding.process import GuideProcess
from gateway.tokenization.turns import TurnThread
from guides.kinds import MAX_CHARS, Backend, Verdict

# Characters of guides that may wait, of all tenants and of one.
_MAX_WAITING_CHARS, _MAX_TENANT_WAITING_CHARS = 16 * 2**20, 4 * 2**20
# A verdict is some 200 bytes, and the text of a schema that was written anew.
_MAX_VERDICTS, _MAX_VERDICT_CHARS = 4096, 16 * 2**20
# So many parts of a guide are looked at for the one that is wrong: each takes a turn.
_MAX_PARTS = 8


class GuideCheck:
    """Tenants take turns, one guide at a time; verdicts are kept. Belongs to one event loop.

    `strict` refuses what cannot be enforced of schemas that are best effort. `release` is that of
    the engines' xgrammar; empty if it may be any since 0.1.25.
    """

    def __init__(self, *, strict: bool = False, release: str = "") -> None:
        self._strict = strict
        self._process = GuideProcess(release)
        self._turns = TurnThread(
            "guides", _MAX_WAITING_CHARS, _MAX_TENANT_WAITING_CHARS, waits_to_be="compiled"
        )
        self._verdicts: OrderedDict[bytes, Verdict] = OrderedDict()
        self._cached_chars = 0

    async def check(self, options: Options, backend: Backend) -> Options:
        """The options, with the guide as the engine is to be given it.

        Raises InvalidRequest, which names the parameter, for a guide that is none, and
        UnsupportedParameter for a tenant that may not use any.

        Overloaded when too much waits already. Cancelled before its turn, it is not compiled.
        """
        guide, param = options.params.guide, options.guide_param
        caller = options.caller
        if guide is None:
            return options
        if caller.guides == "unchecked":
            # An engine may end all its requests over what nobody was promised.
            params = replace(options.params, guide=options.looser_guide or guide)
            return replace(options, params=params) if options.looser_guide else options
        if caller.guides == "none":
            raise UnsupportedParameter(
                f"{param}: this key may not use guided decoding.", param=param
            )
        found = await self._verdict(guide, backend, caller.tenant)
        if found.refusal is not None and options.looser_guide is not None:
            guide = options.looser_guide
            found = await self._verdict(guide, backend, caller.tenant)
        if found.refusal is None:
            params = replace(options.params, guide=Guide(guide.type, found.text))
            return replace(options, params=params, unenforced=_find_unenforced(found, guide))
        refusal = found.refusal
        # A guide of several is made of each one's own; the first that is wrong is named.
        parts = () if len(guide.text) > MAX_CHARS else options.guide_parts()
        for part, name in parts[:_MAX_PARTS]:
            alone = await self._verdict(part, backend, caller.tenant)
            if alone.refusal is not None:
                refusal, param = alone.refusal, name
                break
        else:
            # Where the first part is what asked for the guide, the others are tools beside it.
            if len(parts) > _MAX_PARTS or (len(parts) > 1 and parts[0][1] == param):
                param = "tools"
        raise InvalidRequest(f"{param}: cannot be enforced: {refusal}.", param=param)

    def close(self) -> None:
        self._turns.close()
        self._process.close()

    async def _verdict(self, guide: Guide, backend: Backend, tenant: str) -> Verdict:
        if len(guide.text) > MAX_CHARS:
            return Verdict(f"it has {len(guide.text)} characters; allowed: {MAX_CHARS}", "")
        text = guide.text.encode()
        if self._strict and guide.best_effort:
            guide = replace(guide, best_effort=())
        paths = ",".join([path for path, _ in guide.best_effort])
        key = hashlib.sha256(f"{backend} {guide.type} {paths} ".encode() + text).digest()
        if (known := self._verdicts.get(key)) is not None:
            self._verdicts.move_to_end(key)
            return self._with_text(guide, known)

        loop = asyncio.get_running_loop()

        def compile_guide() -> Verdict:
            # Another's request may have brought the same one in the meantime.
            if (known := self._verdicts.get(key)) is not None:
                return known
            found = self._process.verdict(guide, backend)
            # What is the client's own text need not be kept.
            if found.text == guide.text:
                found = found._replace(text="")
            # Before the next turn begins, and even if the client has left.
            loop.call_soon_threadsafe(self._cache, key, found)
            return found

        return self._with_text(guide, await self._turns.run(tenant, len(text), compile_guide))

    @staticmethod
    def _with_text(guide: Guide, verdict: Verdict) -> Verdict:
        return verdict if verdict.text else verdict._replace(text=guide.text)

    def _cache(self, key: bytes, verdict: Verdict) -> None:
        if key in self._verdicts:
            return
        self._verdicts[key] = verdict
        self._cached_chars += _count_chars(verdict)
        while len(self._verdicts) > _MAX_VERDICTS or self._cached_chars > _MAX_VERDICT_CHARS:
            _, oldest = self._verdicts.popitem(last=False)
            self._cached_chars -= _count_chars(oldest)


def _count_chars(verdict: Verdict) -> int:
    return len(verdict.text) + sum(map(len, verdict.left_out))


def _find_unenforced(verdict: Verdict, guide: Guide) -> Unenforced:
    """Return the keywords that are not enforced, by the client's names."""
    names = []
    for path in verdict.left_out:
        prefix, name = next(
            (prefix, name)
            for prefix, name in reversed(guide.best_effort)
            if path.startswith((f"{prefix}.", f"{prefix}["))
        )
        names.append(f"{name}{path[len(prefix) :]}")
    return Unenforced(tuple(names), verdict.left_out_more)
