"""A runner and a client of a real tritonserver with our model repository."""

from __future__ import annotations

import contextlib
import http.client
import json
import queue
import shutil
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tritonclient.grpc as triton

from ops.local_stack.ports import LOCALHOST, PortClaims
from ops.local_stack.process import Child
from ops.local_stack.servers import Ports, answers_ok, triton_child
from ops.local_stack.shared_memory import region_prefix, remove_regions
from triton_repo.parameters import Value
from triton_repo.releases import DEFAULT
from triton_repo.render import render

MODEL = Path(__file__).parents[2] / "demo" / "model"
# Answers of `long_model` take longer than a process ever waits for the CPU.
LONG_SEQ_LEN = 32_768
LONG_ANSWER = 30_000
# Triton (2.51) crashes with this message if a model gets no CPU time for seconds while it starts.
# Tests then restart it (github.com/triton-inference-server/server/issues/8882).
STARVED = "boost::interprocess::lock_exception"
READY_WITHIN = 240.0
ANSWER_WITHIN = 120.0

Arrays = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class Reply:
    """A response on a stream: outputs or an error."""

    request_id: str
    outputs: Arrays
    final: bool
    error: str | None = None


class Server:
    """A running tritonserver."""

    child: Child
    """The server's process, if `serving` started it."""

    def __init__(self, ports: Ports) -> None:
        self.grpc = f"{LOCALHOST}:{ports.triton_grpc}"
        self.http = f"{LOCALHOST}:{ports.triton_http}"
        self._metrics = f"http://{LOCALHOST}:{ports.triton_metrics}/metrics"

    def generate(self, model: str, **body: Any) -> tuple[int, dict[str, Any]]:
        status, text = self._post(f"/v2/models/{model}/generate", body)
        return status, json.loads(text)

    def generate_stream(self, model: str, **body: Any) -> list[dict[str, Any]]:
        status, text = self._post(f"/v2/models/{model}/generate_stream", body)
        assert status == 200, text
        return [
            json.loads(line.removeprefix("data: "))
            for line in text.splitlines()
            if line.startswith("data: ")
        ]

    def why_unavailable(self) -> dict[str, str]:
        """Return the reason by model for each model that Triton could not load."""
        _, text = self._post("/v2/repository/index", {})
        found = json.loads(text)
        # An ensemble whose models are missing has no state.
        return {
            each["name"]: each["reason"] for each in found if each.get("state") == "UNAVAILABLE"
        }

    def _post(self, path: str, body: dict[str, Any]) -> tuple[int, str]:
        connection = http.client.HTTPConnection(self.http, timeout=ANSWER_WITHIN)
        with contextlib.closing(connection):
            connection.request("POST", path, json.dumps(body))
            response = connection.getresponse()
            return response.status, response.read().decode()

    def config(self, model: str) -> Any:
        with contextlib.closing(triton.InferenceServerClient(self.grpc)) as client:
            return client.get_model_config(model).config

    def metric(self, family: str, **labels: str) -> float:
        """Return the value of the only sample that has these labels."""
        with urllib.request.urlopen(self._metrics, timeout=ANSWER_WITHIN) as page:
            lines = page.read().decode().splitlines()
        wanted = [f'{name}="{value}"' for name, value in labels.items()]
        found = [
            line
            for line in lines
            if line.startswith(f"{family}{{") and all(label in line for label in wanted)
        ]
        assert len(found) == 1, (family, labels, found)
        return float(found[0].rpartition(" ")[2])

    def wait_metric(self, value: float, family: str, within: float = 60.0, **labels: str) -> None:
        """Wait until the sample has the value."""
        deadline = time.monotonic() + within
        while (found := self.metric(family, **labels)) != value:
            assert time.monotonic() < deadline, f"{family} {labels}: {found}, not {value}"
            time.sleep(0.01)

    def wait_active(self, count: int, within: float = 60.0) -> None:
        """Wait until the engine reports `count` active requests."""
        labels = {"request_type": "active"}
        self.wait_metric(count, "nv_trt_llm_request_metrics", within, **labels)

    def unary(self, model: str, inputs: Arrays) -> Arrays:
        with contextlib.closing(triton.InferenceServerClient(self.grpc)) as client:
            return _outputs(client.infer(model, _infer_inputs(inputs)))

    @contextlib.contextmanager
    def stream(self) -> Iterator[Stream]:
        """Open a stream on a new connection. Its requests are cancelled at the end."""
        stream = Stream(self.grpc)
        try:
            yield stream
        finally:
            stream.cancel()

    def ask(
        self,
        inputs: Arrays,
        model: str = "tensorrt_llm",
        *,
        request_id: str = "",
        outputs: list[str] | None = None,
    ) -> list[Reply]:
        """Return all replies to one request. The last one is final or an error."""
        with self.stream() as stream:
            stream.send(inputs, model, request_id=request_id, outputs=outputs)
            return stream.rest(request_id)


class Stream:
    """A ModelStreamInfer call with its requests and replies."""

    def __init__(self, address: str) -> None:
        self._client = triton.InferenceServerClient(address)
        self._replies: queue.Queue[Reply] = queue.Queue()
        self._client.start_stream(self._received)

    def send(
        self,
        inputs: Arrays,
        model: str = "tensorrt_llm",
        *,
        request_id: str = "",
        outputs: list[str] | None = None,
    ) -> None:
        self._client.async_stream_infer(
            model,
            _infer_inputs(inputs),
            request_id=request_id,
            outputs=outputs and [triton.InferRequestedOutput(name) for name in outputs],
            enable_empty_final_response=True,
        )

    def next(self) -> Reply:
        return self._replies.get(timeout=ANSWER_WITHIN)

    def rest(self, request_id: str = "") -> list[Reply]:
        """Return the replies up to the end of one request, without replies to other requests."""
        replies: list[Reply] = []
        while not replies or not (replies[-1].final or replies[-1].error):
            reply = self.next()
            if reply.request_id == request_id or reply.error:
                replies.append(reply)
        return replies

    def cancel(self) -> None:
        self._client.stop_stream(cancel_requests=True)
        self._client.close()

    def _received(self, result: Any, error: Any) -> None:
        if error is not None:
            self._replies.put(Reply("", {}, final=True, error=error.message()))
            return
        response = result.get_response()
        final = response.parameters["triton_final_response"].bool_param
        self._replies.put(Reply(response.id, _outputs(result), final=final))


def core_inputs(ids: list[int], max_tokens: int, **more: Any) -> Arrays:
    """Return the inputs of `tensorrt_llm` for one prompt. Scalars get shape [1, 1]."""
    inputs = {
        "input_ids": np.array([ids], np.int32),
        "input_lengths": np.array([[len(ids)]], np.int32),
        "request_output_len": np.array([[max_tokens]], np.int32),
    }
    return inputs | {name: as_tensor(value) for name, value in more.items()}


def text_inputs(text: str, max_tokens: int, **more: Any) -> Arrays:
    """Return the inputs of the ensemble and of tensorrt_llm_bls."""
    inputs = {"text_input": as_tensor(text), "max_tokens": as_tensor(max_tokens)}
    return inputs | {name: as_tensor(value) for name, value in more.items()}


def stop_inputs() -> Arrays:
    return core_inputs([0], 0, input_lengths=0, stop=True)


def as_tensor(value: Any) -> npt.NDArray[Any]:
    """Return a Python scalar as a [1, 1] array in the dtype that the models expect."""
    if isinstance(value, np.ndarray):
        return value
    if isinstance(value, str):
        return np.array([[value.encode()]], np.object_)
    if isinstance(value, bool):
        return np.array([[value]], np.bool_)
    return np.array([[value]], np.int32 if isinstance(value, int) else np.float32)


def _infer_inputs(arrays: Arrays) -> list[triton.InferInput]:
    inputs = []
    for name, array in arrays.items():
        tensor = triton.InferInput(name, array.shape, triton.np_to_triton_dtype(array.dtype))
        inputs.append(tensor.set_data_from_numpy(array))
    return inputs


def _outputs(result: Any) -> Arrays:
    return {output.name: result.as_numpy(output.name) for output in result.get_response().outputs}


def new_ids(replies: list[Reply]) -> list[int]:
    """Return the ids of the first beam of all replies. Fail if the last reply is an error."""
    assert replies[-1].error is None, replies[-1].error
    return [token for reply in replies for token in reply.outputs["output_ids"][0, 0].tolist()]


def error_of(replies: list[Reply]) -> str:
    """Return the error text of the only reply."""
    assert len(replies) == 1
    assert replies[0].error is not None
    return replies[0].error


def repository_parameters(folder: Path, **more: Value) -> dict[str, Value]:
    """Return the parameters of a repository on the CPU, with the engine in `folder`/engine."""
    return {
        "triton_backend": "python",
        "triton_max_batch_size": 8,
        "decoupled_mode": True,
        "batching_strategy": "inflight_fused_batching",
        "logits_datatype": "TYPE_FP32",
        "encoder_input_features_data_type": "TYPE_FP16",
        "max_queue_delay_microseconds": 0,
        "preprocessing_instance_count": 1,
        "postprocessing_instance_count": 1,
        "bls_instance_count": 2,
        "engine_dir": str(folder / "engine"),
        "tokenizer_dir": str(MODEL),
        **more,
    }


def long_model(folder: Path) -> Path:
    """Copy the demo's model into `folder`, with a longer context than it was trained for.

    Answers run at a GPU's pace, which leaves CPU time for the test.
    """
    model = folder / "model"
    shutil.copytree(MODEL, model)
    config = json.loads((model / "config.json").read_text())
    config |= {"max_position_embeddings": LONG_SEQ_LEN, "least_iteration_ms": 20}
    (model / "config.json").write_text(json.dumps(config))
    return model


def render_core(folder: Path, **parameters: Value) -> None:
    """Render a repository in `folder` with only the core model, for a third of the CPU time."""
    repository = folder / "repository"
    render(repository, repository_parameters(folder, **parameters))
    for model in repository.iterdir():
        if model.name != "tensorrt_llm":
            shutil.rmtree(model)


@contextlib.contextmanager
def running(folder: Path, *, release: str = DEFAULT, **parameters: Value) -> Iterator[Server]:
    """Run tritonserver on all five models of a release, like the local stack.

    `folder` has the engine in `engine`. Other models in `repository` stay as they are.
    """
    values = repository_parameters(folder, **parameters)
    render(folder / "repository", values, release=release)
    with serving(folder) as server:
        yield server


@contextlib.contextmanager
def serving(folder: Path, *options: str) -> Iterator[Server]:
    """Run tritonserver with these further `options` on `folder`/repository."""
    with PortClaims() as claims:
        ports = Ports(0, 0, *(claims.take_free() for _ in range(3)))
        prefix = region_prefix(folder)
        child = triton_child(ports, folder, prefix, folder / "triton.log", *options)
        child.start()
        try:
            wait_ready(child, f"{LOCALHOST}:{ports.triton_http}", ports.triton_metrics)
            server = Server(ports)
            server.child = child
            yield server
        finally:
            child.terminate()
            child.reap(10.0)
            remove_regions(prefix)


def wait_ready(child: Child, address: str, metrics_port: int | None = None) -> None:
    """Wait until the server at this HTTP address has all models ready, and its metrics port open.

    Triton opens the metrics port last.
    """
    urls = [f"http://{address}/v2/health/ready"]
    if metrics_port is not None:
        urls.append(f"http://{LOCALHOST}:{metrics_port}/metrics")
    deadline = time.monotonic() + READY_WITHIN
    while not all(map(answers_ok, urls)):
        assert time.monotonic() < deadline, child.last_lines()
        if child.exit_status() is not None:
            assert STARVED in child.last_lines(), child.how_it_ended()
            child.reap(0.0)
            child.start()
        time.sleep(0.05)
