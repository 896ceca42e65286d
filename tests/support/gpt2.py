"""A tiny GPT-2 with the demo's tokenizer: seeded random weights, so its text is meaningless."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from ops.commands.up import DEMO_MODEL

LAYERS, HIDDEN, HEADS, POSITIONS = 2, 64, 4, 512


def write_gpt2(folder: Path) -> Path:
    """Write the Hugging Face folder of a `GPT2LMHeadModel`."""
    folder.mkdir()
    for file in DEMO_MODEL.glob("*token*"):
        shutil.copyfile(file, folder / file.name)
    demo = json.loads((DEMO_MODEL / "config.json").read_text(encoding="utf-8"))
    config = {
        "architectures": ["GPT2LMHeadModel"],
        "activation_function": "gelu_new",
        "n_embd": HIDDEN,
        "n_head": HEADS,
        "n_layer": LAYERS,
        "n_inner": None,
        "n_positions": POSITIONS,
        "vocab_size": demo["vocab_size"],
        "bos_token_id": demo["bos_token_id"],
        "eos_token_id": demo["eos_token_id"],
        "torch_dtype": "float16",
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    # Conv1D has weights of shape [in, out].
    shapes: dict[str, tuple[int, ...]] = {
        "wte.weight": (demo["vocab_size"], HIDDEN),
        "wpe.weight": (POSITIONS, HIDDEN),
        "ln_f.weight": (HIDDEN,),
        "ln_f.bias": (HIDDEN,),
    }
    for layer in range(LAYERS):
        for name, (rows, columns) in {
            "attn.c_attn": (HIDDEN, 3 * HIDDEN),
            "attn.c_proj": (HIDDEN, HIDDEN),
            "mlp.c_fc": (HIDDEN, 4 * HIDDEN),
            "mlp.c_proj": (4 * HIDDEN, HIDDEN),
        }.items():
            shapes[f"h.{layer}.{name}.weight"] = (rows, columns)
            shapes[f"h.{layer}.{name}.bias"] = (columns,)
        for name in ("ln_1", "ln_2"):
            shapes[f"h.{layer}.{name}.weight"] = (HIDDEN,)
            shapes[f"h.{layer}.{name}.bias"] = (HIDDEN,)
    random = np.random.default_rng(2)
    save_file(
        {
            f"transformer.{name}": random.normal(0, 0.3, shape).astype(np.float16)
            + np.float16("ln_" in name and name.endswith("weight"))
            for name, shape in shapes.items()
        },
        folder / "model.safetensors",
    )
    return folder
