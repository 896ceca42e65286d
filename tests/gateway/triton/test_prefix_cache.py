"""`PrefixCache`, the gateway's estimate of the prompt prefixes in an engine's KV cache."""

from __future__ import annotations

import random
import tracemalloc
from array import array
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.generation.engine_request import Generation, TextPrompt
from gateway.generation.lora import Lora
from gateway.generation.options import GenerationParams
from gateway.triton.prefix_cache import PrefixCache, PromptPrefixes, hash_prefixes

BLOCK = 32
ONE, OTHER = "one", "other"


def _ids(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(128_000), k=length)


def _generation(ids: list[int]) -> Generation:
    return Generation(request_id="r", prompt_ids=array("i", ids), max_tokens=1, seed=1)


def _prefixes(ids: list[int], tenant: str = "") -> PromptPrefixes:
    return hash_prefixes(_generation(ids), tenant)


def _serve(cache: PrefixCache, prefixes: PromptPrefixes, reused: int | None = None) -> float:
    """Send a request and record its answer. Return the number of tokens expected in the cache."""
    expected = cache.record_sent(prefixes)
    cache.record_answer(prefixes, expected, reused)
    return expected.tokens


@given(st.integers(0, 6000), st.integers(0, 6000), st.integers(0, 6000))
def test_what_a_prompt_has_in_common_with_another_is_known(common: int, one: int, two: int) -> None:
    """The estimate is too low by at most a block and a seventh, and not too high."""
    cache = PrefixCache()
    beginning = _ids(common)
    cache.record_sent(_prefixes(beginning + _ids(one, 1)))
    found = cache.cached_tokens(_prefixes(beginning + _ids(two, 2)))
    # Two random continuations have at most two tokens in common.
    assert found <= common + min(one, two, 2)
    assert found >= min(common, common + two - 1) * 6 / 7 - BLOCK


def test_the_last_token_is_computed_in_any_case() -> None:
    cache = PrefixCache()
    whole = _ids(2 * BLOCK)
    cache.record_sent(_prefixes(whole))
    assert cache.cached_tokens(_prefixes(whole)) == BLOCK
    assert cache.cached_tokens(_prefixes([*whole, 1])) == BLOCK
    cache.record_sent(_prefixes([*whole, 1]))
    assert cache.cached_tokens(_prefixes([*whole, 2])) == 2 * BLOCK


def test_an_adapters_keys_and_values_are_its_own() -> None:
    async def weights() -> object:
        raise AssertionError

    def of(task_id: int | None) -> PromptPrefixes:
        lora = None if task_id is None else Lora("a", task_id, 1, weights)  # type: ignore[arg-type]
        params = GenerationParams(lora=lora)
        return hash_prefixes(replace(_generation(_ids(200)), params=params))

    cache = PrefixCache()
    cache.record_sent(of(7))
    assert cache.cached_tokens(of(7)) == 192
    assert cache.cached_tokens(of(8)) == cache.cached_tokens(of(None)) == 0


def test_texts_are_known_by_about_as_many_tokens() -> None:
    def of(text: str, tokens: int) -> PromptPrefixes:
        return hash_prefixes(replace(_generation(_ids(tokens)), text=TextPrompt(text)))

    cache = PrefixCache()
    cache.record_sent(of("word " * 400, 400))
    assert 0.8 * 400 < cache.cached_tokens(of("word " * 400 + "more", 401)) < 400
    assert cache.cached_tokens(of("Word " * 400, 400)) == 0


def test_what_an_answer_shows_to_be_gone_takes_what_is_older_with_it() -> None:
    cache = PrefixCache()
    old, middle, new = (_prefixes(_ids(1000, seed)) for seed in range(3))
    for prefixes in (old, middle, new):
        assert _serve(cache, prefixes, 0) == 0
    known = cache.cached_tokens(new)
    assert known > 800
    # as expected, so the estimate does not change
    assert _serve(cache, middle, int(known)) == known
    assert cache.cached_tokens(old) == known
    assert _serve(cache, new, 0) == known
    assert cache.cached_tokens(old) == 0
    # `middle` was used after the lost prefix, and `new` was computed again.
    assert cache.cached_tokens(middle) == cache.cached_tokens(new) == known


@pytest.mark.parametrize("reused", [None, 700])
def test_nothing_is_learned_of_what_is_not_told_or_nearly_true(reused: int | None) -> None:
    cache = PrefixCache()
    old, new = _prefixes(_ids(1000, 1)), _prefixes(_ids(1000, 2))
    _serve(cache, old)
    _serve(cache, new)
    _serve(cache, new, reused)
    assert cache.cached_tokens(old) > 800


def test_two_requests_at_once_show_nothing_to_be_gone() -> None:
    """A second request at the same time finds nothing cached, which shows no loss.

    The engine still computes the first request.
    """
    cache = PrefixCache()
    old, new = _prefixes(_ids(1000, 1)), _prefixes(_ids(1000, 2))
    _serve(cache, old)
    first, second = cache.record_sent(new), cache.record_sent(new)
    assert second.tokens > 800
    cache.record_answer(new, first, 0)
    cache.record_answer(new, second, 0)
    assert cache.cached_tokens(old) > 800


def test_tenants_learn_nothing_of_each_other() -> None:
    cache = PrefixCache()
    ids, more = _ids(1000), _ids(1000, 1)
    _serve(cache, _prefixes(ids, ONE))
    assert cache.cached_tokens(_prefixes(ids, OTHER)) == 0
    _serve(cache, _prefixes(more, OTHER))
    assert _serve(cache, _prefixes(more, OTHER), 0) > 800
    assert cache.cached_tokens(_prefixes(ids, ONE)) > 800


def test_a_flood_takes_of_others_what_is_beyond_their_share() -> None:
    most = 3000
    cache = PrefixCache(most)
    whales = [_prefixes(_ids(1000, seed), "whale") for seed in range(150)]
    small = [_prefixes(_ids(1000, seed), "small") for seed in range(200, 210)]
    for prefixes in whales + small:
        _serve(cache, prefixes)
    for seed in range(1000, 1500):
        _serve(cache, _prefixes(_ids(1000, seed), "flood"))
        assert len(cache) <= most
    assert [cache.cached_tokens(prefixes) > 800 for prefixes in small] == [True] * len(small)
    kept = [cache.cached_tokens(prefixes) > 800 for prefixes in whales]
    # The flood gets a third of the space: first the free space, then that of the largest tenant.
    assert 80 < sum(kept) < 150
    assert kept == sorted(kept), "those that were used longest ago go first"


def test_the_end_of_a_prompt_goes_before_its_beginning() -> None:
    cache = PrefixCache(20)
    old, new = _prefixes(_ids(700, 1)), _prefixes(_ids(700, 2))
    _serve(cache, old)
    whole = cache.cached_tokens(old)
    _serve(cache, new)
    assert 0 < cache.cached_tokens(old) < cache.cached_tokens(new) == whole


def test_many_tenants_have_room_and_no_more_than_there_is() -> None:
    cache = PrefixCache(100)
    for number in range(500):
        _serve(cache, _prefixes(_ids(40, number), str(number)))
        assert len(cache) <= 100
        assert cache.cached_tokens(_prefixes(_ids(40, number), str(number))) == BLOCK


def test_what_is_kept_takes_no_more_than_is_said_at_the_most() -> None:
    prompts = [_prefixes(_ids(400, seed), str(seed % 20)) for seed in range(2500)]
    tracemalloc.start()
    cache, most = PrefixCache(), 0
    for prefixes in prompts:
        # make integers that no other object shares, to measure their memory
        prefixes.hashes = [int(str(value)) for value in prefixes.hashes]
        _serve(cache, prefixes)
        prefixes.hashes = []
        most = max(most, tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    assert len(cache) > 14_000
    assert most < 2.5 * 2**20


def test_a_new_engine_has_nothing() -> None:
    cache = PrefixCache()
    prefixes = _prefixes(_ids(100))
    expected = cache.record_sent(prefixes)
    cache.forget()
    assert (len(cache), cache.cached_tokens(prefixes)) == (0, 0)
    cache.record_answer(prefixes, expected, 0)  # an answer of the previous engine
    assert cache.cached_tokens(prefixes) == 0
    _serve(cache, prefixes)
    assert cache.cached_tokens(prefixes) == 96
