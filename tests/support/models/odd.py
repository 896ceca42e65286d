"""A model that gives wrong answers on demand, and reports the input `wait` in a file."""

import time
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils

WIDE = 4096


class TritonPythonModel:
    def initialize(self, args):
        self._told = Path(args["model_repository"]) / "told"

    def execute(self, requests):
        return [self._answer(request) for request in requests]

    def _answer(self, request):
        given = pb_utils.get_input_tensor_by_name(request, "TEXT").as_numpy().reshape(-1)
        rows = np.tile(np.arange(WIDE, dtype=np.float32) / 7, (len(given), 1))
        if b"nan" in given:
            rows[-1, 3] = np.nan
        elif b"unpooled" in given:
            rows = rows.reshape(len(given), 64, WIDE // 64)
        elif b"one row" in given:
            rows = rows[:1]
        elif b"raise" in given:
            raise ValueError("at /secret/path")
        elif b"wait" in given:
            self._told.write_text("waits")
            while not request.is_cancelled():
                time.sleep(0.01)
            self._told.write_text("cancelled")
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", rows)])
