"""The model `tensorrt_llm_bls` of inflight_batcher_llm, which generates text from a text prompt.

The model calls preprocessing, tensorrt_llm and postprocessing on the same server. It behaves like
upstream's model of v0.17, and also has the guided decoding of v0.19. As in upstream, each instance
serves one request at a time, so `bls_instance_count` limits the concurrency. Unlike upstream, the
model stops its request to tensorrt_llm if the client cancels its RPC. Speculative decoding with a
draft model and multimodal inputs are refused with an error.
"""

import json
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import triton_python_backend_utils as pb_utils
from booleans import parse_boolean

Arrays = dict[str, npt.NDArray[Any]]
IdsSoFar = defaultdict[tuple[int, int], list[int]]

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
DEFAULT_PERIOD_MS = 100

PREPROCESSING_INPUTS = {
    "text_input": "QUERY",
    "decoder_text_input": "DECODER_QUERY",
    "max_tokens": "REQUEST_OUTPUT_LEN",
    "bad_words": "BAD_WORDS_DICT",
    "stop_words": "STOP_WORDS_DICT",
    "embedding_bias_words": "EMBEDDING_BIAS_WORDS",
    "embedding_bias_weights": "EMBEDDING_BIAS_WEIGHTS",
    "end_id": "END_ID",
    "pad_id": "PAD_ID",
    "prompt_table_extra_id": "PROMPT_TABLE_EXTRA_ID",
}
PREPROCESSING_OUTPUTS = {
    "INPUT_ID": "input_ids",
    "REQUEST_INPUT_LEN": "input_lengths",
    "DECODER_INPUT_ID": "decoder_input_ids",
    "REQUEST_DECODER_INPUT_LEN": "decoder_input_lengths",
    "REQUEST_OUTPUT_LEN": "request_output_len",
    "BAD_WORDS_IDS": "bad_words_list",
    "STOP_WORDS_IDS": "stop_words_list",
    "EMBEDDING_BIAS": "embedding_bias",
    "OUT_END_ID": "end_id",
    "OUT_PAD_ID": "pad_id",
    "OUT_PROMPT_TABLE_EXTRA_IDS": "prompt_table_extra_ids",
}
CORE_INPUTS = {
    "top_k": "runtime_top_k",
    "top_p": "runtime_top_p",
    "length_penalty": "len_penalty",
    "stream": "streaming",
} | {
    name: name
    for name in (
        *("beam_width", "num_return_sequences", "temperature"),
        # The comments `until` and `since` name releases. `triton_repo.render` copies only the lines
        # for the chosen release.
        *("random_seed", "min_length"),  # until 0.19
        *("seed", "min_tokens"),  # since 0.20
        "return_kv_cache_reuse_stats",  # until 0.17
        "return_perf_metrics",  # since 0.19
        *("repetition_penalty", "presence_penalty", "frequency_penalty"),
        *("return_log_probs", "return_context_logits", "return_generation_logits"),
        *("exclude_input_in_output", "prompt_embedding_table", "prompt_vocab_size"),
        *("lora_task_id", "lora_weights", "lora_config"),
        *("guided_decoding_guide_type", "guided_decoding_guide"),
    )
}
MULTIMODAL = ("image_input", "image_bytes_input", "image_url_input", "video_bytes_input")
REFUSED_PARAMETERS = ("tensorrt_llm_draft_model_name", "multimodal_encoders_name")


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        config = json.loads(args["model_config"])
        parameters = config.get("parameters", {})
        for name in REFUSED_PARAMETERS:
            if _text(parameters, name):
                raise pb_utils.TritonModelException(f"{name}: not supported; leave it out")
        accumulate = _text(parameters, "accumulate_tokens") or "false"
        try:
            self._accumulate = parse_boolean(accumulate, of_text_model=True)
        except ValueError as error:
            raise pb_utils.TritonModelException(f"accumulate_tokens: {error}") from None
        self._core = _text(parameters, "tensorrt_llm_model_name") or "tensorrt_llm"
        period = _text(parameters, "cancellation_check_period_ms") or DEFAULT_PERIOD_MS
        self._period_s = int(period) / 1000
        self._decoupled = pb_utils.using_decoupled_model_transaction_policy(config)
        self._current: tuple[Any, str] | None = None
        self._gate = threading.Lock()
        """Lock for `_current`, which prevents a call of `is_cancelled` while a response is sent.

        Triton 2.51 would crash if the two overlapped.
        """
        self._stopping = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="cancellation")
        self._watcher.start()

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            sender = request.get_response_sender()
            # Use a new id for the request to tensorrt_llm (the inner request). tensorrt_llm stops
            # requests by id. With the client's id, `_stop` could end another client's request.
            inner_id = uuid.uuid4().hex
            # The thread `_watcher` polls only requests without streaming. For a stream, `_serve`
            # polls between two responses, because Triton crashes if polling and sending overlap.
            self._current = None if _streams(request) else (sender, inner_id)
            try:
                last = self._serve(request, sender, inner_id)
            # Answer only this request with the error. Other requests continue.
            except Exception as error:
                last = pb_utils.InferenceResponse(error=pb_utils.TritonError(str(error)))
            with self._gate:
                self._current = None
            if last is None:
                sender.send(flags=FINAL)
            else:
                sender.send(last, FINAL)

    def finalize(self) -> None:
        self._stopping.set()
        self._watcher.join()

    def _serve(self, request: Any, sender: Any, inner_id: str) -> Any:
        """Run a request. Return the response that the caller must send as the final response.

        If the model is decoupled, this method sends all responses itself, and returns None. If not,
        there is a single response, and this method returns it.
        """
        replies = self._replies(request, inner_id)
        if not self._decoupled:
            (reply,) = replies
            return reply
        checked, stopped = time.monotonic(), False
        for reply in replies:
            sender.send(reply)
            if stopped or self._current is not None:
                continue
            if time.monotonic() - checked >= self._period_s:
                checked = time.monotonic()
                if stopped := sender.is_cancelled():
                    self._stop(inner_id)
        return None

    def _watch(self) -> None:
        while not self._stopping.wait(self._period_s):
            try:
                # Stop the inner request in every period: the first stop may arrive before the
                # request.
                if inner_id := self._find_abandoned():
                    self._stop(inner_id)
            # Log the error and continue: the stop may succeed in the next period.
            except Exception as error:
                pb_utils.Logger.log_error(f"cancellation: {error!r}")

    def _find_abandoned(self) -> str | None:
        """Return the inner request's id if the client has disconnected, else None."""
        with self._gate:
            if self._current is None:
                return None
            sender, inner_id = self._current
            return inner_id if sender.is_cancelled() else None

    def _stop(self, inner_id: str) -> None:
        zero = np.zeros((1, 1), np.int32)
        inputs = {"input_ids": zero, "input_lengths": zero, "request_output_len": zero}
        stop = {**inputs, "stop": np.ones((1, 1), np.bool_)}
        for _ in self._call(self._core, stop, [], inner_id):
            pass

    def _replies(self, request: Any, inner_id: str) -> Iterator[Any]:
        inputs = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        _check(inputs)
        (tokens,) = self._call(
            "preprocessing",
            {name: inputs[key] for key, name in PREPROCESSING_INPUTS.items() if key in inputs},
            list(PREPROCESSING_OUTPUTS),
        )
        core = {PREPROCESSING_OUTPUTS[name]: array for name, array in tokens.items()}
        for key, name in CORE_INPUTS.items():
            if key in inputs:
                # tensorrt_llm needs inputs with one value per row as [B, 1]. Inputs with `reshape`
                # in config.pbtxt arrive here as [B].
                core[name] = inputs[key] if inputs[key].ndim > 1 else inputs[key][:, None]
        wanted = {"output_ids", "sequence_length", "batch_index", "sequence_index"}
        wanted.update(request.requested_output_names())
        wanted.discard("text_output")
        ids_so_far: IdsSoFar = defaultdict(list)
        for outputs in self._call(self._core, core, list(wanted), inner_id):
            try:
                reply = self._reply(outputs, ids_so_far)
            except Exception:
                self._stop(inner_id)
                raise
            yield reply

    def _reply(self, outputs: Arrays, ids_so_far: IdsSoFar) -> Any:
        beams = outputs.pop("output_ids")
        lengths = outputs.pop("sequence_length")
        if self._accumulate:
            beams, lengths = _accumulate(ids_so_far, beams, lengths, outputs)
        (text,) = self._call(
            "postprocessing", {"TOKENS_BATCH": beams, "SEQUENCE_LENGTH": lengths}, ["OUTPUT"]
        )
        tensors = {"text_output": text["OUTPUT"], **outputs}
        return pb_utils.InferenceResponse(
            [pb_utils.Tensor(name, array) for name, array in tensors.items()]
        )

    def _call(
        self, model: str, inputs: Mapping[str, Any], outputs: list[str], request_id: str = ""
    ) -> Iterator[Arrays]:
        """Call another model of this server. Yield the outputs of each response that has outputs.

        Raises RuntimeError with the message of an error response.
        """
        request = pb_utils.InferenceRequest(
            model_name=model,
            inputs=[pb_utils.Tensor(name, array) for name, array in inputs.items()],
            requested_output_names=outputs,
            request_id=request_id,
        )
        decoupled = self._decoupled and model == self._core
        responses = request.exec(decoupled=True) if decoupled else [request.exec()]
        for response in responses:
            if response.has_error():
                raise RuntimeError(response.error().message())
            tensors = {tensor.name(): tensor for tensor in response.output_tensors()}
            if tensors:
                yield {name: tensor.as_numpy() for name, tensor in tensors.items()}


def _streams(request: Any) -> bool:
    stream = pb_utils.get_input_tensor_by_name(request, "stream")
    return stream is not None and bool(stream.as_numpy().any())


def _check(inputs: Arrays) -> None:
    if "text_input" not in inputs:
        raise ValueError("text_input is required")
    if "max_tokens" not in inputs or (inputs["max_tokens"] <= 0).any():
        raise ValueError("max_tokens must be a single value > 0")
    for name in MULTIMODAL:
        if name in inputs:
            raise ValueError(f"{name}: multimodal inputs are not supported; leave it out")
    if "num_draft_tokens" in inputs:
        if "stream" in inputs and inputs["stream"].any():
            raise ValueError("streaming is not supported with speculative decoding")
        raise ValueError("cannot perform speculative decoding without draft model")


def _accumulate(
    ids_so_far: IdsSoFar,
    beams: npt.NDArray[np.int32],
    lengths: npt.NDArray[np.int32],
    outputs: Arrays,
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Add the new ids of a response to the ids of its sequence, and return all ids so far.

    Args:
        ids_so_far: ids by batch index and sequence index. This function adds the new ids.
        beams: the new ids, [1, 1, n], possibly with padding.
        lengths: the number of new ids, [1, 1].
        outputs: the other outputs of the response, which state the batch index and the sequence
            index.

    Return the ids so far, int32 [1, 1, n], and their number, int32 [1, 1].
    """
    if beams.shape[1] != 1:
        raise ValueError("Accumulation of tokens is only implemented for beam width = 1")
    batch_index, sequence_index = (
        int(outputs[name].item()) if name in outputs else 0
        for name in ("batch_index", "sequence_index")
    )
    ids = ids_so_far[batch_index, sequence_index]
    ids.extend(beams[0, 0, : lengths[0, 0]].tolist())
    return np.array([[ids]], np.int32), np.array([[len(ids)]], np.int32)


def _text(parameters: Mapping[str, Any], name: str) -> str:
    value: str = parameters.get(name, {}).get("string_value", "")
    # Treat ${name} as unset: fill_template.py leaves it in the file if no value is given.
    return "" if value.startswith("${") else value
