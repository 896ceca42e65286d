"""The model `tensorrt_llm` of inflight_batcher_llm, which runs the engine on token ids.

The same module serves all template sets in `triton_repo.releases`. Guided decoding is available in
all of them, although upstream added it in v0.19. Requests run on the Python API
`tensorrt_llm.bindings.executor`. Where TensorRT-LLM is not installed,
`triton_repo.cpu_executor.bindings` provides the same names on the CPU.

A Triton request with B rows becomes B requests to the executor. One thread waits for the executor's
responses, and sends each response immediately. A second thread polls for cancelled RPCs, and a
third thread publishes metrics. An error ends only the request in which it occurs.

See decisions 003 and 048 in docs/decisions.
"""

import json
import threading
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import numpy as np
import numpy.typing as npt
import triton_python_backend_utils as pb_utils
from executor_api import RequestRow, triton_tensor, trtllm
from executor_config import ModelParameters, executor_config
from executor_request import executor_request
from executor_stats import Gauges, TokenHistograms
from perf_metrics import perf_tensors

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
DEFAULT_PERIOD_MS = 100
# Longest wait for responses in one call. The value has little effect, because every response and a
# shutdown end the wait earlier.
AWAIT = timedelta(seconds=10)


@dataclass(eq=False)
class PendingCaller:
    """A Triton request whose final response was not sent yet."""

    request_id: str
    sender: Any
    outputs: frozenset[str]
    """The outputs that the client requested."""
    batched: bool
    unfinished: int
    """Number of the request's rows without a final response."""
    cancelled: bool = False
    answered: bool = False
    gate: threading.Lock = field(default_factory=threading.Lock)
    """Lock for `is_cancelled` and the final response: Triton 2.51 crashes if the two overlap."""

    def send(self, reply: Any, flags: int) -> None:
        if flags != FINAL:
            _send(self.sender, reply, flags)
            return
        with self.gate:
            self.answered = True
            _send(self.sender, reply, flags)

    def is_cancelled(self) -> bool:
        with self.gate:
            return not self.answered and self.sender.is_cancelled()


@dataclass(eq=False)
class RunningRow:
    """A request in the executor, for one row of a Triton request."""

    caller: PendingCaller
    index: int
    prompt: int
    """Number of prompt tokens."""
    restated: int
    """Number of prompt tokens that each response repeats at its start."""
    delta: bool
    """True if each response has only new tokens. False if it has all tokens generated so far."""
    sequences: int
    generated: int = 0

    def count(self, ids: list[int]) -> None:
        """Update the number of generated tokens with the token ids of one response."""
        new = len(ids) - self.restated
        self.generated = self.generated + new if self.delta else new


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        config = json.loads(args["model_config"])
        parameters = ModelParameters(config)
        engine = parameters.text("gpt_model_path")
        if engine is None:
            raise pb_utils.TritonModelException("gpt_model_path: found nothing; allowed: a folder")
        self._decoupled = pb_utils.using_decoupled_model_transaction_policy(config)
        self._exclude_input = bool(parameters.boolean("exclude_input_in_output"))
        options = executor_config(config)
        inflight = options.batching_type == trtllm.BatchingType.INFLIGHT
        self._executor = trtllm.Executor(engine, trtllm.ModelType.DECODER_ONLY, options)
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._running: dict[int, RunningRow] = {}
        self._broken: str | None = None
        self._is_worker = not self._executor.can_enqueue_requests()
        if self._is_worker:
            # This process is a worker rank of an MPI job. `shutdown` returns only when the leader
            # rank shuts down. Until then, the worker computes for the leader.
            self._executor.shutdown()
            return
        labels = {"model": args["model_name"], "version": args["model_version"]}
        self._gauges = Gauges(labels, inflight=inflight)
        self._histograms = TokenHistograms(labels)
        self._awaiter = threading.Thread(target=self._await_responses, name="awaiter")
        self._watchers = [
            threading.Thread(target=self._every, args=(period / 1000, action), name=name)
            for name, action, period in (
                (
                    *("cancellation", self._cancel_abandoned),
                    parameters.integer("cancellation_check_period_ms") or DEFAULT_PERIOD_MS,
                ),
                (
                    *("stats", self._publish_stats),
                    parameters.integer("stats_check_period_ms") or DEFAULT_PERIOD_MS,
                ),
            )
        ]
        for thread in (self._awaiter, *self._watchers):
            thread.start()

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            sender = request.get_response_sender()
            try:
                self._accept(request, sender)
            # Answer only this request with the error. Other requests continue.
            except Exception as error:
                _send(sender, _error(str(error)), FINAL)

    def finalize(self) -> None:
        if self._is_worker:
            return
        self._stopping.set()
        for thread in self._watchers:
            thread.join()
        with self._lock:
            self._cancel(list(self._running))
        # Shut down only after all requests were cancelled: this call waits for their end.
        self._executor.shutdown()
        self._awaiter.join()
        # Delete the metrics now: if they exist longer than the shared memory, Triton 2.51 ends this
        # process by a signal.
        del self._gauges, self._histograms

    def _accept(self, request: Any, sender: Any) -> None:
        tensors = {tensor.name(): tensor for tensor in request.inputs()}
        request_id = request.request_id()
        if "stop" in tensors and tensors["stop"].as_numpy().any():
            self._stop(request_id)
            _send(sender, pb_utils.InferenceResponse([]), FINAL)
            return
        rows = self._convert(tensors, request_id)
        caller = PendingCaller(
            request_id=request_id,
            sender=sender,
            outputs=frozenset(request.requested_output_names()),
            batched=len(rows) > 1,
            unfinished=len(rows),
        )
        # Hold the lock while queueing. Otherwise the awaiting thread could get a response before
        # `_running` has the request's id.
        with self._lock:
            if self._broken is not None:
                raise RuntimeError(self._broken)
            for index, engine_id in enumerate(self._executor.enqueue_requests(rows)):
                self._running[engine_id] = _build_running(caller, index, rows[index])

    def _convert(self, tensors: dict[str, Any], request_id: str) -> list[Any]:
        batch = len(tensors["input_lengths"].as_numpy())
        try:
            rows = [
                executor_request(RequestRow(tensors, index), exclude_input=self._exclude_input)
                for index in range(batch)
            ]
        except Exception as error:
            raise ValueError(
                "An error occurred when processing the input values for request id "
                f"{request_id}, the error was '{error}'"
            ) from error
        if not self._decoupled:
            if any(row.streaming for row in rows):
                raise ValueError("Streaming is only supported in decoupled mode.")
            if sum(_responses(row) for row in rows) > 1:
                raise ValueError(
                    "Batch size > 1 requires the tensorrt_llm backend to be using decoupled "
                    "transaction policy, and so does num_return_sequences > 1"
                )
        return rows

    def _stop(self, request_id: str) -> None:
        if not request_id:
            raise ValueError("A request id must be provided for request cancellation")
        with self._lock:
            self._cancel(
                engine_id
                for engine_id, running in self._running.items()
                if running.caller.request_id == request_id
            )

    def _cancel(self, engine_ids: Any) -> None:
        for engine_id in engine_ids:
            self._executor.cancel_request(engine_id)

    def _await_responses(self) -> None:
        while True:
            try:
                responses = self._executor.await_responses(timeout=AWAIT)
            except Exception as error:
                if not self._stopping.is_set():
                    self._break(f"The executor is gone: {error}")
                return
            for response in responses:
                self._deliver(response)
            if not responses and self._stopping.is_set():
                return

    def _break(self, message: str) -> None:
        pb_utils.Logger.log_error(message)
        with self._lock:
            self._broken = message
            callers = {running.caller for running in self._running.values()}
            self._running.clear()
        for caller in callers:
            caller.send(_error(message), FINAL)

    def _deliver(self, response: Any) -> None:
        engine_id = response.request_id
        with self._lock:
            running = self._running.get(engine_id)
        if running is None:
            return
        try:
            final = response.has_error() or response.result.is_final
            if response.has_error():
                reply = _error(response.error_msg)
            else:
                reply = pb_utils.InferenceResponse(_tensors(running, response.result))
                if final:
                    self._histograms.observe(running.prompt, running.generated)
        # End only this request: the thread also delivers the responses of all other requests.
        except Exception as error:
            reply, final = _error(f"Error encountered while populating response: {error}"), True
            self._executor.cancel_request(engine_id)
        caller = running.caller
        if final:
            with self._lock:
                del self._running[engine_id]
                caller.unfinished -= 1
        caller.send(reply, 0 if caller.unfinished else FINAL)

    def _every(self, seconds: float, action: Any) -> None:
        while not self._stopping.wait(seconds):
            try:
                action()
            # Log the error and continue: the action may succeed the next time.
            except Exception as error:
                pb_utils.Logger.log_error(f"{threading.current_thread().name}: {error!r}")

    def _cancel_abandoned(self) -> None:
        with self._lock:
            callers = {running.caller for running in self._running.values()}
        for caller in callers:
            if not caller.cancelled and caller.is_cancelled():
                caller.cancelled = True
                with self._lock:
                    self._cancel(
                        engine_id
                        for engine_id, running in self._running.items()
                        if running.caller is caller
                    )

    def _publish_stats(self) -> None:
        # Use only the newest iteration, because gauges have no history.
        if stats := self._executor.get_latest_iteration_stats():
            self._gauges.update(stats[-1])


def _responses(request: Any) -> int:
    """Return the number of responses to a request without streaming.

    Each sample has its own response. All beams of a beam search are in one response.
    """
    sampling = request.sampling_config
    return 1 if sampling.beam_width > 1 else sampling.num_return_sequences or 1


def _build_running(caller: PendingCaller, index: int, request: Any) -> RunningRow:
    prompt = len(request.input_token_ids)
    beams = request.sampling_config.beam_width
    includes_prompt = not request.streaming and not request.output_config.exclude_input_from_output
    return RunningRow(
        caller=caller,
        index=index,
        prompt=prompt,
        restated=prompt if includes_prompt else 0,
        # In a stream with several beams, each response has all tokens so far. In all other cases, a
        # response has only new tokens, so `RunningRow.count` must add up the tokens of all
        # responses. Several samples are counted together.
        delta=not request.streaming or beams == 1,
        sequences=request.sampling_config.num_return_sequences or 1,
    )


def _error(message: str) -> Any:
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(message))


def _send(sender: Any, reply: Any, flags: int) -> None:
    try:
        sender.send(reply, flags)
    # Log the error and continue: Triton may have closed the sender, and the thread serves other
    # requests, too.
    except Exception as error:
        pb_utils.Logger.log_error(f"A response could not be sent: {error}")


def _tensors(running: RunningRow, result: Any) -> list[Any]:
    """Return the requested outputs of one `Result`, each with a batch dimension of 1.

    output_ids: int32 [1, beams, longest], padded with -1.
    sequence_length: int32 [1, beams].
    cum_log_probs: float32 [1, beams].
    output_log_probs: float32 [1, beams, tokens], padded with -1.
    context_logits: [1, prompt, vocabulary].
    generation_logits: [1, beams, tokens, vocabulary]; streaming: [1, tokens, 1, vocabulary].

    All other outputs are [1, 1]. Times are int64, in nanoseconds on the executor's monotonic clock.
    acceptance_rate is float32. Counts and indices are int32.
    """
    beams = result.output_token_ids
    running.count(beams[0])
    outputs = running.caller.outputs
    arrays: dict[str, npt.NDArray[Any]] = {}
    if "output_ids" in outputs:
        arrays["output_ids"] = _pad(beams, np.int32)
    if "sequence_length" in outputs:
        arrays["sequence_length"] = np.array([[len(ids) for ids in beams]], np.int32)
    if result.cum_log_probs is not None:
        arrays["cum_log_probs"] = np.array([result.cum_log_probs], np.float32)
    if result.log_probs is not None:
        arrays["output_log_probs"] = _pad(result.log_probs, np.float32)
    if running.caller.batched:
        arrays["batch_index"] = np.array([[running.index]], np.int32)
    if running.sequences > 1:
        arrays["sequence_index"] = np.array([[result.sequence_index]], np.int32)
    if result.request_perf_metrics is not None:
        arrays |= perf_tensors(result.request_perf_metrics, outputs)
    tensors = [pb_utils.Tensor(name, array) for name, array in arrays.items() if name in outputs]
    for name in ("context_logits", "generation_logits"):
        logits = getattr(result, name)
        if logits is not None and name in outputs:
            tensors.append(triton_tensor(name, logits))
    return tensors


def _pad(rows: list[list[Any]], dtype: type) -> npt.NDArray[Any]:
    """Return rows of unequal length as an array [1, rows, longest], padded with -1."""
    longest = max(len(row) for row in rows)
    return np.array([[row + [-1] * (longest - len(row)) for row in rows]], dtype)
