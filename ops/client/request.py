"""Builder of the request to Triton that a `Question` of `gateway client` describes.

Error messages begin with the command line option that the model does not support.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from adapters import convert, npy, npy_files, peft
from adapters.adapter import Converted, task_id
from adapters.base_model import read_base_model
from adapters.errors import AdapterError
from gateway.tokenization.prompts import Prompts
from gateway.triton.direct import DirectModel
from gateway.triton.names import LogicalInput
from gateway.triton.request import InferRequest, RequestBuilder
from gateway.triton.tensors import append_weights, word_list
from gateway.triton.transport import Message
from ops.client.question import Question
from ops.errors import OptionError

LOG_PROBS = ("cum_log_probs", "output_log_probs")
STATISTICS = (
    "kv_cache_alloc_new_blocks",
    "kv_cache_reused_blocks",
    "kv_cache_alloc_total_blocks",
    "arrival_time_ns",
    "first_scheduled_time_ns",
    "first_token_time_ns",
    "last_token_time_ns",
    "acceptance_rate",
    "total_accepted_draft_tokens",
    "total_draft_tokens",
    # Outputs of the llmapi repository.
    "kv_cache_reused_block",
    "kv_cache_missed_block",
    "kv_cache_hit_rate",
)
REASONS: tuple[LogicalInput, ...] = ("finish_reason", "stop_reason")
"""Output tensors of the llmapi repository. A boolean input of the same name requests the output."""
# Output tensors by the boolean input that requests them.
_ANSWERS: Mapping[LogicalInput, tuple[str, ...]] = {
    "log_probs": LOG_PROBS,
    "context_logits": ("context_logits",),
    "generation_logits": ("generation_logits",),
    "cache_stats": STATISTICS,
}
_CORE_TOKENS, _TEXT_TOKENS = 16, 100


def check(model: DirectModel, question: Question) -> None:
    """Raise OptionError if the model does not support an option, or two options contradict."""
    if question.streaming and not model.decoupled:
        raise OptionError(f"--streaming: {model.name} is not decoupled.")
    if question.beam_width > 1 and question.sequences > question.beam_width:
        raise OptionError("--num-return-sequences: at most --beam-width.")
    bls = model.takes_text and not model.is_ensemble and not model.llmapi
    if bls and question.sequences > 1:
        raise OptionError(f"--num-return-sequences: {model.name} does not pass it on.")
    if bls and question.stop_after_ms and not question.by_cancel:
        raise OptionError(f"--stop-after-ms: requests inside {model.name} have unknown ids.")
    if model.takes_text and question.expected_ids is not None:
        raise OptionError(f"--output-tokens-csv: {model.name} gives no ids.")
    if question.outputs is not None:
        needed = "text_output" if model.takes_text else "output_ids"
        if needed not in question.outputs:
            raise OptionError(f"--requested-outputs: {needed} is needed.")
        if unknown := sorted(set(question.outputs) - model.outputs):
            raise OptionError(f"--requested-outputs: {model.name} has no {unknown[0]}.")


def prompt_ids(model: DirectModel, question: Question, prompts: Prompts | None) -> list[int]:
    """Return the prompt's token ids; [] for a model that takes text.

    Raises OptionError if the prompt is text and no tokenizer is given.
    """
    if model.takes_text:
        return []
    if question.prompt_ids is not None:
        return question.prompt_ids
    if prompts is None:
        raise OptionError(f"--tokenizer-dir: {model.name} takes ids; a text needs the tokenizer.")
    ids: list[int] = prompts.tokenizer.encode(question.text).ids
    return ids


def compose(
    model: DirectModel,
    question: Question,
    prompts: Prompts | None,
    ids: list[int],
    request_id: str,
) -> InferRequest | Message:
    """Return the inference request for `question`. `ids` are the token ids of the prompt.

    Raises OptionError if the model has no input for an option.
    """
    composer = _Composer(model, question, prompts, request_id)
    composer.add_prompt(ids)
    composer.add_scalars()
    composer.add_words()
    for name in _list_outputs(model, question):
        composer.build.output(name)
    return composer.build_with_lora()


class _Composer:
    def __init__(
        self, model: DirectModel, question: Question, prompts: Prompts | None, request_id: str
    ) -> None:
        self._model = model
        self._question = question
        self._prompts = prompts
        self.build: RequestBuilder = model.request(request_id)

    def add_prompt(self, ids: list[int]) -> None:
        tokens = self._question.max_tokens
        if self._model.takes_text:
            self.build.texts("prompt", [self._question.text])
            self.build.scalar("max_tokens", _TEXT_TOKENS if tokens is None else tokens)
        else:
            self.build.numbers("prompt", ids, len(ids))
            self.build.scalar("prompt_length", len(ids))
            self.build.scalar("max_tokens", _CORE_TOKENS if tokens is None else tokens)

    def add_scalars(self) -> None:
        question = self._question
        end_id = question.end_id
        if end_id is None and self._prompts is not None and self.build.has("end_id"):
            end_id = next(iter(self._prompts.eos_ids), None)
        pad_id = end_id if question.pad_id is None else question.pad_id
        given: dict[LogicalInput, tuple[str, float]] = {}
        if end_id is not None:
            given["end_id"] = ("--end-id", end_id)
        if pad_id is not None:
            given["pad_id"] = ("--pad-id", pad_id)
        if question.streaming:
            given["streaming"] = ("--streaming", True)
        if question.beam_width > 1:
            given["beam_width"] = ("--beam-width", question.beam_width)
        if question.sequences > 1:
            given["sequences"] = ("--num-return-sequences", question.sequences)
        if question.exclude_input:
            given["exclude_prompt"] = ("--exclude-input-in-output", True)
        for reason in REASONS:
            if reason in (question.outputs or ()):
                given[reason] = ("--requested-outputs", True)
        given |= question.scalars
        if question.lora_task_id and question.lora_path is None:
            given["lora_task_id"] = ("--lora-task-id", question.lora_task_id)
        for logical, (option, value) in given.items():
            self._require_input(logical, option)
            self.build.scalar(logical, value)

    def add_words(self) -> None:
        question = self._question
        for logical, (option, words) in question.words.items():
            self._require_input(logical, option)
            if self._model.takes_text or logical in ("guide", "guide_type"):
                self.build.texts(logical, words)
            elif self._prompts is None:
                raise OptionError(f"{option}: {self._model.name} needs --tokenizer-dir for it.")
            elif logical == "bias":
                raise OptionError(f"{option}: only the text models take words.")
            else:
                ids = word_list(self._prompts.word_ids(tuple(words)))
                self.build.numbers(logical, ids, 2, len(ids) // 2)
        if question.bias_weights is not None:
            weights = question.bias_weights
            self.build.numbers("bias_weights", weights, len(weights))

    def build_with_lora(self) -> InferRequest | Message:
        """Return the request, with the adapter of --lora-path if the option is given."""
        question = self._question
        if question.lora_name:
            self._require_input("lora_name", "--lora-name")
        if question.lora_path is None:
            if question.lora_name:
                raise OptionError("--lora-name: --lora-path is needed with it.")
            return self.build.request
        if self._model.llmapi:
            self._add_lora_folder(question.lora_path)
            return self.build.request
        self._require_input("lora_weights", "--lora-path")
        lora = _read_lora(question.lora_path, question.tokenizer_dir, self._model)
        self.build.scalar("lora_task_id", question.lora_task_id or lora.task_id)
        return append_weights(self.build.request, lora)

    def _add_lora_folder(self, path: Path) -> None:
        """Set the llmapi repository's three adapter inputs: lora_id, lora_name and lora_path.

        The id is --lora-task-id. Without this option, the id is a hash of the adapter's files,
        which must be readable on this machine.
        """
        self._require_input("lora_path", "--lora-path")
        key = self._question.lora_task_id
        if path.is_dir():
            path = path.absolute()
            key = key or task_id(_hash_adapter_files(path))
        if not key:
            raise OptionError(f"--lora-task-id: needed, as {path} is not seen from here.")
        self.build.scalar("lora_id", key)
        self.build.texts("lora_name", [self._question.lora_name or path.name])
        self.build.texts("lora_path", [str(path)])

    def _require_input(self, logical: LogicalInput, option: str) -> None:
        if logical not in self._model.inputs:
            raise OptionError(f"{option}: {self._model.name} has no input for it.")


def _list_outputs(model: DirectModel, question: Question) -> list[str]:
    """Return the names of the outputs to request."""
    if question.outputs is not None:
        return question.outputs
    names = ["text_output"] if model.takes_text else ["output_ids", "sequence_length"]
    for logical, answers in _ANSWERS.items():
        if logical in question.scalars:
            names += answers
    if question.sequences > 1:
        names.append("sequence_index")
    return [name for name in names if name in model.outputs]


def _hash_adapter_files(folder: Path) -> str:
    """Return the SHA-256 of an adapter's files, in hexadecimal.

    The adapter's id is derived from this hash: an engine reads the files of an id only once, so
    changed files need a new id.
    """
    found = hashlib.sha256()
    for file in sorted(folder.glob("adapter_*")):
        found.update(hashlib.sha256(file.read_bytes()).digest())
    return found.hexdigest()


def _read_lora(path: Path, tokenizer_dir: Path | None, model: DirectModel) -> Converted:
    folders = [tokenizer_dir, Path(model.engine_dir or "/nonexistent")]
    folder = next((f for f in folders if f is not None and (f / "config.json").exists()), None)
    if folder is None:
        raise OptionError("--lora-path: name the base model's folder with --tokenizer-dir.")
    dtype = model.lora_dtype
    try:
        if (path / npy_files.WEIGHTS).exists():
            return npy.read(path, read_base_model(folder, (), dtype=dtype))
        adapter = peft.read(path)
        # Accept any base model name in the adapter's settings. The operator has named both the
        # adapter's and the model's folder, so a different name is no mistake.
        names = (adapter.settings.base_model_name_or_path or "",)
        return convert.convert(adapter, read_base_model(folder, names, dtype=dtype))
    except AdapterError as error:
        raise OptionError(f"--lora-path: {error}") from error
