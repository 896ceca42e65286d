"""Guides for guided decoding are compiled once, in a process that a bad guide may kill."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import signal
import termios
import threading
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from gateway.errors import InvalidRequest, Overloaded, UnsupportedParameter
from gateway.generation.options import Caller, GenerationParams, Guide, Options
from gateway.guiding.check import GuideCheck
from guides.kinds import MAX_CHARS
from tests.support.fake_triton import FakeTriton, serving
from tests.support.in_process import running, save_tokenizer
from tests.support.stopped import stop

WITHIN_S = 300.0
_seen: set[int] = set()
"""Process ids of all compilers that have run."""


@pytest.fixture
async def guides() -> AsyncIterator[GuideCheck]:
    guides = GuideCheck()
    yield guides
    guides.close()
    assert _compilers() == []
    assert not _unreaped() & _seen


def _compilers() -> list[psutil.Process]:
    found = []
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):  # the process may have just ended
            if "guides.worker" in child.cmdline():
                found.append(child)
                _seen.add(child.pid)
    return found


def _unreaped() -> set[int]:
    """Return the process ids of children that have ended but were not waited for."""
    found = set()
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):
            if child.status() == psutil.STATUS_ZOMBIE:
                found.add(child.pid)
    return found


async def _compiler() -> psutil.Process:
    deadline = time.monotonic() + WITHIN_S
    while not (found := _compilers()):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)
    return found[0]


def regex(text: str, tenant: str = "a", **more: Any) -> Options:
    caller = Caller(tenant=tenant, **more)
    params = GenerationParams(guide=Guide("regex", text))
    return Options(seed=0, params=params, guide_param="structured_outputs", caller=caller)


async def _stopped() -> psutil.Process:
    """Stop the compiler until it is resumed. Return its process."""
    compiler = await _compiler()
    stop(compiler)
    return compiler


async def _given(compiler: psutil.Process) -> None:
    """Wait until a guide is in the input pipe of a stopped compiler."""
    stdin = os.open(f"/proc/{compiler.pid}/fd/0", os.O_RDONLY | os.O_NONBLOCK)
    try:
        deadline = time.monotonic() + WITHIN_S
        while fcntl.ioctl(stdin, termios.FIONREAD, bytes(4)) == bytes(4):
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)
    finally:
        os.close(stdin)


async def refused(guides: GuideCheck, options: Options) -> str:
    with pytest.raises(InvalidRequest) as raised:
        await guides.check(options, "xgrammar")
    assert raised.value.param == "structured_outputs"
    return raised.value.message


async def test_without_a_guide_there_is_no_process(guides: GuideCheck) -> None:
    await guides.check(Options(seed=0), "xgrammar")
    await guides.check(regex("(", guides="unchecked"), "xgrammar")
    with pytest.raises(UnsupportedParameter, match="this key may not use guided decoding"):
        await guides.check(regex("a", guides="none"), "xgrammar")
    assert _compilers() == []


async def test_each_guide_is_compiled_once(guides: GuideCheck) -> None:
    await guides.check(regex("a+"), "xgrammar")
    said = await refused(guides, regex("("))
    assert said.startswith("structured_outputs: cannot be enforced: ")
    # The compiler is stopped, so only cached results can be returned.
    await _stopped()
    await guides.check(regex("a+", tenant="b"), "xgrammar")
    assert await refused(guides, regex("(", tenant="b")) == said
    new = asyncio.create_task(guides.check(regex("b+"), "xgrammar"))
    done, _ = await asyncio.wait([new], timeout=0.2)
    assert not done
    (await _compiler()).resume()
    await new


def schema(value: Any, **more: Any) -> Options:
    params = GenerationParams(guide=Guide("json_schema", json.dumps(value)))
    return Options(seed=0, params=params, caller=Caller(tenant="a", **more))


async def test_the_engine_is_given_what_it_enforces_of_a_schema(
    guides: GuideCheck, monkeypatch: pytest.MonkeyPatch
) -> None:
    bounds = [{"type": "integer"}, {"minimum": 3}]
    written = Guide("json_schema", '{"type":"integer","minimum":3}')
    for _ in range(2):  # compiled, then from the cache
        found = await guides.check(schema({"allOf": bounds}), "xgrammar")
        assert found.params.guide == written
    given = schema({"allOf": bounds}, guides="unchecked")
    assert await guides.check(given, "xgrammar") is given
    # The cache has a limit on text, so the first guide must be compiled again.
    monkeypatch.setattr("gateway.guiding.check._MAX_VERDICT_CHARS", len(written.text))
    await guides.check(schema({"type": "integer", "title": "y"}), "xgrammar")
    await _stopped()
    again = asyncio.create_task(guides.check(schema({"allOf": bounds}), "xgrammar"))
    done, _ = await asyncio.wait([again], timeout=0.2)
    assert not done
    (await _compiler()).resume()
    assert (await again).params.guide == written


@pytest.mark.parametrize("died", [signal.SIGXCPU, signal.SIGSEGV, signal.SIGABRT])
async def test_a_guide_that_ends_its_compiler_is_refused_for_good(
    guides: GuideCheck, died: signal.Signals
) -> None:
    await guides.check(regex("a"), "xgrammar")
    compiler = await _stopped()
    asked = asyncio.create_task(refused(guides, regex("bad")))
    behind = asyncio.create_task(refused(guides, regex("bad", tenant="b")))
    await _given(compiler)
    compiler.send_signal(died)
    compiler.resume()
    said = await asked
    assert await behind == said  # the same guide gets the same error
    assert "too much time or memory" in said
    await guides.check(regex("good"), "xgrammar")  # compiled by a new process
    assert await refused(guides, regex("bad")) == said


@pytest.mark.parametrize("died", [signal.SIGKILL, signal.SIGTERM])
async def test_a_compiler_that_others_end_says_nothing_of_its_guide(
    guides: GuideCheck, died: signal.Signals
) -> None:
    await guides.check(regex("a"), "xgrammar")
    compiler = await _stopped()
    asked = asyncio.create_task(guides.check(regex("good"), "xgrammar"))
    await _given(compiler)
    compiler.send_signal(died)
    with suppress(psutil.NoSuchProcess):  # SIGKILL ends even a stopped process
        compiler.resume()
    with pytest.raises(Overloaded, match="try again"):
        await asked
    await guides.check(regex("good"), "xgrammar")


async def test_a_compiler_is_told_no_secrets_of_the_gateway(
    guides: GuideCheck, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compiler processes untrusted guides, so its environment must not have secrets."""
    monkeypatch.setenv("GATEWAY_ADMIN_KEY", "a secret")
    await guides.check(regex("a"), "xgrammar")
    assert set((await _compiler()).environ()) <= {"PYTHONPATH", "LC_CTYPE"}


async def test_a_compiler_that_has_grown_large_ends(
    guides: GuideCheck, monkeypatch: pytest.MonkeyPatch
) -> None:
    await guides.check(regex("a"), "xgrammar")
    kept = await _compiler()
    await guides.check(regex("b"), "xgrammar")
    assert await _compiler() == kept
    monkeypatch.setattr("gateway.guiding.process._MAX_BYTES", 1)
    await guides.check(regex("c"), "xgrammar")
    assert _compilers() == []


async def test_tenants_take_turns_and_who_has_left_is_passed_over(guides: GuideCheck) -> None:
    await guides.check(regex("a"), "xgrammar")
    await _stopped()
    ended: list[str] = []

    async def ask(text: str, tenant: str) -> None:
        await guides.check(regex(text, tenant), "xgrammar")
        ended.append(text)

    many = [asyncio.create_task(ask(f"flood{n}", "flood")) for n in range(20)]
    await asyncio.sleep(0)
    one = asyncio.create_task(ask("one", "other"))
    await asyncio.sleep(0)
    left = many.pop(5)
    left.cancel()
    (await _compiler()).resume()
    await asyncio.gather(one, *many)
    assert ended.index("one") <= 2
    assert "flood5" not in ended
    # The cancelled guide was not compiled, so a new request must have it compiled.
    await _stopped()
    late = asyncio.create_task(ask("flood5", "flood"))
    done, _ = await asyncio.wait([late], timeout=0.2)
    assert not done
    (await _compiler()).resume()
    await late


async def test_no_more_than_so_much_waits(guides: GuideCheck) -> None:
    await guides.check(regex("a"), "xgrammar")
    await _stopped()
    large = [
        asyncio.create_task(guides.check(regex(f"{n}" * 100_000), "xgrammar")) for n in range(9)
    ]
    more = [
        asyncio.create_task(guides.check(regex(f"[{n}]" + "x" * 120_000), "xgrammar"))
        for n in range(40)
    ]
    failed = await asyncio.wait_for(_first_failure(more), WITHIN_S)
    assert isinstance(failed, Overloaded)
    assert "compiled" in failed.message
    (await _compiler()).resume()
    results = await asyncio.gather(*large, *more, return_exceptions=True)
    assert {type(result) for result in results} == {InvalidRequest, Overloaded}


async def test_a_request_waits_for_its_guide_no_longer_than_its_timeout(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    free = threading.Event()
    servicer = FakeTriton(tokens=[65], fault=None, step=0)
    async with serving(servicer) as endpoint, running(tmp_path, endpoint) as (client, service, _):
        blocked = asyncio.create_task(service.guides._turns.run("other", 1, free.wait))
        await asyncio.sleep(0)
        body = {"model": "m", "prompt": "x", "structured_outputs": {"regex": "a"}}
        try:
            answer = await client.post(
                "/v1/completions", json=body, headers={"x-request-timeout": "0.05"}
            )
        finally:
            free.set()
            await blocked
        assert answer.status_code == 504
        assert service.guides._turns.waiting_chars == 0
        assert servicer.requests == []


async def _first_failure(tasks: list[asyncio.Task[Options]]) -> BaseException | None:
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    return done.pop().exception()


async def test_a_guide_of_several_names_the_part_that_is_wrong(guides: GuideCheck) -> None:
    bad, good = Guide("json_schema", '{"type": "foo"}'), Guide("json_schema", "{}")
    options = Options(
        seed=0,
        params=GenerationParams(guide=Guide("json_schema", '{"anyOf": [{}, {"type": "foo"}]}')),
        guide_param="tool_choice",
        guide_parts=lambda: [(good, "tools[0]"), (bad, "tools[1]")],
    )
    with pytest.raises(InvalidRequest, match="type: found 'foo'") as raised:
        await guides.check(options, "xgrammar")
    assert raised.value.param == "tools[1]"


async def test_a_looser_guide_does_where_the_first_cannot_be_enforced(guides: GuideCheck) -> None:
    bad, good = Guide("json_schema", '{"type":"foo"}'), Guide("json_schema", '{"type":"null"}')
    options = Options(
        seed=0,
        params=GenerationParams(guide=bad),
        guide_param="response_format",
        looser_guide=good,
    )
    found = await guides.check(options, "xgrammar")
    assert found.params.guide == good
    with pytest.raises(InvalidRequest, match="type: found 'foo'"):
        await guides.check(replace(options, looser_guide=bad), "xgrammar")
    # A first guide that can be enforced is used.
    options = replace(options, params=GenerationParams(guide=good), looser_guide=bad)
    assert (await guides.check(options, "xgrammar")).params.guide == good


@pytest.fixture
def odd() -> Options:
    """Return options with a best-effort schema of 40 properties that cannot be enforced."""
    names = [f"{n}\r\n, é" * 40 for n in range(10, 50)]
    text = json.dumps({"properties": {name: {"uniqueItems": True} for name in names}})
    guide = Guide("json_schema", text, (("$", "response_format.schema"),))
    params = GenerationParams(guide=guide)
    return Options(seed=0, params=params, guide_param="structured_outputs")


async def test_what_is_left_out_is_bounded(guides: GuideCheck, odd: Options) -> None:
    for _ in range(2):  # compiled, then from the cache
        found = (await guides.check(odd, "xgrammar")).unenforced
        assert (len(found.names), found.more) == (16, 24)
        assert all(name.startswith("response_format.schema.properties[") for name in found.names)
        assert sum(map(len, found.names)) < 4096


async def test_a_verdict_is_of_one_degree_of_effort(guides: GuideCheck, odd: Options) -> None:
    await guides.check(odd, "xgrammar")
    guide = odd.params.guide
    assert guide is not None
    strict = replace(odd, params=GenerationParams(guide=replace(guide, best_effort=())))
    assert "uniqueItems is not supported" in await refused(guides, strict)
    always = GuideCheck(strict=True)
    assert "uniqueItems is not supported" in await refused(always, odd)
    always.close()


async def test_what_is_not_checked_is_the_looser_guide(guides: GuideCheck) -> None:
    """An unchecked schema could crash an engine, so a looser guide replaces it if there is one."""
    bad, good = Guide("json_schema", '{"type":"foo"}'), Guide("json_schema", '{"type":"null"}')
    trusted = Caller(guides="unchecked")
    params = GenerationParams(guide=bad)
    options = Options(seed=0, params=params, guide_param="response_format", caller=trusted)
    assert (await guides.check(options, "xgrammar")).params.guide == bad
    options = replace(options, looser_guide=good)
    assert (await guides.check(options, "xgrammar")).params.guide == good


async def test_tools_beside_a_format_are_at_fault_where_each_part_is_fine(
    guides: GuideCheck,
) -> None:
    bad, good = Guide("json_schema", '{"type":"foo"}'), Guide("json_schema", '{"type":"null"}')
    options = Options(
        seed=0,
        params=GenerationParams(guide=bad),
        guide_param="response_format",
        guide_parts=lambda: [(good, "response_format"), (good, "tools[0]")],
    )
    for parts, param in ((options.guide_parts, "tools"), (tuple, "response_format")):
        with pytest.raises(InvalidRequest) as raised:
            await guides.check(replace(options, guide_parts=parts), "xgrammar")
        assert raised.value.param == param


def _of_tools(whole: str, many: int) -> tuple[Options, list[int]]:
    """Return options whose last guide part is wrong, and a list that records reads of the parts."""
    asked: list[int] = []

    def parts() -> list[tuple[Guide, str]]:
        asked.append(many)
        texts = [f'{{"const": {n}}}' for n in range(many - 1)] + ['{"type": "foo"}']
        return [(Guide("json_schema", text), f"tools[{n}]") for n, text in enumerate(texts)]

    guide = Guide("json_schema", whole)
    params = GenerationParams(guide=guide)
    return Options(seed=0, params=params, guide_param="tool_choice", guide_parts=parts), asked


@pytest.mark.parametrize(("many", "named"), [(8, "tools[7]"), (9, "tools")])
async def test_one_request_has_no_more_than_a_few_guides_compiled(
    guides: GuideCheck, many: int, named: str
) -> None:
    options, _ = _of_tools('{"anyOf": [{}, {"type": "foo"}]}', many)
    with pytest.raises(InvalidRequest, match="type: found 'foo'") as raised:
        await guides.check(options, "xgrammar")
    assert raised.value.param == named


async def test_where_all_parts_are_too_long_together_none_is_looked_at(guides: GuideCheck) -> None:
    options, asked = _of_tools('{"const": "' + "x" * MAX_CHARS + '"}', 2)
    with pytest.raises(InvalidRequest, match=f"allowed: {MAX_CHARS}") as raised:
        await guides.check(options, "xgrammar")
    assert raised.value.param == "tool_choice"
    assert not asked
    assert _compilers() == []
