"""Tensor names: all names that tools write are understood, none wrongly, and none is ignored."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapters import errors, peft
from adapters.base_model import BaseModel
from adapters.convert import convert
from adapters.keys import read_key, read_modules
from adapters.modules import GPT, LLAMA, MIXTRAL, PHI3, Family
from tests.support.lora_files import BASE, Array, Q, key, pair, qv_tensors, write_peft

WRAPPERS = ("_orig_mod", "module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
PARTS = (
    *("base_model", "model", "language_model", "layers", "0", "self_attn", "q_proj", "visual"),
    *("lora_A", "lora_B", "default", "weight", "", "\x00"),
    *WRAPPERS,
)


def _digest(folder: Path, base: BaseModel = BASE) -> str:
    return convert(peft.read(folder), base).digest


@pytest.mark.parametrize(
    ("layout", "name", "path"),
    [
        (LLAMA, f"base_model.model.{Q}.lora_A.weight", Q),
        (LLAMA, f"{Q}.lora_A.weight", Q),
        (LLAMA, "layers.0.self_attn.q_proj.lora_A.weight", Q),
        (LLAMA, f"base_model.model.{Q}.lora_A.default.weight", Q),
        (LLAMA, f"base_model.model.{Q}.lora_A.zh-2.weight", Q),
        (LLAMA, "base_model.model.layers.0.self_attn.q_proj.lora_A.weight", Q),
        (LLAMA, f"base_model.model.base_model.model.{Q}.lora_A.weight", Q),
        (LLAMA, "model.language_model.layers.0.self_attn.q_proj.lora_A.weight", Q),
        (LLAMA, f"base_model.model.language_model.{Q}.lora_A.weight", Q),
        (MIXTRAL, "model.layers.1.block_sparse_moe.experts.7.w1.lora_A.default.weight", ""),
        (PHI3, "_orig_mod.model.layers.0.self_attn.qkv_proj.lora_A.weight", ""),
        (GPT, "base_model.model.transformer.h.0.attn.c_attn.lora_A.weight", ""),
        (GPT, "h.0.attn.c_attn.lora_A.weight", "transformer.h.0.attn.c_attn"),
        (GPT, "module.transformer.h.0.attn.c_attn.lora_A.weight", "transformer.h.0.attn.c_attn"),
    ],
)
def test_what_savers_write(layout: Family, name: str, path: str) -> None:
    found = read_key(name, layout)
    assert found.location == layout.locate(found.path)
    assert found.side == "A"
    assert path in ("", found.path)


@given(data=st.data(), path=st.sampled_from([Q, "layers.0.self_attn.q_proj"]))
def test_wrappers_are_taken_out_wherever_they_are(data: st.DataObject, path: str) -> None:
    parts = f"{path}.lora_B.default.weight".split(".")
    for _ in range(data.draw(st.integers(1, 6))):
        place = data.draw(st.integers(0, len(parts)))
        parts.insert(place, data.draw(st.sampled_from(WRAPPERS)))
    found = read_key(".".join(parts), LLAMA)
    assert (found.path, found.side, found.adapter) == (Q, "B", "default")


@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [
        ("base_model.model.model.visual.blocks.0.attn.qkv", errors.UnsupportedModule, "visual"),
        (
            "base_model.model.model.vision_tower.encoder.layers.0.self_attn.q_proj",
            errors.UnsupportedModule,
            "vision_tower is not the text model",
        ),
        ("model.audio_tower.layers.0.self_attn.q_proj", errors.UnsupportedModule, "audio_tower"),
        ("model.multi_modal_projector.linear_1", errors.UnsupportedModule, "exclude_modules"),
        ("model.mtp.layers.0.self_attn.q_proj", errors.UnsupportedModule, "model.layers.N."),
        ("model.decoder.layers.0.self_attn.q_proj", errors.UnsupportedModule, "model.layers.N."),
        ("thinker.model.layers.0.self_attn.q_proj", errors.UnsupportedModule, "thinker"),
        ("model.layers.0.mixer.in_proj", errors.UnsupportedModule, "mixer.in_proj"),
        ("model.layers.00.self_attn.q_proj", errors.UnsupportedModule, "layers.00"),
        ("model.layers.٠.self_attn.q_proj", errors.UnsupportedModule, "model.layers.N."),
        ("model.layers.0.model.layers.0.self_attn.q_proj", errors.UnsupportedModule, "q_proj"),
        ("lm_head", errors.UnsupportedModule, "no LoRA module id"),
        ("", errors.UnsupportedFeature, "left out silently"),
    ],
)
def test_other_modules_are_refused_by_name(
    tmp_path: Path, name: str, kind: type[errors.AdapterError], words: str
) -> None:
    tensors = qv_tensors() | {
        f"{name}.lora_A.weight".lstrip("."): np.ones((4, 8), np.float32),
        f"{name}.lora_B.weight".lstrip("."): np.ones((8, 4), np.float32),
    }
    with pytest.raises(kind, match=words):
        _digest(write_peft(tmp_path, tensors))


@pytest.mark.parametrize(
    ("again", "words"),
    [
        (f"{Q}.lora_A.weight", "both are model.layers.0.self_attn.q_proj.lora_A.weight"),
        (f"_orig_mod.base_model.model.{Q}.lora_A.weight", "both are"),
        (f"base_model.model.{Q}.lora_A.module.weight", "both are"),
        (f"base_model.model.{Q}.lora_A.default.weight", "both are"),
        (f"base_model.model.language_model.{Q}.lora_A.weight", "both are"),
        (f"base_model.model.{Q}.lora_magnitude_vector.default.weight", "DoRA"),
        (f"_orig_mod.{Q}.lora_magnitude_vector", "DoRA"),
        (f"base_model.model.{Q}.lora_B.default.bias", "left out silently"),
        (f"module.{Q}.base_layer.weight", "left out silently"),
        ("model.embed_tokens.lora_embedding_A.default", "embeddings"),
        ("module.lm_head.modules_to_save.default.weight", "embeddings"),
    ],
)
def test_a_second_name_of_a_tensor_and_what_is_no_lora_are_refused(
    tmp_path: Path, again: str, words: str
) -> None:
    tensors = qv_tensors() | {again: np.ones((4, 8), np.float32)}
    with pytest.raises(errors.AdapterError, match=words) as caught:
        _digest(write_peft(tmp_path, tensors))
    assert again in str(caught.value)
    if words == "both are":
        assert key(Q, "A") in str(caught.value)


def test_tensors_of_two_adapters_are_refused(tmp_path: Path) -> None:
    tensors = {name: value for name, value in qv_tensors().items() if "q_proj" in name}
    other = {
        name.replace(".weight", ".other.weight"): value
        for name, value in qv_tensors().items()
        if "v_proj" in name
    }
    with pytest.raises(errors.UnsupportedFeature, match="two adapters") as caught:
        _digest(write_peft(tmp_path, tensors | other))
    assert caught.value.field in tensors | other
    assert caught.value.found in tensors | other


def test_pairs_whose_halves_are_spelled_differently_are_one(tmp_path: Path) -> None:
    tensors = qv_tensors()
    plain = _digest(write_peft(tmp_path / "plain", tensors))
    mixed = {
        name.replace("base_model.", "module.base_model.") if "lora_A" in name else name: value
        for name, value in tensors.items()
    }
    assert _digest(write_peft(tmp_path / "mixed", mixed)) == plain


def _spelled(form: str) -> dict[str, Array]:
    return {
        name.replace("base_model.model.model.layers", form): value
        for name, value in qv_tensors().items()
    }


@pytest.mark.parametrize(
    ("form", "patterns", "meant"),
    [
        # PEFT matches its patterns against the path after PEFT's own prefix.
        (
            "base_model.model.model.language_model.layers",
            {r"model.language_model.layers.0.*": 32},
            {r"layers.0.*": 32},
        ),
        ("base_model.model.model.language_model.layers", {r"^model.layers.0.*": 32}, {}),
        # A wrapper's prefix may be missing in the patterns, or be part of them.
        ("_orig_mod.model.layers", {r"^model.layers.0.*": 32}, {r"layers.0.*": 32}),
        ("_orig_mod.model.layers", {r"_orig_mod.model.layers.0.*": 32}, {r"layers.0.*": 32}),
        ("layers", {r"model.layers.0.*": 32}, {r"layers.0.*": 32}),
    ],
)
def test_patterns_mean_the_modules_that_they_meant_in_training(
    tmp_path: Path, form: str, patterns: dict[str, Any], meant: dict[str, Any]
) -> None:
    expected = _digest(write_peft(tmp_path / "a", qv_tensors(), alpha_pattern=meant))
    found = write_peft(tmp_path / "b", _spelled(form), alpha_pattern=patterns)
    assert _digest(found) == expected
    assert (meant == {}) == (expected == _digest(write_peft(tmp_path / "c", qv_tensors())))


def test_patterns_that_fit_two_spellings_differently_are_refused(tmp_path: Path) -> None:
    patterns = {r"model.layers.0.self_attn.q_proj": 64, "q_proj": 2}
    folder = write_peft(tmp_path, _spelled("layers"), alpha_pattern=patterns)
    with pytest.raises(errors.UnsupportedFeature, match=r"alpha_pattern of .*q_proj") as caught:
        _digest(folder)
    assert "found 2.0, 64.0 for layers.0.self_attn.q_proj, model.layers.0" in str(caught.value)


def test_an_unknown_module_of_the_engine_refuses_only_what_has_it(tmp_path: Path) -> None:
    base = replace(BASE, lora_target_modules=("attn_q", "attn_k", "attn_v", "mamba_in_proj"))
    assert _digest(write_peft(tmp_path / "qv", qv_tensors()), base)
    tensors = qv_tensors() | pair("model.layers.0.mixer.in_proj", 4, (8, 8))
    mamba = write_peft(tmp_path / "mamba", tensors)
    with pytest.raises(errors.UnsupportedModule, match=r"layers\.0\.mixer\.in_proj"):
        _digest(mamba, base)
    tensors = qv_tensors() | pair("model.layers.0.self_attn.o_proj", 4, (8, 8))
    dense = write_peft(tmp_path / "dense", tensors)
    with pytest.raises(errors.UnsupportedModule, match=r"attn_dense.*attn_v, mamba_in_proj"):
        _digest(dense, base)


def test_long_names_cost_little_and_are_not_repeated(tmp_path: Path) -> None:
    for name in ("x" * 2**20, "module." * 2**17 + Q + ".lora_A.weight", "layers.0." * 2**16):
        folder = write_peft(tmp_path, qv_tensors() | {name: np.ones((4, 8), np.float32)})
        with pytest.raises(errors.TooLarge, match=f"of {len(name)} characters") as caught:
            _digest(folder)
        assert len(str(caught.value)) < 1000


def test_names_do_not_write_into_logs(tmp_path: Path) -> None:
    name = "a\n\x1b[31mERROR\u2028.lora_A.weight"
    folder = write_peft(tmp_path, qv_tensors() | {name: np.ones((4, 8), np.float32)})
    with pytest.raises(errors.UnsupportedModule) as caught:
        _digest(folder)
    assert str(caught.value).isprintable()
    assert r"a\n\x1b[31mERROR\u2028" in str(caught.value)


def test_the_cost_of_names_grows_with_their_number() -> None:
    """Check that CPU time grows linearly: four times the names must not take sixteen times."""
    base = replace(BASE, num_hidden_layers=24_000)

    def cost(count: int) -> float:
        names = [
            f"{'_orig_mod.' * 9}model.layers.{number}.self_attn.q_proj.lora_{side}.weight"
            for number in range(count)
            for side in "AB"
        ]
        taken = []
        for _ in range(3):
            began = time.process_time()
            assert len(read_modules(names, base)) == count
            taken.append(time.process_time() - began)
        return min(taken)

    assert cost(24_000) < 10 * cost(6_000)


@given(
    names=st.lists(
        st.lists(
            st.sampled_from(PARTS),
            max_size=10,
        ).map(".".join),
        max_size=6,
        unique=True,
    )
)
def test_any_names_are_understood_whole_or_refused(names: list[str]) -> None:
    try:
        modules = read_modules(names, BASE)
    except errors.AdapterError:
        return
    found = [name for module in modules.values() for name in module.keys.values()]
    assert sorted(found) == sorted(names)
