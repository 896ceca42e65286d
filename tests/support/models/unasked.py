"""A core model that sends all outputs enabled by flags, even those that were not requested.

Upstream's `tensorrt_llm/1/model.py` does the same: one thread sends the responses of all requests,
with `batch_index` if Triton batched several, and all statistics if any is requested. Triton must
drop the outputs that the client did not name. The generated token ids repeat the prompt.
"""

import queue
import threading
import time
from itertools import cycle, islice

import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
STATS = (
    *(("kv_cache_alloc_new_blocks", np.int32), ("kv_cache_reused_blocks", np.int32)),
    ("kv_cache_alloc_total_blocks", np.int32),
)
TIMES = (
    *(("arrival_time_ns", np.int64), ("first_scheduled_time_ns", np.int64)),
    *(("first_token_time_ns", np.int64), ("last_token_time_ns", np.int64)),
    *(("acceptance_rate", np.float32), ("total_accepted_draft_tokens", np.int32)),
    ("total_draft_tokens", np.int32),
)


class TritonPythonModel:
    def initialize(self, args):
        self._steps = queue.SimpleQueue()
        self._stopping = threading.Event()
        self._threads = [threading.Thread(target=work) for work in (self._send, self._watch)]
        for thread in self._threads:
            thread.start()

    def execute(self, requests):
        for index, request in enumerate(requests):
            sender = request.get_response_sender()
            tensors = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
            if tensors.get("stop", np.zeros(1)).any():
                sender.send(pb_utils.InferenceResponse([]), FINAL)
                continue
            ids = tensors["input_ids"].reshape(-1).tolist()
            count = int(tensors["request_output_len"].reshape(-1)[0])
            more = ()
            if "return_kv_cache_reuse_stats" in tensors:
                more = STATS
            if "return_perf_metrics" in tensors:
                more = STATS + TIMES
            if len(requests) > 1:
                more += (("batch_index", np.int32),)
            self._steps.put((sender, index, more, list(islice(cycle(ids), count))))

    def finalize(self):
        self._steps.put(None)
        self._stopping.set()
        for thread in self._threads:
            thread.join()

    def _watch(self):
        """Keep the interpreter busy, like upstream's threads for cancellation and metrics."""
        while not self._stopping.is_set():
            [np.expand_dims(np.array([n], np.int32), 0) for n in range(20)]
            time.sleep(0)

    def _send(self):
        while (step := self._steps.get()) is not None:
            sender, index, more, (first, *rest) = step
            tensors = [
                pb_utils.Tensor("output_ids", np.array([[[first]]], np.int32)),
                pb_utils.Tensor("sequence_length", np.array([[1]], np.int32)),
                *(pb_utils.Tensor(name, np.array([[index]], dtype)) for name, dtype in more),
            ]
            response = pb_utils.InferenceResponse(tensors)
            # Triton may free dropped outputs once the model has no reference to them.
            del tensors
            if rest:
                self._steps.put((sender, index, more, rest))
            sender.send(response, 0 if rest else FINAL)
