"""Compilation of each guide by the gateway before an engine receives it.

An engine compiles guides within a step. A guide that the engine cannot compile fails all requests
of that step.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from dataclasses import replace

from gateway.errors import InvalidRequest, UnsupportedParameter
from gateway.generation.options import Guide, Options, Unenforced
from gateway.guiding.process import GuideProcess
from gateway.tokenization.threads import FairThread
from guides.kinds import MAX_CHARS, Backend, Verdict

# Limits of the characters in queued guides, of all tenants together and of one tenant.
_MAX_WAITING_CHARS, _MAX_TENANT_WAITING_CHARS = 16 * 2**20, 4 * 2**20
# Limits of the cache: number of verdicts, and characters in their texts. A verdict takes about 200
# bytes, and more for the text of a rewritten schema.
_MAX_VERDICTS, _MAX_VERDICT_CHARS = 4096, 16 * 2**20
# Maximum number of parts of a refused guide that are compiled to find the invalid one. Each is
# queued separately.
_MAX_PARTS = 8


class GuideCheck:
    """Checker of guides with cached verdicts.

    One guide is compiled at a time, with fair scheduling of tenants. The object must be used on one
    event loop. With `strict`, schema keywords that cannot be enforced are refused even in
    best-effort schemas. `release` is the release of xgrammar in the engines; empty for any release
    since 0.1.25.
    """

    def __init__(self, *, strict: bool = False, release: str = "") -> None:
        self._strict = strict
        self._process = GuideProcess(release)
        self._turns = FairThread(
            "guides", _MAX_WAITING_CHARS, _MAX_TENANT_WAITING_CHARS, waits_to_be="compiled"
        )
        self._verdicts: OrderedDict[bytes, Verdict] = OrderedDict()
        self._cached_chars = 0

    async def check(self, options: Options, backend: Backend) -> Options:
        """Check the guide of a request. Return the options with the guide in the form for the
        engine.

        If the caller is cancelled while the guide is queued, the guide is not compiled.

        Raises:
            InvalidRequest: The guide is invalid; the error names the parameter.
            UnsupportedParameter: The tenant may not use guides.
            Overloaded: Too many guides are queued.
        """
        guide, param = options.params.guide, options.guide_param
        caller = options.caller
        if guide is None:
            return options
        if caller.guides == "unchecked":
            # Use the looser guide, because a guide that was not checked may fail all requests of
            # the engine.
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
        # The guide may be combined from several parameters of the client: find the first invalid
        # part, for the message.
        parts = () if len(guide.text) > MAX_CHARS else options.guide_parts()
        for part, name in parts[:_MAX_PARTS]:
            alone = await self._verdict(part, backend, caller.tenant)
            if alone.refusal is not None:
                refusal, param = alone.refusal, name
                break
        else:
            # No part is invalid alone. If the first part is the guide's own parameter, the others
            # are tools, so name the tools.
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
            # Look again: the same guide may have been compiled for another request while this one
            # was queued.
            if (known := self._verdicts.get(key)) is not None:
                return known
            found = self._process.verdict(guide, backend)
            # Do not store the client's text again: "" stands for an unchanged text.
            if found.text == guide.text:
                found = found._replace(text="")
            # Cache the verdict from here, before the next guide is compiled, so that it is cached
            # even if the client has disconnected.
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
    """Return the keywords that are not enforced, with their paths in the client's request."""
    names = []
    for path in verdict.left_out:
        prefix, name = next(
            (prefix, name)
            for prefix, name in reversed(guide.best_effort)
            if path.startswith((f"{prefix}.", f"{prefix}["))
        )
        names.append(f"{name}{path[len(prefix) :]}")
    return Unenforced(tuple(names), verdict.left_out_more)
