"""The model `postprocessing`, which decodes token ids to text.

inflight_batcher_llm and all_models/gpt both use this model. A request of all_models/gpt has no
input SEQUENCE_LENGTH, so all ids of a row are decoded. Each request is decoded independently. In a
stream, a leading space may therefore be lost, and a character whose bytes are split over two
requests becomes U+FFFD. The gateway does not use this model: the gateway decodes tokens itself.
"""

import json
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils
from booleans import parse_boolean
from transformers import AutoTokenizer


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        parameters = json.loads(args["model_config"])["parameters"]
        self._skip_special_tokens = _boolean(parameters, "skip_special_tokens", default=True)
        self._tokenizer: Any = AutoTokenizer.from_pretrained(
            parameters["tokenizer_dir"]["string_value"],
            legacy=False,
            padding_side="left",
            trust_remote_code=_boolean(parameters, "trust_remote_code", default=False),
        )

    def execute(self, requests: list[Any]) -> list[Any]:
        return [self._answer(request) for request in requests]

    def _answer(self, request: Any) -> Any:
        inputs = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        batch = inputs["TOKENS_BATCH"]
        whole = np.full(batch.shape[:2], batch.shape[2])
        texts = [
            self._tokenizer.decode(tokens[:length], skip_special_tokens=self._skip_special_tokens)
            for beams, lengths in zip(batch, inputs.get("SEQUENCE_LENGTH", whole), strict=True)
            for tokens, length in zip(beams, lengths, strict=True)
        ]
        # Return an array of shape [B * beams] without a batch dimension, because clients expect
        # this shape.
        output = np.array([text.encode() for text in texts], dtype=np.object_)
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", output)])


def _boolean(parameters: dict[str, Any], name: str, *, default: bool) -> bool:
    value = parameters.get(name, {}).get("string_value", "")
    # Treat ${name} as unset: fill_template.py leaves it in the file if no value is given.
    if not value or value.startswith("${"):
        return default
    try:
        return parse_boolean(value, of_text_model=True)
    except ValueError as error:
        raise pb_utils.TritonModelException(f"{name}: {error}") from None
