"""Make the golden logits and greedy outputs of the CPU executor's tests.

Needs torch and transformers, which the product does not: run it in an environment that has them,
``python tests/data/make_golden.py [CASE ...]``. Each case is a tiny random Llama, or GPT-2, in
Hugging Face form in ``tests/data/golden/<case>`` with ``golden.npz``: ``prompt`` int32 [150],
``logits`` float32 [15, vocab] of every tenth prompt token, ``greedy`` int32 [48] generated after
the prompt.
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

FOLDER = Path(__file__).parent / "golden"
SMALL: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.35,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CASES: dict[str, dict[str, Any]] = {
    "gqa": {"rope_theta": 10000.0},
    "tied_bias": {
        "tie_word_embeddings": True,
        "attention_bias": True,
        "mlp_bias": True,
        "num_key_value_heads": 4,
        "rope_theta": 500000.0,
        "head_dim": 12,
    },
    "llama3_rope": {
        "num_key_value_heads": 1,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "bfloat16": {"rope_theta": 10000.0, "num_hidden_layers": 1},
    "gpt2": {
        "vocab_size": 160,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 512,
        "initializer_range": 0.35,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
}


def make(name: str, changes: dict[str, Any], seed: int) -> None:
    torch.manual_seed(seed)
    model: PreTrainedModel
    if name == "gpt2":
        model = GPT2LMHeadModel(GPT2Config(**changes)).eval()
    else:
        model = LlamaForCausalLM(LlamaConfig(**{**SMALL, **changes})).eval()
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith("bias") or "norm" in parameter_name or ".ln_" in parameter_name:
            parameter.data += 0.2 * torch.randn_like(parameter)
    if name == "bfloat16":
        # The stored weights are bfloat16; the golden math is float32 on the rounded values.
        for parameter in model.parameters():
            parameter.data = parameter.data.to(torch.bfloat16).to(torch.float32)
        copy.deepcopy(model).to(torch.bfloat16).save_pretrained(FOLDER / name)
    else:
        model.save_pretrained(FOLDER / name)
    (FOLDER / name / "generation_config.json").unlink(missing_ok=True)
    prompt = torch.randint(3, model.config.vocab_size, (1, 150), generator=torch.manual_seed(seed))
    with torch.no_grad():
        logits = model(prompt).logits[0].numpy()
        ids = prompt
        for _ in range(48):
            best = model(ids).logits[0, -1].argmax()
            ids = torch.cat([ids, best.reshape(1, 1)], dim=1)
    np.savez_compressed(
        FOLDER / name / "golden.npz",
        prompt=prompt[0].numpy().astype(np.int32),
        logits=logits[::10].astype(np.float32),
        greedy=ids[0, prompt.shape[1] :].numpy().astype(np.int32),
    )


def main() -> None:
    for seed, (name, changes) in enumerate(CASES.items()):
        if name in (sys.argv[1:] or CASES):
            make(name, changes, seed)


if __name__ == "__main__":
    main()
