"""Options of `gateway client`, as a description of the request to send."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from gateway.triton.names import LogicalInput


@dataclass(frozen=True)
class Question:
    """A request to a model, as the options of `gateway client` describe it.

    The core model is the model that runs the engine and takes token ids, such as `tensorrt_llm`. A
    text model, such as the ensemble, takes text.

    Attributes:
        text: the prompt. For the core model, it is tokenized, and ignored if `prompt_ids` is set.
        prompt_ids: the prompt's token ids, for the core model. Text models ignore them.
        tokenizer_dir: Hugging Face folder with the tokenizer, which is required to send `text` to
            the core model.
        max_tokens: maximum number of tokens to generate. None selects the default of NVIDIA's
            client script: 16 for the core model, 100 for text models.
        scalars: numeric and boolean inputs. The key is a `LogicalInput`; the value is the pair of
            the option's name and the input's value.
        words: text inputs, such as stop words. The key is a `LogicalInput`; the value is the pair
            of the option's name and the input's texts.
        sequences: number of sequences to generate; with beam search at most `beam_width`.
        stop_after_ms: milliseconds after which the request is stopped; 0 for never.
        by_cancel: True to stop by cancelling the RPC instead of sending a stop request.
        expected_ids: token ids to compare the answer with; None compares nothing.
        threshold: fraction of `expected_ids` that must be equal, 0 to 1.
        lora_path: an adapter's folder; for the llmapi repository's model the path on Triton's host.
        lora_name: the adapter's name for the llmapi repository's model; "" for the folder's name.
        outputs: names of the output tensors to request. None selects the generated text or token
            ids, and the outputs that other options ask for, such as --return-log-probs.
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
