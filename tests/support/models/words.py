"""A real embedding model: the static word embeddings in the wordllama wheel.

A text's vector is the mean of its tokens' vectors, as WordLlama computes it. The parameter `takes`
selects the input: `text`, token `ids` with their mask, or a query and a document (`pair`), whose
score is the cosine of the two vectors.
"""

import importlib.util
import json
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils
from safetensors.numpy import load_file
from tokenizers import Tokenizer


class TritonPythonModel:
    def initialize(self, args):
        config = json.loads(args["model_config"])
        self._answer = getattr(self, "_" + config["parameters"]["takes"]["string_value"])
        # The package is only located, not imported: two of its files are enough.
        wheel = Path(importlib.util.find_spec("wordllama").origin).parent
        [weights] = load_file(wheel / "weights" / "l2_supercat_256.safetensors").values()
        self._weights = weights.astype(np.float32)
        tokenizer = wheel / "tokenizers" / "l2_supercat_tokenizer_config.json"
        self._tokenizer = Tokenizer.from_file(str(tokenizer))

    def execute(self, requests):
        return [pb_utils.InferenceResponse([self._answer(request)]) for request in requests]

    def _text(self, request):
        return pb_utils.Tensor("EMBEDDING", self._embed(_texts(request, "TEXT")))

    def _ids(self, request):
        ids = _array(request, "input_ids")
        mask = _array(request, "attention_mask").astype(np.float32)[..., None]
        return pb_utils.Tensor("EMBEDDING", self._mean(ids, mask))

    def _pair(self, request):
        query, document = (self._embed(_texts(request, name)) for name in ("QUERY", "DOCUMENT"))
        norms = np.linalg.norm(query, axis=1) * np.linalg.norm(document, axis=1)
        scores = (query * document).sum(axis=1) / norms
        return pb_utils.Tensor("SCORE", scores[:, None].astype(np.float32))

    def _embed(self, texts):
        found = [self._tokenizer.encode(text).ids for text in texts]
        rows = [self._mean(np.array([ids]), np.ones((1, len(ids), 1), np.float32)) for ids in found]
        return np.concatenate(rows)

    def _mean(self, ids, mask):
        sums = (self._weights[ids] * mask).sum(axis=1)
        return (sums / mask.sum(axis=1)).astype(np.float32)


def _array(request, name):
    return pb_utils.get_input_tensor_by_name(request, name).as_numpy()


def _texts(request, name):
    return [text.decode() for text in _array(request, name).reshape(-1)]
