"""The response header that names the request parameters that the server ignored."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.api.ignored import (
    HEADER,
    MAX_HEADER_CHARS,
    MAX_NAME_CHARS,
    build_headers,
    escape,
    format_names,
)


def test_names_are_listed_once_in_their_order() -> None:
    assert format_names(["num_ctx", "usage", "num_ctx"]) == "num_ctx, usage"


def test_a_name_cannot_add_a_header_or_another_name() -> None:
    assert escape("a\r\nset-cookie: b") == "a\\u000d\\u000aset-cookie:\\u0020b"
    assert escape("a,b\\é") == "a\\u002cb\\u005c\\u00e9"


def test_many_names_are_counted() -> None:
    value = format_names(f"name_{number}" for number in range(4096))
    shown = value.split(", ")
    assert len(value) <= MAX_HEADER_CHARS
    assert shown[-1] == f"and {4096 - len(shown) + 1} more"


@given(st.lists(st.text(max_size=3 * MAX_NAME_CHARS)))
def test_the_header_is_bounded_and_safe(names: list[str]) -> None:
    value = format_names(names)
    assert len(value) <= MAX_HEADER_CHARS
    assert all(" " <= char <= "~" for char in value)
    assert all(len(escape(name)) <= MAX_NAME_CHARS for name in names)


@given(st.lists(st.text(max_size=20), unique=True, max_size=12))
def test_a_short_list_is_complete(names: list[str]) -> None:
    assert len(format_names(names).split(", ")) == max(len(names), 1)


def test_names_that_were_only_counted_count_too() -> None:
    assert build_headers(("a", "b"), 3) == {HEADER: "a, b, and 3 more"}
