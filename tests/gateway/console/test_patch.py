"""Merge patches: the RFC's own examples, and differences that turn an old value into a new one."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.console.patch import apply_patch, difference
from tests.support.merge_patches import OF_OBJECTS

_leaves = st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=3)
_values = st.recursive(
    _leaves | st.lists(_leaves, max_size=2),
    lambda inner: st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=12,
)
_objects = st.dictionaries(st.sampled_from("abcd"), _values, max_size=4)


@pytest.mark.parametrize(("target", "patch", "result"), OF_OBJECTS)
def test_a_patch_is_applied_as_the_rfc_says(target: Any, patch: Any, result: Any) -> None:
    before = json.dumps(target)
    assert apply_patch(target, patch) == result
    assert json.dumps(target) == before


@given(_objects, _objects)
def test_a_difference_makes_the_new_of_the_old(old: Any, new: Any) -> None:
    patch = json.loads(json.dumps(difference(old, new)))
    # `difference` and this check compare with ==, so a change from 1 to True counts as none.
    assert apply_patch(old, patch) == new
    assert difference(new, new) == {}


@given(_objects, _objects, _objects)
def test_changes_may_be_left_out_between_two_states(one: Any, two: Any, three: Any) -> None:
    """A slow reader gets the difference to the state it has, without the states between."""
    assert apply_patch(one, difference(one, three)) == three
    assert apply_patch(apply_patch(one, difference(one, two)), difference(two, three)) == three


def test_what_did_not_change_is_not_told() -> None:
    old = {"a": {"x": 1, "y": 2}, "b": {"z": 3}, "c": 4}
    assert difference(old, {"a": {"x": 1, "y": 3}, "b": {"z": 3}}) == {"a": {"y": 3}, "c": None}
