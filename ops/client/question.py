"""The question of `gateway client`, parsed from its command line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from gateway.triton.names import LogicalInput


@dataclass(frozen=True)
class Question:
    """A question.

    Attributes:
        text, prompt_ids: the prompt; ids are for the core model and take precedence.
        tokenizer_dir: Hugging Face folder; required for text to the core model.
        max_tokens: None is the reference client's default: 16 for the core model, else 100.
        scalars: numbers and booleans by meaning, each with the option that set it.
        words: stop and bad words, bias words and guides by meaning, each with option and texts.
        sequences: number of answers; 1 unless `beam_width` is 1 too.
        stop_after_ms: when to stop the request, 0 for never.
        by_cancel: stop by cancelling the RPC instead of sending a stop request.
        expected_ids: the ids that must come; `threshold` is the fraction that must be equal, 0 to
            1.
        lora_path: an adapter's folder; for the llmapi repository's model as Triton sees it.
        lora_name: the adapter's name for that model; "" for the folder's name.
        outputs: names of the outputs to request; None for those that the other options need.
    """

    model: str
    text: str
    prompt_ids: list[int] | None = None
    tokenizer_dir: Path | None = None
    request_id: str = ""
    max_tokens: int | None = None
    streaming: bool = False
    beam_width: int = 1
    sequences: int = 1
    end_id: int | None = None
    pad_id: int | None = None
    scalars: Mapping[LogicalInput, tuple[str, float]] = field(default_factory=dict)
    words: Mapping[LogicalInput, tuple[str, list[str]]] = field(default_factory=dict)
    bias_weights: list[float] | None = None
    exclude_input: bool = False
    stop_after_ms: int = 0
    by_cancel: bool = False
    lora_path: Path | None = None
    lora_task_id: int = 0
    lora_name: str = ""
    outputs: list[str] | None = None
    expected_ids: list[int] | None = None
    threshold: float = 1.0
    overwrite: bool = False
    timeout_s: float | None = None
    verbose: bool = False
