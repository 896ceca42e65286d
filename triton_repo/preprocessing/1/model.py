"""The model `preprocessing`, which encodes text to token ids, as in inflight_batcher_llm v0.17.

The model applies no chat template. If a request has a multimodal input, the error names the input.
"""

import json
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import triton_python_backend_utils as pb_utils
from booleans import parse_boolean
from transformers import AutoTokenizer

MULTIMODAL = ("IMAGE_BYTES", "IMAGE_URL", "VIDEO_BYTES")

Ids = npt.NDArray[np.int32]


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        parameters = json.loads(args["model_config"])["parameters"]
        for name in ("visual_model_path", "multimodal_model_path"):
            if _value(parameters, name):
                raise pb_utils.TritonModelException(
                    f"{name}: multimodal models are not supported; leave it out"
                )
        self._add_special_tokens = _boolean(parameters, "add_special_tokens", default=True)
        self._tokenizer = AutoTokenizer.from_pretrained(
            _value(parameters, "tokenizer_dir"),
            legacy=False,
            padding_side="left",
            trust_remote_code=_boolean(parameters, "trust_remote_code", default=False),
        )
        eos = self._tokenizer.eos_token
        self._end_id = self._encode(eos, special=False)[0]
        self._pad_id = self._encode(self._tokenizer.pad_token or eos, special=False)[0]

    def execute(self, requests: list[Any]) -> list[Any]:
        return [self._answer(request) for request in requests]

    def _answer(self, request: Any) -> Any:
        try:
            tensors = self._tensors({tensor.name(): tensor for tensor in request.inputs()})
        except ValueError as error:
            return pb_utils.InferenceResponse(
                error=pb_utils.TritonError(str(error), pb_utils.TritonError.INVALID_ARG)
            )
        wanted = request.requested_output_names()
        # Omit outputs that the client did not request. Triton 2.51 frees such outputs without
        # holding the interpreter's lock, which can crash this process.
        return pb_utils.InferenceResponse(
            [pb_utils.Tensor(name, array) for name, array in tensors.items() if name in wanted]
        )

    def _tensors(self, tensors: dict[str, Any]) -> dict[str, npt.NDArray[Any]]:
        for name in MULTIMODAL:
            if name in tensors:
                raise ValueError(f"{name}: multimodal inputs are not supported; leave it out")
        inputs = {name: tensor.as_numpy() for name, tensor in tensors.items()}
        batch = inputs["QUERY"].shape[0]
        end_ids = inputs.get("END_ID", np.full((batch, 1), self._end_id, np.int32))
        pad_ids = inputs.get("PAD_ID", np.full((batch, 1), self._pad_id, np.int32))
        input_ids, lengths = self._prompts(inputs["QUERY"])
        if "DECODER_QUERY" in inputs:
            decoder_ids, decoder_lengths = self._prompts(inputs["DECODER_QUERY"])
        else:
            decoder_ids, decoder_lengths = pad_ids, np.ones((batch, 1), np.int32)
        outputs = {
            "INPUT_ID": input_ids,
            "REQUEST_INPUT_LEN": lengths,
            "DECODER_INPUT_ID": decoder_ids,
            "REQUEST_DECODER_INPUT_LEN": decoder_lengths,
            "BAD_WORDS_IDS": self._words(inputs.get("BAD_WORDS_DICT"), batch),
            "STOP_WORDS_IDS": self._words(inputs.get("STOP_WORDS_DICT"), batch),
            "EMBEDDING_BIAS": self._bias(inputs, batch),
            "REQUEST_OUTPUT_LEN": inputs["REQUEST_OUTPUT_LEN"],
            "OUT_END_ID": end_ids,
            "OUT_PAD_ID": pad_ids,
        }
        if "PROMPT_TABLE_EXTRA_ID" in inputs:
            # Set the extra id only for virtual tokens. These tokens refer to rows of the prompt
            # embedding table, and their ids are at least the vocabulary's size.
            virtual = input_ids >= self._tokenizer.vocab_size
            extra = np.where(virtual, inputs["PROMPT_TABLE_EXTRA_ID"], np.uint64(0))
            outputs["OUT_PROMPT_TABLE_EXTRA_IDS"] = extra.astype(np.uint64)
        return outputs

    def _encode(self, text: str, *, special: bool) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=special)
        return ids

    def _prompts(self, texts: npt.NDArray[np.object_]) -> tuple[Ids, Ids]:
        """Return the token ids of texts [B, 1], and the numbers of ids.

        The ids are int32 [B, longest], padded with the pad id. The numbers are int32 [B, 1].
        """
        rows = [self._encode(_text(row[0]), special=self._add_special_tokens) for row in texts]
        ids = _pad(rows, max(len(row) for row in rows), self._pad_id)
        return ids, np.array([[len(row)] for row in rows], np.int32)

    def _words(self, texts: npt.NDArray[np.object_] | None, batch: int) -> Ids:
        """Return word lists in the executor's format, int32 [B, 2, N]; `texts` is [B, words].

        Row 0 has the ids of all words, joined and padded with 0. Row 1 has the end offset of each
        word, padded with -1. N is the largest number of ids in a list, at least 1. If the request
        has no lists, N is 0.
        """
        if texts is None:
            return np.empty((batch, 2, 0), np.int32)
        ids: list[list[int]] = []
        ends: list[list[int]] = []
        for row in texts:
            words = [self._encode(_text(word), special=False) for word in row]
            ids.append([token for word in words for token in word])
            ends.append(np.cumsum([len(word) for word in words if word], dtype=int).tolist())
        width = max(1, *(len(row) for row in ids))
        return np.stack([_pad(ids, width, 0), _pad(ends, width, -1)], axis=1)

    def _bias(self, inputs: dict[str, npt.NDArray[Any]], batch: int) -> npt.NDArray[np.float32]:
        """Return the bias of each token id, float32 [B, vocabulary]; [B, 0] without bias words.

        The weight of a word is added to each of the word's token ids.
        """
        words = inputs.get("EMBEDDING_BIAS_WORDS")
        weights = inputs.get("EMBEDDING_BIAS_WEIGHTS")
        if words is None or weights is None:
            return np.empty((batch, 0), np.float32)
        if words.shape != weights.shape:
            raise ValueError(
                "EMBEDDING_BIAS_WEIGHTS: "
                f"found shape {list(weights.shape)}; allowed: that of the words, "
                f"{list(words.shape)}"
            )
        bias = np.zeros((batch, len(self._tokenizer)), np.float32)
        for row, row_words, row_weights in zip(bias, words, weights, strict=True):
            for word, weight in zip(row_words, row_weights, strict=True):
                # Add with add.at: if a word has the same id twice, the weight is added twice.
                np.add.at(row, self._encode(_text(word), special=True), weight)
        return bias


def _pad(rows: Iterable[list[int]], width: int, padding: int) -> Ids:
    return np.array([row + [padding] * (width - len(row)) for row in rows], np.int32)


def _text(value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"text: found bytes that are not UTF-8 ({error}); allowed: UTF-8"
        ) from None


def _value(parameters: dict[str, Any], name: str) -> str:
    value: str = parameters.get(name, {}).get("string_value", "")
    # Treat ${name} as unset: fill_template.py leaves it in the file if no value is given.
    return "" if value.startswith("${") else value


def _boolean(parameters: dict[str, Any], name: str, *, default: bool) -> bool:
    value = _value(parameters, name)
    try:
        return parse_boolean(value, of_text_model=True) if value else default
    except ValueError as error:
        raise pb_utils.TritonModelException(f"{name}: {error}") from None
