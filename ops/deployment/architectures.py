"""Model architectures for which engines can be planned.

`ARCHITECTURES` lists the model classes whose LoRA modules are in `adapters.modules`. The release
numbers are from TensorRT-LLM's `convert_checkpoint.py` scripts and release notes. The numbers of
weight matrices, norms and biases are from Hugging Face's model classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ops.deployment.release import Release


@dataclass(frozen=True, slots=True)
class Architecture:
    """A Hugging Face model class.

    Attributes:
        folder: folder below `examples` with the model's `convert_checkpoint.py`.
        since: the first TensorRT-LLM release that converts the model.
        lora_since: the first release that serves LoRA adapters with the model.
        pipeline: True if `convert_checkpoint.py` has an option for pipeline parallelism.
        gemma_options: True if `convert_checkpoint.py` needs the options that only Gemma has.
        mlp_matrices: number of weight matrices in one MLP: 3 if gated, else 2.
        norms: number of norms in one transformer layer, each of the hidden size.
        qk_norms: True if queries and keys are normalized, per head.
        qkv_bias: True if the query, key and value projections always have a bias.
        biases: True if all linear and norm layers have a bias and positions are learned (GPT-2).
        tied_embeddings: True if lm_head shares the embedding, unless config.json says otherwise.
    """

    folder: str
    since: Release
    lora_since: Release
    pipeline: bool = True
    gemma_options: bool = False
    mlp_matrices: int = 3
    norms: int = 2
    qk_norms: bool = False
    qkv_bias: bool = False
    biases: bool = False
    tied_embeddings: bool = False


_LLAMA = Architecture("llama", Release(0, 9), Release(0, 9))

ARCHITECTURES: Mapping[str, Architecture] = {
    "LlamaForCausalLM": _LLAMA,
    "MistralForCausalLM": _LLAMA,
    # Use Llama's folder: Mixtral's own folder has no script, and Llama's converts the model.
    "MixtralForCausalLM": Architecture("llama", Release(0, 9), Release(0, 10)),
    "Qwen2ForCausalLM": Architecture("qwen", Release(0, 10), Release(0, 11), qkv_bias=True),
    "Qwen3ForCausalLM": Architecture("qwen", Release(1, 0), Release(1, 0), qk_norms=True),
    "GemmaForCausalLM": Architecture(
        *("gemma", Release(0, 9), Release(0, 19)),
        pipeline=False,
        gemma_options=True,
        tied_embeddings=True,
    ),
    "Gemma2ForCausalLM": Architecture(
        *("gemma", Release(0, 13), Release(0, 19)),
        pipeline=False,
        gemma_options=True,
        norms=4,
        tied_embeddings=True,
    ),
    "Gemma3ForCausalLM": Architecture(
        *("gemma", Release(0, 19), Release(1, 0)),
        pipeline=False,
        gemma_options=True,
        norms=4,
        qk_norms=True,
        tied_embeddings=True,
    ),
    "Phi3ForCausalLM": Architecture("phi", Release(0, 10), Release(0, 11), pipeline=False),
    "GPT2LMHeadModel": Architecture(
        *("gpt", Release(0, 9), Release(0, 9)),
        mlp_matrices=2,
        biases=True,
        tied_embeddings=True,
    ),
}
