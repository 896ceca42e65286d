"""Keys of rank_pattern: matched like PEFT does, in a time bounded by their size."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from adapters.patterns import MAX_PATTERN, ModulePattern, NotAllowed
from tests.support.cpu import costs_less_than

PATHS = [
    f"model.layers.{layer}.{name}"
    for layer in (0, 1, 12, 123)
    for name in (
        "self_attn.q_proj",
        "self_attn.k_proj",
        "mlp.down_proj",
        "block_sparse_moe.experts.7.w1",
    )
]


def _peft(key: str, path: str) -> bool:
    """Return PEFT's result: `get_pattern_key` of peft/utils/other.py, 0.21."""
    return re.match(rf"(.*\.)?({key})$", path) is not None


@pytest.mark.parametrize(
    "key",
    [
        "q_proj",
        "proj",
        "self_attn.q_proj",
        "model.layers.0.self_attn.q_proj",
        "^model.layers.1.mlp.down_proj",
        r"self_attn\.(q|k)_proj",
        r"layers\.1\..*",
        r".*\.(0|12)\..*_proj",
        r"model\.layers\.\d+\.mlp\.down_proj",
        r"layers\.[0-9]{2}\.self_attn\.[qkv]_proj",
        r"model\.layers\.(?:[1-9]|1[0-9])\.\w+\.q_proj",
        r"experts\.\d+?\.w[13]",
        r"\bw1",
        r"(x|q)_proj)|(model.*w1",  # PEFT puts it in parentheses unchanged
        "",
    ],
)
def test_real_keys_mean_what_peft_means(key: str) -> None:
    pattern = ModulePattern.compile(key)
    assert [pattern.matches(path) for path in PATHS] == [_peft(key, path) for path in PATHS]
    assert any(_peft(key, path) for path in PATHS) == (key not in ("proj", ""))


PIECES = [
    *["model", "layers", "self_attn", "q_proj", "w1", "1", "12", "_", ".", r"\.", r"\d", r"\w"],
    *["[a-z_]", "[^a-z]", "[0-9]", r"[\d.]", "*", "+", "?", "*?", "{2}", "{1,3}", "{0,}", "|"],
    *["(", "(?:", ")", "^", "$", r"\b", "-", r"\-", r"[\-a]"],
]


@given(st.lists(st.sampled_from(PIECES), max_size=12).map("".join))
@example(r".*\.1.\.")
@example("a*+")
def test_any_key_of_the_language_means_what_peft_means(key: str) -> None:
    try:
        pattern = ModulePattern.compile(key)
    except NotAllowed:
        return
    except ValueError:
        with pytest.raises(re.error):
            re.compile(rf"(.*\.)?({key})$")
        return
    assert [pattern.matches(path) for path in PATHS] == [_peft(key, path) for path in PATHS]


@given(st.text(max_size=12))
def test_any_text_is_refused_or_means_what_peft_means(key: str) -> None:
    try:
        pattern = ModulePattern.compile(key)
    except ValueError:
        return
    assert [pattern.matches(path) for path in PATHS] == [_peft(key, path) for path in PATHS]


@pytest.mark.parametrize(
    "key",
    [
        "(?x:([^!]+) +)!",
        "(?i)q_proj",
        "(?=q)q_proj",
        "(?<!x)q_proj",
        r"(q)_\1",
        "(?P<n>q)(?P=n)",
        "(?#comment)q",
        "(?>q)_proj",
        "q*+",
        "q++",
        "[[:alpha:]]",
        "[a--b]",
        "[a&&b]",
        r"\p{L}",
        r"\Aq",
        r"\x71",
        "q{1000}",
        "(q{99}){99}",
        "q proj",
        "é",
        "q" * (MAX_PATTERN + 1),
    ],
)
def test_what_other_engines_read_otherwise_is_refused(key: str) -> None:
    with pytest.raises(NotAllowed):
        ModulePattern.compile(key)


HOSTILE = [
    "(a*)*b",
    "(.|.)*x",
    "(.*.*.*)*x",
    r"(\w|\w\w|[a-z_.]+)*x",
    "(.*_)*" * 42,
    "(?:.?)*" * 36,
    ".*l" + "(.|[a-z])" * 27,
    r"\w*" * 85,
    "([a-z]{99}[a-z_.]{99})*x",
    "(" * 128 + ")" * 128,
]


@pytest.mark.parametrize("key", HOSTILE)
def test_hostile_keys_cost_what_their_size_deserves(key: str) -> None:
    with costs_less_than(1.0):
        pattern = ModulePattern.compile(key)
        for layer in range(100):
            pattern.matches(f"model.layers.{layer}.self_attn.q_proj")
            pattern.matches(f"model.layers.{layer}.block_sparse_moe.experts.123456.w1")
