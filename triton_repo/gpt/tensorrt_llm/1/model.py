"""The core model of the GPT repository, token ids in and whole sequences out, as in all_models/gpt.

Its requests become requests of the executor, as those of inflight_batcher_llm's `tensorrt_llm` do,
with whose modules it is rendered. What Triton hands over together runs together, and what comes
later waits for the last of it: upstream, too, runs one static batch after another.
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

# What the executor's input is called here.
RENAMED = {"output_log_probs": "return_log_probs"}
DEFAULT_PERIOD_MS = 100


@dataclass(eq=False)
class AcceptedRequest:
    """A Triton request under way: by the executor's id of each row of its batch the pad id."""

    request: Any
    rows: dict[int, int]


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        parameters = json.loads(args["model_config"])["parameters"]
        engine = _value(parameters, "engine_dir")
        if not engine:
            raise pb_utils.TritonModelException("engine_dir: found nothing; allowed: a folder")
        # Beside TensorRT-LLM this file stands alone: the reader in `adapters` is not there.
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
            # A worker rank serves the leader from inside this call until it shuts down.
            self._executor.shutdown()

    def execute(self, requests: list[Any]) -> list[Any]:
        """One response for each request, when all of them are done."""
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
        """What was accepted, or the response that refuses it."""
        tensors = {RENAMED.get(t.name(), t.name()): t for t in request.inputs()}
        batch = len(tensors["input_lengths"].as_numpy())
        try:
            rows = [RequestRow(tensors, index) for index in range(batch)]
            pads = [row.require("pad_id") for row in rows]
            ids = self._executor.enqueue_requests(
                [executor_request(row, exclude_input=False) for row in rows]
            )
        # Whatever goes wrong with one request is that client's answer.
        except Exception as error:
            return _error(str(error))
        return AcceptedRequest(request, dict(zip(ids, pads, strict=True)))

    def _results(self, accepted: list[AcceptedRequest]) -> dict[int, Any]:
        """The last response of each row, by the executor's id."""
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
    """The answer to one request, of the outputs that it asked for.

    output_ids int32 [B, beams, longest]: the prompt first, the pad id behind the end. log_probs
    float32 [B, longest, beams] of what was generated, 0 behind the end.
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
    # Triton 2.51 frees what nobody asked for without the interpreter's lock.
    return pb_utils.InferenceResponse(
        [pb_utils.Tensor(name, array) for name, array in arrays.items() if name in requested]
    )


def _pad(rows: list[list[list[Any]]], paddings: Iterable[float], dtype: type) -> npt.NDArray[Any]:
    """Each row's beams as [rows, beams, longest], behind their end the row's padding."""
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
    # fill_template.py leaves what was not given as ${name}.
    return "" if value.startswith("${") else value
