"""What `gateway client` asks, by the options of its command line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from gateway.triton.names import LogicalInput


@dataclass(frozen=True)
class Question:
    """What is asked.

    Attributes:
        text, prompt_ids: the prompt; ids are for the core model and win.
        tokenizer_dir: Hugging Face folder; for text to the core model it is needed.
        max_tokens: None is the default of the reference client, 16 for the core model, 100 else.
        scalars: numbers and truth values by what they mean, with the option that gave each.
        words: likewise stop and bad words, bias words and guides, each a list of texts.
        sequences: answers wanted; 1 unless `beam_width` is 1 too.
        stop_after_ms: when to stop it, 0 never; `by_cancel` cancels the RPC instead of asking.
        expected_ids: what must come out; `threshold` is the part that must be equal, 0 to 1.
        lora_path: an adapter's folder, for the llmapi repository's model as Triton sees it.
        lora_name: what that model calls it; "" is the folder's name.
        outputs: names of what to request; None is what the other options need.
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
