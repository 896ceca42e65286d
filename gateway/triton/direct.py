"""Direct requests to one model of a Triton server, without engine state or OpenAI's rules.

Operators' tools use these requests, so the server's error texts are returned unchanged.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from adapters.adapter import Dtype
from gateway.deltas import TokenDelta
from gateway.errors import EngineUnavailable, EngineUnreachable
from gateway.triton import bytes_tensor
from gateway.triton.client import Responses, TritonClient
from gateway.triton.llmapi.model import is_llmapi, streams_tokens
from gateway.triton.llmapi.reader import LlmapiReader
from gateway.triton.llmapi.tensors import stop_request as llmapi_stop_request
from gateway.triton.model_capabilities import StopModel, engine_folder, parameter
from gateway.triton.names import (
    CORE,
    LLMAPI,
    TEXT,
    datatype,
    lora_dtype,
    names_outputs,
    read_inputs,
)
from gateway.triton.numbers import NUMBERS
from gateway.triton.protobuf import pb
from gateway.triton.request import InferRequest, RequestBuilder
from gateway.triton.tensors import is_final, stop_request
from gateway.triton.transport import Message

_GENERATED = {"output_ids", "sequence_length", "batch_index"}
# Direct requests send stop strings, so that an operator can see how the engine handles them. The
# gateway does not send them but searches the text itself: an engine matches stop strings as
# sequences of tokens, and some releases fail on them.
_LLMAPI = LLMAPI | {"stop_words": ("sampling_param_stop",)}
_CANCELLED = "Request cancelled by client"


class Reply:
    """A response on a stream. `error` is the server's error text, or "" if there is no error."""

    def __init__(self, response: pb.ModelStreamInferResponse) -> None:
        self._response = response.infer_response
        self.error: str = response.error_message
        self.final = bool(self.error) or is_final(self._response)
        self.cancelled = self.error == _CANCELLED
        """True if this is the llmapi model's answer to a stopped request, or to the stop request
        itself."""

    def has(self, name: str) -> bool:
        return any(tensor.name == name for tensor in self._response.outputs)

    def names(self) -> list[str]:
        return [tensor.name for tensor in self._response.outputs]

    def array(self, name: str) -> npt.NDArray[Any] | None:
        """Return an output as an array of its shape, or None if it is not in the response.

        BF16 values are returned as their 16 bits (uint16), BYTES as texts. The llmapi model sends
        numbers as BYTES, too.
        """
        found = self._raw(name)
        if found is None:
            return None
        tensor, raw = found
        if tensor.datatype == "BYTES":
            return np.array(bytes_tensor.unpack(raw), np.object_).reshape(tensor.shape)
        return np.frombuffer(raw, NUMBERS[tensor.datatype]).reshape(tensor.shape)

    def _raw(self, name: str) -> tuple[Any, bytes] | None:
        """Return an output's description and its bytes, or None if it is not in the response."""
        contents = self._response.raw_output_contents
        for tensor, raw in zip(self._response.outputs, contents, strict=True):
            if tensor.name == name:
                return tensor, raw
        return None

    def ids(self) -> list[list[int]]:
        """Return the ids of each beam in `output_ids`, without padding; [] if there are none."""
        ids, lengths = self.array("output_ids"), self.array("sequence_length")
        if ids is None:
            return []
        if lengths is None:
            return [row.tolist() for row in ids[0]]
        return [row[:n].tolist() for row, n in zip(ids[0], lengths.reshape(-1), strict=True)]

    def texts(self) -> list[str]:
        """Return the text of each beam in `text_output`; [] if there are none."""
        raw = self._raw("text_output")
        return [] if raw is None else bytes_tensor.unpack(raw[1])

    def delta(self, reader: LlmapiReader) -> TokenDelta:
        """Return what this reply of an llmapi model adds to the text of the earlier replies."""
        return reader.delta(self._response)


class DirectModel:
    """A served model: its declared tensors, and requests to it.

    `llmapi` is True for the model of the llmapi repository, whose streamed responses each have the
    complete text so far. `sends_at_end` is True for a release of it that sends the streamed
    responses only when the answer is complete.
    """

    def __init__(self, client: TritonClient, name: str, config: Any) -> None:
        self._client = client
        self.name = name
        self._declared = {tensor.name: datatype(tensor.data_type) for tensor in config.input}
        self.takes_text = "text_input" in self._declared
        self.is_ensemble = config.platform == "ensemble"
        self.llmapi = is_llmapi(config)
        names = _LLMAPI if self.llmapi else TEXT if self.takes_text else CORE
        self.inputs = read_inputs(config, names)
        self.sends_at_end = self.llmapi and not streams_tokens(config)
        self.outputs = frozenset(tensor.name for tensor in config.output)
        self._names_outputs = names_outputs(config)
        self.decoupled = bool(config.model_transaction_policy.decoupled)
        self.engine_dir = engine_folder(config)
        self.tokenizer_dir = parameter(config, "tokenizer_dir")

    @classmethod
    async def find(cls, client: TritonClient, name: str) -> DirectModel:
        """Return the served model with this name.

        Raises GatewayError or TimeoutError if it is not served or Triton is unreachable.
        """
        try:
            served = await client.model_ready(name)
        except EngineUnreachable as error:
            raise EngineUnavailable(f"Triton at {client.endpoint}: {error.why}") from error
        if not served:
            raise EngineUnavailable(f"Triton at {client.endpoint} does not serve {name!r}.")
        return cls(client, name, await client.model_config(name))

    @property
    def lora_dtype(self) -> Dtype | None:
        """Return the declared type of `lora_weights`, or None if the model takes no adapters."""
        return lora_dtype(self.inputs)

    def request(self, request_id: str) -> RequestBuilder:
        return RequestBuilder(
            *(self.name, self.inputs, request_id),
            names_outputs=self._names_outputs,
            batched=not self.llmapi,
        )

    def batch(
        self, request_id: str, inputs: Mapping[str, Sequence[Sequence[float]]]
    ) -> InferRequest:
        """Return a request of several rows.

        `inputs` has a matrix, [rows, n], for each of the model's own input names. Inputs that the
        model does not declare are left out. The request asks for the outputs that have the
        generated tokens.
        """
        request = pb.ModelInferRequest(model_name=self.name, id=request_id)
        request.parameters["triton_enable_empty_final_response"].bool_param = True
        for name, rows in inputs.items():
            if name in self._declared:
                kind = self._declared[name]
                array = np.array(rows, NUMBERS[kind])
                request.inputs.add(name=name, datatype=kind, shape=array.shape)
                request.raw_input_contents.append(array.tobytes())
        if self._names_outputs:
            for name in _GENERATED & self.outputs:
                request.outputs.add(name=name)
        return InferRequest(request_id, request.SerializeToString())

    def stop(self, request_id: str) -> InferRequest:
        of_model = llmapi_stop_request if self.llmapi else stop_request
        return of_model(StopModel(self.name, self.inputs), request_id)

    async def send(self, request: InferRequest | Message) -> Responses:
        """Send a request on a new stream, and return the stream of its responses.

        Raises GatewayError if there is no connection.
        """
        if isinstance(request, InferRequest):
            return await self._client.infer(request.pieces)
        return await self._client.infer(request)


async def replies(stream: Responses) -> AsyncIterator[Reply]:
    """Yield all replies up to the end of the request. The last one is final, or an error.

    Raises GatewayError if the connection is lost or the stream ends early, CancelledError if the
    stream is cancelled.
    """
    while (response := await stream.read()) is not None:
        reply = Reply(response)
        yield reply
        if reply.final:
            return
    raise EngineUnavailable("The inference server ended the stream early.")
