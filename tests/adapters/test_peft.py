"""Refused PEFT adapters: each error names file, field, found value and allowed values."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapters import errors, peft
from adapters.adapter import Converted
from adapters.base_model import BaseModel
from adapters.convert import convert
from tests.support.examples import scale_examples
from tests.support.lora_files import BASE, CONFIG, Array, Q, key, pair, qv_tensors, write_peft

WEIGHTS = "adapter_model.safetensors"


def _convert(folder: Path, base: BaseModel = BASE) -> Converted:
    return convert(peft.read(folder), base)


def test_the_plain_adapter_is_accepted(tmp_path: Path) -> None:
    assert _convert(write_peft(tmp_path, qv_tensors())).rows == 6


@pytest.mark.parametrize(
    ("changes", "kind", "field"),
    [
        ({"use_dora": True}, errors.UnsupportedFeature, "use_dora"),
        ({"modules_to_save": ["lm_head"]}, errors.UnsupportedFeature, "modules_to_save"),
        ({"trainable_token_indices": [1]}, errors.UnsupportedFeature, "trainable_token_indices"),
        ({"bias": "lora_only"}, errors.UnsupportedFeature, "bias"),
        ({"lora_bias": True}, errors.UnsupportedFeature, "lora_bias"),
        ({"target_parameters": ["w"]}, errors.UnsupportedFeature, "target_parameters"),
        ({"layer_replication": [[0, 1]]}, errors.UnsupportedFeature, "layer_replication"),
        ({"alora_invocation_tokens": [5]}, errors.UnsupportedFeature, "alora_invocation_tokens"),
        ({"a_field_of_the_future": 3}, errors.UnsupportedFeature, "a_field_of_the_future"),
        ({"init_lora_weights": "pissa"}, errors.UnsupportedFeature, "init_lora_weights"),
        ({"peft_type": "IA3"}, errors.UnsupportedFeature, "peft_type"),
        ({"peft_type": None}, errors.UnsupportedFeature, "peft_type"),
        ({"task_type": "SEQ_CLS"}, errors.UnsupportedFeature, "task_type"),
        ({"target_modules": ["lm_head"]}, errors.UnsupportedModule, "target_modules"),
        ({"target_modules": ["x.embed_tokens"]}, errors.UnsupportedModule, "target_modules"),
        ({"r": 0}, errors.InvalidRank, "r"),
        ({"r": True}, errors.InvalidRank, "r"),
        ({"r": "4"}, errors.InvalidRank, "r"),
        ({"r": 2**31}, errors.InvalidRank, "r"),
        ({"r": 10**400}, errors.InvalidRank, "r"),
        ({"r": 16.5}, errors.InvalidRank, "r"),
        ({"r": 1e308}, errors.InvalidRank, "r"),
        ({"r": -16.0}, errors.InvalidRank, "r"),
        ({"r": float("nan")}, errors.InvalidRank, "r"),
        ({"r": float("inf")}, errors.InvalidRank, "r"),
        ({"r": "16.0"}, errors.InvalidRank, "r"),
        ({"rank_pattern": {"q_proj": 4.5}}, errors.InvalidRank, "rank_pattern['q_proj']"),
        ({"rank_pattern": {"q_proj": True}}, errors.InvalidRank, "rank_pattern['q_proj']"),
        ({"bias": False}, errors.UnsupportedFeature, "bias"),
        ({"bias": "all"}, errors.UnsupportedFeature, "bias"),
        ({"swift_type": "LONGLORA"}, errors.UnsupportedFeature, "swift_type"),
        ({"use_qa_lora": True}, errors.UnsupportedFeature, "use_qa_lora"),
        ({"use_merged_linear": True}, errors.UnsupportedFeature, "use_merged_linear"),
        ({"model_key_mapping": {"a": "b"}}, errors.UnsupportedFeature, "model_key_mapping"),
        ({"lora_alpha": float("nan")}, errors.CorruptFile, "lora_alpha"),
        ({"lora_alpha": True}, errors.CorruptFile, "lora_alpha"),
        ({"lora_alpha": None}, errors.CorruptFile, "lora_alpha"),
        ({"lora_alpha": float("inf")}, errors.CorruptFile, "lora_alpha"),
        ({"use_rslora": "yes"}, errors.CorruptFile, "use_rslora"),
        ({"rank_pattern": {"q_proj": 0}}, errors.InvalidRank, "rank_pattern['q_proj']"),
        ({"rank_pattern": [1]}, errors.CorruptFile, "rank_pattern"),
        ({"rank_pattern": {"(": 2}}, errors.CorruptFile, "rank_pattern"),
        ({"rank_pattern": {"(?x:([^!]+) +)!": 2}}, errors.UnsupportedFeature, "rank_pattern"),
        ({"rank_pattern": {f"{n:0256}": 2 for n in range(1025)}}, errors.TooLarge, "rank_pattern"),
        ({"alpha_pattern": {"(?!a)b": 2}}, errors.UnsupportedFeature, "alpha_pattern"),
        ({"base_model_name_or_path": 7}, errors.CorruptFile, "base_model_name_or_path"),
    ],
)
def test_config_field_is_refused(
    tmp_path: Path, changes: dict[str, Any], kind: type[errors.AdapterError], field: str
) -> None:
    folder = write_peft(tmp_path, qv_tensors(), **changes)
    with pytest.raises(kind) as caught:
        peft.read(folder)
    assert caught.value.file == "adapter_config.json"
    assert caught.value.field == field
    assert caught.value.found
    assert caught.value.allowed
    for fact in (caught.value.file, caught.value.field, caught.value.found, caught.value.allowed):
        assert fact in str(caught.value)


def test_a_huge_scale_is_refused_and_not_rounded_away(tmp_path: Path) -> None:
    with pytest.raises(errors.NotFinite, match=r"lora_B\.weight"):
        _convert(write_peft(tmp_path, qv_tensors(), lora_alpha=1e308))


def test_a_long_field_is_not_repeated(tmp_path: Path) -> None:
    folder = write_peft(tmp_path, qv_tensors(), **{"x\n" * 2**20: [1] * 2**16})
    with pytest.raises(errors.UnsupportedFeature) as caught:
        peft.read(folder)
    assert len(str(caught.value)) < 1500
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("value", [True, False, "gaussian", "eva", "orthogonal", None])
def test_initialisations_that_leave_the_base_alone_are_accepted(
    tmp_path: Path, value: object
) -> None:
    peft.read(write_peft(tmp_path, qv_tensors(), init_lora_weights=value))


def _rename(old: str, new: str) -> Callable[[dict[str, Array]], None]:
    def change(tensors: dict[str, Array]) -> None:
        tensors[new] = tensors.pop(old)

    return change


def _replace(name: str, value: Array) -> Callable[[dict[str, Array]], None]:
    return lambda tensors: tensors.update({name: value})


def _poison(name: str, value: float) -> Callable[[dict[str, Array]], None]:
    def change(tensors: dict[str, Array]) -> None:
        tensors[name][1, 2] = value

    return change


_F32 = np.float32


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        (_rename(key(Q, "A"), "other"), errors.UnsupportedFeature, "left out silently"),
        (
            _replace(f"base_model.model.{Q}.lora_magnitude_vector.weight", np.ones(8, _F32)),
            errors.UnsupportedFeature,
            "DoRA",
        ),
        (
            _replace("base_model.model.lm_head.weight", np.ones((4, 8), _F32)),
            errors.UnsupportedModule,
            "lm_head",
        ),
        (
            _replace("base_model.model.model.embed_tokens.lora_embedding_A", np.ones((4, 8), _F32)),
            errors.UnsupportedModule,
            "embed_tokens",
        ),
        (
            _replace(f"base_model.model.{Q}.lora_B.bias", np.ones(8, _F32)),
            errors.UnsupportedFeature,
            "bias",
        ),
        (
            _rename(key(Q, "B"), key(Q.replace("q_proj", "q_porj"), "B")),
            errors.UnsupportedModule,
            "self_attn.q_proj",
        ),
        (lambda t: t.pop(key(Q, "B")), errors.IncompleteAdapter, "lora_B"),
        (lambda t: t.pop(key(Q, "A")), errors.IncompleteAdapter, "lora_A"),
        (
            lambda t: t.update(pair("model.layers.2.self_attn.q_proj", 4, (8, 8))),
            errors.LayerOutOfRange,
            "0 .. 1",
        ),
        (_replace(key(Q, "A"), np.ones((4, 9), _F32)), errors.ShapeMismatch, "[4, 8]"),
        (_replace(key(Q, "B"), np.ones((7, 4), _F32)), errors.ShapeMismatch, "[8, 4]"),
        (_replace(key(Q, "A"), np.ones((4, 8, 1), _F32)), errors.ShapeMismatch, "two dimensions"),
        (_replace(key(Q, "A"), np.ones((3, 8), _F32)), errors.InvalidRank, "rank_pattern"),
        (_poison(key(Q, "A"), np.nan), errors.NotFinite, key(Q, "A")),
        (_poison(key(Q, "B"), np.inf), errors.NotFinite, key(Q, "B")),
        (_poison(key(Q, "B"), -np.inf), errors.NotFinite, key(Q, "B")),
        # The value is finite, but exceeds float16's 65504 after scaling by alpha / r = 2.
        (_poison(key(Q, "B"), 40000.0), errors.NotFinite, "80000"),
        (_poison(key(Q, "A"), -70000.0), errors.NotFinite, "70000"),
        (_replace(key(Q, "A"), np.ones((4, 8), np.int8)), errors.UnsupportedFeature, "BF16"),
        (lambda t: t.clear(), errors.IncompleteAdapter, "none"),
    ],
)
def test_tensor_is_refused(
    tmp_path: Path,
    change: Callable[[dict[str, Array]], Any],
    kind: type[errors.AdapterError],
    words: str,
) -> None:
    tensors = qv_tensors()
    change(tensors)
    with pytest.raises(kind) as caught:
        _convert(write_peft(tmp_path, tensors))
    assert caught.value.file == WEIGHTS
    assert words in str(caught.value)


def test_values_that_bfloat16_can_hold_are_accepted_there(tmp_path: Path) -> None:
    tensors = qv_tensors()
    tensors[key(Q, "B")][1, 2] = 40000.0
    assert _convert(write_peft(tmp_path, tensors), replace(BASE, dtype="bfloat16"))


def test_rank_above_the_engine_s_limit(tmp_path: Path) -> None:
    with pytest.raises(errors.InvalidRank, match="max_lora_rank"):
        _convert(write_peft(tmp_path, qv_tensors(9), r=9))


def test_module_that_the_engine_was_not_built_for(tmp_path: Path) -> None:
    base = replace(BASE, lora_target_modules=("attn_q", "attn_k"))
    with pytest.raises(errors.UnsupportedModule, match=r"attn_v.*attn_q, attn_k"):
        _convert(write_peft(tmp_path, qv_tensors()), base)


def test_attention_wider_than_the_model_is_refused_for_attn_dense_only(tmp_path: Path) -> None:
    base = replace(BASE, head_size=8)
    tensors = pair("model.layers.0.self_attn.o_proj", 4, (16, 8))
    with pytest.raises(errors.UnsupportedModule, match="attn_dense"):
        _convert(write_peft(tmp_path / "o", tensors), base)
    tensors = pair(Q, 4, (8, 16))
    assert _convert(write_peft(tmp_path / "q", tensors), base).rows == 3


def test_patterns_have_a_bound_for_all_modules_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_peft(tmp_path, qv_tensors(), rank_pattern={"q_proj": 4}, alpha_pattern={"v": 2})
    characters, modules = 7, len(qv_tensors()) // 2
    monkeypatch.setattr("adapters.plan._MAX_PATTERN_WORK", characters * modules)
    assert _convert(folder).rows == 6
    monkeypatch.setattr("adapters.plan._MAX_PATTERN_WORK", characters * modules - 1)
    with pytest.raises(errors.TooLarge, match="rank_pattern and alpha_pattern"):
        _convert(folder)


def test_kv_heads_that_tensor_parallelism_would_repeat(tmp_path: Path) -> None:
    with pytest.raises(errors.UnsupportedEngine, match="tp_size"):
        _convert(write_peft(tmp_path, qv_tensors()), replace(BASE, tp_size=2))


@pytest.mark.parametrize("tp_size", [1, 2])
def test_experts_with_different_ranks_or_split_are_refused(tmp_path: Path, tp_size: int) -> None:
    base = replace(
        BASE,
        architecture="MixtralForCausalLM",
        num_experts=2,
        lora_target_modules=("moe_h_to_4h",),
        tp_size=tp_size,
    )
    path = "model.layers.0.block_sparse_moe.experts"
    tensors = pair(f"{path}.0.w1", 4, (8, 12)) | pair(f"{path}.1.w1", 2, (8, 12))
    folder = write_peft(tmp_path, tensors, rank_pattern={"experts.1.w1": 2})
    words = "share one row" if tp_size == 1 else "splits expert weights"
    with pytest.raises(errors.AdapterError, match=words):
        _convert(folder, base)


def test_expert_out_of_range(tmp_path: Path) -> None:
    base = replace(
        BASE,
        architecture="MixtralForCausalLM",
        num_experts=2,
        lora_target_modules=("moe_h_to_4h",),
    )
    tensors = pair("model.layers.0.block_sparse_moe.experts.2.w1", 4, (8, 12))
    with pytest.raises(errors.LayerOutOfRange, match=r"0 \.\. 1"):
        _convert(write_peft(tmp_path, tensors), base)


@pytest.mark.parametrize(
    ("named", "fits"),
    [
        ("demo", True),
        ("org/demo", True),
        ("/models/Demo/", True),
        ("C:\\models\\demo", True),
        ("/hub/models--org--demo/snapshots/0123abc", True),
        ("", True),
        (None, True),
        ("org/demo-2", False),
        ("demo/other", False),
        ("/hub/models--org--other/snapshots/demo", False),
    ],
)
def test_base_model_name(tmp_path: Path, named: str | None, fits: bool) -> None:
    folder = write_peft(tmp_path, qv_tensors(), base_model_name_or_path=named)
    if fits:
        assert _convert(folder)
        return
    with pytest.raises(errors.BaseMismatch) as caught:
        _convert(folder)
    assert caught.value.field == "base_model_name_or_path"
    assert "demo" in caught.value.allowed


@scale_examples(4)
@given(
    config=st.dictionaries(
        st.sampled_from([*CONFIG, "rank_pattern", "alpha_pattern", "use_rslora"]),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner),
            max_leaves=5,
        ),
    )
)
def test_any_config_gives_an_adapter_error_or_an_adapter(
    tmp_path_factory: pytest.TempPathFactory, config: dict[str, Any]
) -> None:
    folder = write_peft(tmp_path_factory.mktemp("a"), qv_tensors(), **config)
    with contextlib.suppress(errors.AdapterError):
        _convert(folder)
