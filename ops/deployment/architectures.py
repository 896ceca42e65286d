"""The model architectures that engines can be planned for.

Sources: the `convert_checkpoint.py` scripts and release notes of TensorRT-LLM for the releases that
convert each one, and Hugging Face's model classes for the shapes. These are the architectures whose
LoRA modules `adapters.modules` knows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ops.deployment.release import Release


@dataclass(frozen=True, slots=True)
class Architecture:
    """A Hugging Face model class.

    Attributes:
        folder: the folder of its `convert_checkpoint.py`, below `examples`.
        since: the first release that converts it.
        lora_since: the first release that serves LoRA adapters with it.
        pipeline: True if the script takes a pipeline parallel size.
        gemma_options: True if the script takes Gemma's own options.
        mlp_matrices: matrices of one MLP: 3 when it is gated, else 2.
        norms: norm layers of one transformer layer, each of the hidden size.
        qk_norms: True if queries and keys are normalized, per head.
        qkv_bias: True if those projections always have a bias.
        biases: True if all linear and norm layers have one, and positions are learned (GPT-2).
        tied_embeddings: default for whether lm_head shares the embedding.
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
    # Its folder has a README only; the script is Llama's.
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
