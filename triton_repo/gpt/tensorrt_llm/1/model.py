"""The model `tensorrt_llm` of upstream's GPT repository (all_models/gpt), which runs the engine.

The model gets token ids and returns complete sequences of token ids. Requests run on the executor
API of TensorRT-LLM. `executor_api` and `executor_request` are the same modules as in the
inflight_batcher_llm repository. Like upstream, the model runs one static batch after another. The
requests that Triton passes in one call run together, and later requests wait until all of them have
ended.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import triton_python_backend_utils as pb_utils
from executor_api import RequestRow, trtllm
from executor_request import executor_request

# Input names of this model that differ from the names that `executor_request` reads.
RENAMED = {"output_log_probs": "return_log_probs"}
DEFAULT_PERIOD_MS = 100


@dataclass(eq=False)
class AcceptedRequest:
    """A Triton request whose rows were passed to the executor as separate requests.

    `rows` maps the executor's request id of each row to the token id that pads the row's output.
    """

    request: Any
    rows: dict[int, int]


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        parameters = json.loads(args["model_config"])["parameters"]
        engine = _value(parameters, "engine_dir")
        if not engine:
            raise pb_utils.TritonModelException("engine_dir: found nothing; allowed: a folder")
        # Read config.json directly: this model cannot import the project's package, because that is
        # not installed beside TensorRT-LLM.
        build = json.loads((Path(engine) / "config.json").read_text())["build_config"]
        period = int(_value(parameters, "cancellation_check_period_ms") or DEFAULT_PERIOD_MS)
        self._period = timedelta(milliseconds=period)
        self._executor = trtllm.Executor(
            engine,
            trtllm.ModelType.DECODER_ONLY,
            trtllm.ExecutorConfig(max_beam_width=build["max_beam_width"]),
        )
        self._is_worker = not self._executor.can_enqueue_requests()
        if self._is_worker:
            # This process is a worker rank of an MPI job. `shutdown` returns only when the leader
            # rank shuts down. Until then, the worker computes for the leader.
            self._executor.shutdown()

    def execute(self, requests: list[Any]) -> list[Any]:
        """Run all requests to their end, and return one response for each."""
        begun = [self._begin(request) for request in requests]
        results = self._results([each for each in begun if isinstance(each, AcceptedRequest)])
        return [
            _response(each, results) if isinstance(each, AcceptedRequest) else each
            for each in begun
        ]

    def finalize(self) -> None:
        if not self._is_worker:
            self._executor.shutdown()

    def _begin(self, request: Any) -> Any:
        """Start a request. Return the accepted request, or an error response if it is refused."""
        tensors = {RENAMED.get(t.name(), t.name()): t for t in request.inputs()}
        batch = len(tensors["input_lengths"].as_numpy())
        try:
            rows = [RequestRow(tensors, index) for index in range(batch)]
            pads = [row.require("pad_id") for row in rows]
            ids = self._executor.enqueue_requests(
                [executor_request(row, exclude_input=False) for row in rows]
            )
        # Answer only this request with the error. Other requests continue.
        except Exception as error:
            return _error(str(error))
        return AcceptedRequest(request, dict(zip(ids, pads, strict=True)))

    def _results(self, accepted: list[AcceptedRequest]) -> dict[int, Any]:
        """Wait until all rows have ended, and return the last response of each row.

        The keys are the executor's request ids.
        """
        running = {engine_id: each for each in accepted for engine_id in each.rows}
        results = {}
        while running:
            for response in self._executor.await_responses(timeout=self._period):
                if response.has_error() or response.result.is_final:
                    results[response.request_id] = response
                    del running[response.request_id]
            for engine_id, each in running.items():
                if each.request.is_cancelled():
                    self._executor.cancel_request(engine_id)
        return results


def _response(accepted: AcceptedRequest, results: dict[int, Any]) -> Any:
    """Return the response to a request, with only the outputs that the client requested.

    output_ids: int32 [B, beams, longest]; the ids of prompt and output, padded with the pad id.
    log_probs: float32 [B, longest, beams]; of the generated tokens, padded with zeros.
    """
    responses = [results[engine_id] for engine_id in accepted.rows]
    for response in responses:
        if response.has_error():
            return _error(response.error_msg)
    found = [response.result for response in responses]
    ids = [result.output_token_ids for result in found]
    arrays = {"output_ids": _pad(ids, accepted.rows.values(), np.int32)}
    if found[0].log_probs is not None:
        values = [result.log_probs for result in found]
        log_probs = _pad(values, [0.0] * len(values), np.float32)
        arrays["log_probs"] = np.ascontiguousarray(log_probs.transpose(0, 2, 1))
    requested = accepted.request.requested_output_names()
    # Omit outputs that the client did not request. Triton 2.51 frees such outputs without holding
    # the interpreter's lock, which can crash this process.
    return pb_utils.InferenceResponse(
        [pb_utils.Tensor(name, array) for name, array in arrays.items() if name in requested]
    )


def _pad(rows: list[list[list[Any]]], paddings: Iterable[float], dtype: type) -> npt.NDArray[Any]:
    """Return the beams of all rows as an array [rows, beams, longest].

    Each row is filled up with its own value in `paddings`.
    """
    beams = max(len(row) for row in rows)
    longest = max(len(beam) for row in rows for beam in row)
    padded = [
        [beam + [padding] * (longest - len(beam)) for beam in row]
        + [[padding] * longest] * (beams - len(row))
        for row, padding in zip(rows, paddings, strict=True)
    ]
    return np.array(padded, dtype)


def _error(message: str) -> Any:
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(message))


def _value(parameters: dict[str, Any], name: str) -> str:
    value: str = parameters.get(name, {}).get("string_value", "")
    # Treat ${name} as unset: fill_template.py leaves it in the file if no value is given.
    return "" if value.startswith("${") else value
