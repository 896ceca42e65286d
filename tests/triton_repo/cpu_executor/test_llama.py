"""Llama's parts of the forward pass, and refused checkpoints."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.support.executor_client import GOLDEN
from triton_repo.cpu_executor.engine import load_config
from triton_repo.cpu_executor.llama import Llama, rotations


def test_a_bias_for_only_some_projections_is_refused(tmp_path: Path) -> None:
    tensors = load_file(GOLDEN / "tied_bias" / "model.safetensors")
    del tensors["model.layers.0.self_attn.k_proj.bias"]
    save_file(tensors, tmp_path / "model.safetensors")
    config = json.loads((GOLDEN / "tied_bias" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"model\.layers\.0\..*bias for only some"):
        Llama(load_config(tmp_path), tmp_path)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    tensors = load_file(GOLDEN / "gqa" / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"model\.norm\.weight is missing"):
        Llama(load_config(GOLDEN / "gqa"), tmp_path)


def test_linear_rope_scaling_stretches_positions() -> None:
    config = load_config(GOLDEN / "gqa")
    scaled = replace(config, rotary_scaling={"rope_type": "linear", "factor": 4.0})
    np.testing.assert_allclose(rotations(scaled)[4:40:4], rotations(config)[1:10], atol=1e-6)
