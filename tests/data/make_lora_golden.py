"""Make ``tests/data/lora``: tiny base models, PEFT adapters, and what PEFT computes with them.

Run once by hand in an environment with torch, transformers and peft; the tests read the result:

    python tests/data/make_lora_golden.py

Each case folder holds an adapter as `save_pretrained` writes it and ``expected.safetensors``:
`delta.<module>` is PEFT's own change of that linear layer's weight, float16 [out, in], and for
the Llama cases `logits` are those of the merged model for `input_ids`. ``base-<family>`` holds
the base model's config.json, for Llama its weights too.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from safetensors.torch import save_file
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

HERE = Path(__file__).parent / "lora"
SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
ONE_LAYER = {**SHAPE, "num_hidden_layers": 1}
BASES: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SHAPE, tie_word_embeddings=False),
    "mistral": MistralConfig(**ONE_LAYER),
    "qwen2": Qwen2Config(**ONE_LAYER),
    "qwen3": Qwen3Config(**ONE_LAYER, head_dim=16),
    "gemma2": Gemma2Config(**ONE_LAYER, head_dim=8),
    "phi3": Phi3Config(**ONE_LAYER),
    "gpt2": GPT2Config(
        vocab_size=64,
        n_embd=32,
        n_layer=1,
        n_head=4,
        n_positions=64,
        bos_token_id=1,
        eos_token_id=2,
    ),
}
ALL_LLAMA = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-qv-r4": ("llama", {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}),
    "llama-all-r16-rslora": (
        "llama",
        {"r": 16, "lora_alpha": 12, "use_rslora": True, "target_modules": ALL_LLAMA},
    ),
    "llama-patterns": (
        "llama",
        {
            "r": 4,
            "lora_alpha": 12,
            "target_modules": ALL_LLAMA,
            "rank_pattern": {r"layers\.1\.self_attn\.q_proj": 2, "down_proj": 6, "proj": 3},
            "alpha_pattern": {"^model.layers.0.mlp.gate_proj": 6, r"self_attn\.(q|k)_proj": 24},
        },
    ),
    "llama-mlp-r16": (
        "llama",
        {"r": 16, "lora_alpha": 16, "target_modules": ["gate_proj", "up_proj", "down_proj"]},
    ),
    "llama-one-layer-o-r1": (
        "llama",
        {"r": 1, "lora_alpha": 3, "target_modules": ["o_proj"], "layers_to_transform": [1]},
    ),
    "mistral-all-r4": ("mistral", {"r": 4, "lora_alpha": 8, "target_modules": ALL_LLAMA}),
    "qwen2-all-r4": ("qwen2", {"r": 4, "lora_alpha": 8, "target_modules": ALL_LLAMA}),
    "qwen3-qkv-r4": (
        "qwen3",
        {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "k_proj", "v_proj"]},
    ),
    "gemma2-all-r4": ("gemma2", {"r": 4, "lora_alpha": 8, "target_modules": ALL_LLAMA}),
    "phi3-all-r4": (
        "phi3",
        {
            "r": 4,
            "lora_alpha": 8,
            "target_modules": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"],
        },
    ),
    "gpt2-all-r4": (
        "gpt2",
        {
            "r": 4,
            "lora_alpha": 8,
            "target_modules": ["c_attn", "c_proj", "c_fc"],
            "fan_in_fan_out": True,
        },
    ),
}


def main() -> None:
    shutil.rmtree(HERE, ignore_errors=True)
    for family, config in BASES.items():
        torch.manual_seed(7)
        model = AutoModelForCausalLM.from_config(config)
        folder = HERE / f"base-{family}"
        if family == "llama":
            # Larger than the default, so that a wrong delta cannot hide in the tolerance.
            with torch.no_grad():
                for weight in model.parameters():
                    if weight.dim() == 2:
                        weight.normal_(std=0.3)
            model.save_pretrained(folder)
        else:
            model.config.architectures = [type(model).__name__]
            model.config.save_pretrained(folder)
    for index, (name, (family, options)) in enumerate(CASES.items()):
        make_case(name, family, options, seed=100 + index)
    for path in HERE.rglob("README.md"):
        path.unlink()
    for path in HERE.rglob("*.safetensors"):
        path.chmod(0o644)


def make_case(name: str, family: str, options: dict[str, Any], seed: int) -> None:
    if family == "llama":
        base = AutoModelForCausalLM.from_pretrained(HERE / "base-llama")
    else:
        base = AutoModelForCausalLM.from_config(BASES[family])
    torch.manual_seed(seed)
    settings = LoraConfig(task_type="CAUSAL_LM", **options)
    model = get_peft_model(base, settings)
    model.peft_config["default"].base_model_name_or_path = f"tiny/base-{family}"
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if "lora_" in key:
                # Four significant bits, and scalings of a few bits: exact in float16 and
                # bfloat16, so that nothing but the arithmetic is compared.
                weight.copy_(weight.normal_(std=0.15).to(torch.float8_e4m3fn).float())
    folder = HERE / name
    model.save_pretrained(folder)
    expected: dict[str, torch.Tensor] = {}
    for path, module in model.get_base_model().named_modules():
        if isinstance(module, LoraLayer):
            delta = module.get_delta_weight("default")
            # Conv1D keeps [in, out]; the rows of the engine's tensors are about [out, in].
            delta = delta.T if family == "gpt2" else delta
            expected[f"delta.{path}"] = delta.half().contiguous()
    if family == "llama":
        ids = torch.tensor([[1, 5, 9, 33, 12, 60, 7, 21]])
        expected["input_ids"] = ids
        merged = model.merge_and_unload()
        with torch.no_grad():
            expected["logits"] = merged(input_ids=ids).logits[0].float()
    save_file(expected, folder / "expected.safetensors")


if __name__ == "__main__":
    main()
