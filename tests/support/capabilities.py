"""Capabilities of a core model, as a factory whose fields tests may change."""

from __future__ import annotations

from pathlib import Path

from gateway.triton.model_capabilities import ModelCapabilities

CAPABILITIES = ModelCapabilities(
    model="tensorrt_llm",
    inputs={},
    outputs=frozenset(),
    names_outputs=True,
    text=None,
    decoupled=True,
    restates_prompt=True,
    stop=None,
    passes_cancellation=False,
    max_batch_size=None,
    max_seq_len=64,
    max_input_len=None,
    engine_dir=Path("/nowhere"),
    lora_dtype="float16",
    lora_host_bytes=1024**3,
    guides=None,
    max_beam_width=1,
    generation_logits=False,
    logit_bytes=4,
    context_logits=False,
    tokens_per_block=64,
    fingerprint="fp_0",
    vocab_size=256,
)
