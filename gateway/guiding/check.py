"""Check of guides before they are sent to an engine.

A guide is a JSON schema, regular expression or grammar for guided decoding. An engine compiles a
guide during an engine step, together with the guides of other requests. If one guide cannot be
compiled, all requests of this step fail. The gateway therefore compiles each guide first, and
refuses invalid guides.
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

# Maximum number of characters of all guides that wait to be compiled. The first limit is for all
# tenants together, and the second limit is for one tenant.
_MAX_WAITING_CHARS, _MAX_TENANT_WAITING_CHARS = 16 * 2**20, 4 * 2**20
# Maximum number of a tenant's guides that wait to be compiled. A guide takes at most a few seconds,
# and each of the waiting requests holds a connection.
_MAX_TENANT_WAITING = 128
# Limits of the cache of `Verdict` objects: the number of entries, and the number of characters in
# their texts. An entry takes about 200 bytes, plus the text of a rewritten schema.
_MAX_VERDICTS, _MAX_VERDICT_CHARS = 4096, 16 * 2**20
# A guide may be combined from the guides of several request parameters (parts). If such a guide is
# refused, its parts are compiled one by one to find the invalid part, up to this number of parts.
_MAX_PARTS = 8


class GuideCheck:
    """Checker of guides (schemas, regular expressions and grammars), with a cache of the results.

    Guides are compiled one at a time, in round-robin order of the tenants. Not thread-safe: use an
    instance in one event loop only.

    Args:
        strict: True to refuse any schema keyword that cannot be enforced. False to drop such
            keywords where `Guide.best_effort` allows it.
        release: the engines' release of xgrammar; "" for any release from 0.1.25 to 0.1.33.
    """

    def __init__(self, *, strict: bool = False, release: str = "") -> None:
        self._strict = strict
        self._process = GuideProcess(release)
        self._turns = FairThread(
            "guides",
            _MAX_WAITING_CHARS,
            _MAX_TENANT_WAITING_CHARS,
            _MAX_TENANT_WAITING,
            waits_to_be="compiled",
        )
        self._verdicts: OrderedDict[bytes, Verdict] = OrderedDict()
        self._cached_chars = 0

    async def check(self, options: Options, backend: Backend) -> Options:
        """Check the guide of a request. Return the options with the guide to send to the engine.

        The returned guide may lack keywords of the client's guide that cannot be enforced. If the
        task is cancelled while the guide is queued, the guide is not compiled.

        Raises:
            InvalidRequest: the guide is invalid; the error names the parameter.
            UnsupportedParameter: the tenant may not use guides.
            Overloaded: too many guides are queued.
        """
        guide, param = options.params.guide, options.guide_param
        caller = options.caller
        if guide is None:
            return options
        if caller.guides == "unchecked":
            # Use the less strict guide if there is one, because it is more likely to compile. If an
            # unchecked guide fails in the engine, all requests of the engine step fail.
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
        # The guide may be combined from several request parameters. Find the first invalid part, to
        # name its parameter in the message.
        parts = () if len(guide.text) > MAX_CHARS else options.guide_parts()
        for part, name in parts[:_MAX_PARTS]:
            alone = await self._verdict(part, backend, caller.tenant)
            if alone.refusal is not None:
                refusal, param = alone.refusal, name
                break
        else:
            # Each compiled part is valid alone. Name `tools` in the message if some parts were not
            # compiled, because there are too many. Also name `tools` if there are parts for both
            # `param` and tools: these parts are invalid only in combination.
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
            # Check the cache again: the same guide may have been compiled for another request while
            # this request was queued.
            if (known := self._verdicts.get(key)) is not None:
                return known
            found = self._process.verdict(guide, backend)
            # Save memory: store "" instead of a text that equals the client's text.
            if found.text == guide.text:
                found = found._replace(text="")
            # Schedule the caching here, in the worker thread. The awaiting coroutine is cancelled
            # if the client disconnects, and could not store the result then.
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
    """Return the schema keywords that are not enforced, with their path in the client's request."""
    names = []
    for path in verdict.left_out:
        prefix, name = next(
            (prefix, name)
            for prefix, name in reversed(guide.best_effort)
            if path.startswith((f"{prefix}.", f"{prefix}["))
        )
        names.append(f"{name}{path[len(prefix) :]}")
    return Unenforced(tuple(names), verdict.left_out_more)
