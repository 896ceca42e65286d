"""GPT-2 in the CPU executor: two checkpoint formats, refused configurations, a served engine."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.support.executor_client import GOLDEN, golden_greedy, golden_prompt, start_golden
from triton_repo.cpu_executor import bindings as trtllm
from triton_repo.cpu_executor.causal_lm import Chunk
from triton_repo.cpu_executor.engine import build, load_config, lora_modules
from triton_repo.cpu_executor.gpt import Gpt
from triton_repo.cpu_executor.kv_cache import SequenceCache

FOLDER = GOLDEN / "gpt2"


def logits(model: Gpt) -> np.ndarray:
    return model.forward([Chunk(SequenceCache(model.config, 9), golden_prompt("gpt2")[:9], 9)])


def changed(folder: Path, **changes: Any) -> Path:
    """Write the golden model's config.json with changes, and return the folder."""
    config = json.loads((FOLDER / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


def test_a_checkpoint_of_the_decoder_alone_is_the_same_model(tmp_path: Path) -> None:
    whole = load_file(FOLDER / "model.safetensors")
    assert all(name.startswith("transformer.") for name in whole)
    alone = {name.removeprefix("transformer."): tensor for name, tensor in whole.items()}
    # OpenAI's checkpoint also has the causal mask as a tensor.
    alone["h.0.attn.bias"] = np.ones((1, 1, 4, 4), np.float32)
    save_file(alone, tmp_path / "model.safetensors")
    config = load_config(FOLDER)
    assert np.array_equal(logits(Gpt(config, tmp_path)), logits(Gpt(config, FOLDER)))


def test_a_head_of_its_own_is_used(tmp_path: Path) -> None:
    tensors = load_file(FOLDER / "model.safetensors")
    tensors["lm_head.weight"] = -tensors["transformer.wte.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    config = load_config(FOLDER)
    assert np.array_equal(logits(Gpt(config, tmp_path)), -logits(Gpt(config, FOLDER)))


def test_the_engine_serves_it(tmp_path: Path) -> None:
    prompt, expected = golden_prompt("gpt2"), golden_greedy("gpt2")
    with start_golden(tmp_path, "gpt2", limits={"lora_target_modules": ()}) as executor:
        request = trtllm.Request(input_token_ids=prompt, max_tokens=len(expected))
        request_id = executor.enqueue_request(request)
        (response,) = executor.await_responses(request_id)
    assert response.result.output_token_ids == [prompt + expected]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"activation_function": "relu"}, "activation_function: found relu, allowed gelu_new"),
        ({"scale_attn_weights": False}, "scale_attn_weights: found False, allowed True"),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx: found True"),
    ],
)
def test_what_is_computed_otherwise_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        load_config(changed(tmp_path, **changes))


def test_adapters_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"lora_target_modules: found \['attn_q'\], allowed \(\)"):
        build(FOLDER, tmp_path, lora_target_modules=["attn_q"])
    assert lora_modules(FOLDER) == ()
    config = replace(load_config(FOLDER), lora_target_modules=("attn_qkv",))
    with pytest.raises(ValueError, match="no adapters with GPT-2"):
        Gpt(config, FOLDER)
