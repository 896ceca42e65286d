"""Names of base models: which spellings mean the same model."""

from __future__ import annotations

import pytest

from adapters.base_names import (
    alias_problem,
    is_same_model,
    model_id,
    quantization_note,
    repeated_alias,
    suggested_alias,
)


def test_ids() -> None:
    assert model_id("org/Name-8B/") == ("org", "name-8b")
    assert model_id("/c/models--org--Name-8B/snapshots/abc") == ("org", "name-8b")
    assert model_id("/c/models--Name-8B/snapshots/abc") == (None, "name-8b")
    assert model_id("name") == (None, "name")
    assert model_id("./out/name") == (None, "name")
    assert model_id("~/name") == (None, "name")
    assert model_id("C:\\name") == (None, "name")


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("org/X-8B", "ORG/x-8b", True),
        ("org/X-8B", "/models/X-8B", True),
        ("unsloth/X-8B-Instruct-bnb-4bit", "unsloth/X-8B-Instruct", True),
        ("unsloth/X-8B-unsloth-bnb-4bit", "X-8B", True),
        ("hub/X-8B-Instruct-AWQ-INT4", "X-8B-Instruct", True),
        ("Qwen/X-7B-Instruct-GPTQ-Int4", "X-7B-Instruct", True),
        ("RedHatAI/X-8B-FP8-dynamic", "X-8B", True),
        ("RedHatAI/X-8B-quantized.w4a16", "X-8B", True),
        ("org/X-8B", "org/X-8B-FP8", True),
        ("org/X-8B", "other/X-8B", False),
        ("org/X-8B-Instruct", "org/X-8B", False),
        ("org/X-8B-Instruct-bnb-4bit", "org/X-8B", False),
        ("org/X-8B-Base", "org/X-8B", False),
        ("org/X-8B", "org/X-70B", False),
        ("org/X-8B-4bit", "org/X-8B", False),
        ("org/X-qat", "org/X", False),
        ("org/Xfp8", "org/X", False),
        ("-awq", "", False),
        ("awq", "", False),
    ],
)
def test_same_models(one: str, other: str, same: bool) -> None:
    assert is_same_model(one, other) is same
    assert is_same_model(other, one) is same


def test_a_name_without_end_is_no_models() -> None:
    assert not is_same_model("x" * 5000, "x" * 5000)


def test_a_quantized_copy_is_noted_unless_it_is_what_is_served() -> None:
    note = quantization_note("unsloth/X-8B-unsloth-bnb-4bit", ["X-8B"])
    assert note is not None
    assert "quantized as unsloth-bnb-4bit" in note
    assert quantization_note("org/X-8B-AWQ", ["x-8b-awq", "X-8B"]) is None
    assert quantization_note("org/X-8B", ["X-8B-FP8"]) is None
    assert quantization_note("", ["X-8B"]) is None


@pytest.mark.parametrize(
    ("named", "alias"),
    [
        ("unsloth/X-8B-unsloth-bnb-4bit", "unsloth/X-8B"),
        ("/root/models/我的模型", "我的模型"),
        ("/c/models--org--Name-8B/snapshots/abc", "org/Name-8B"),
        ("x" * 129, None),
        ("/", None),
        ("a\nb", None),
        ("x'; rm -rf ~; '", None),
        ('org/x"$(true)', None),
    ],
)
def test_the_suggested_alias_is_one_and_fits(named: str, alias: str | None) -> None:
    assert suggested_alias(named) == alias
    if alias is not None:
        assert alias_problem(alias) is None
        assert is_same_model(named, alias)


@pytest.mark.parametrize(
    "alias",
    ["", " x", "a/b/c", "/x", "x/", "./x", "a\\b", "a'b", "$a", "a\tb", "\x1b[31m", "x" * 129],
)
def test_what_is_no_alias(alias: str) -> None:
    assert alias_problem(alias)


def test_repeated_aliases() -> None:
    assert repeated_alias(["org/X", "other/X", "X"]) is None
    assert repeated_alias(["a", "org/X", "ORG/x-bnb-4bit"]) == 2
