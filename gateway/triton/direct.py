"""Direct requests to one model of a Triton server, for operators' tools.

These requests bypass the rest of the gateway: failed requests are not retried, and the server's
error texts are returned unchanged.
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
# Direct requests may have stop strings, to show an operator how the engine handles them. In normal
# requests to an llmapi model, the gateway sends no stop strings, but searches the answer's text
# itself. The engine would compare token ids, which may differ for the same text, and some releases
# fail on stop strings.
_LLMAPI = LLMAPI | {"stop_words": ("sampling_param_stop",)}
_CANCELLED = "Request cancelled by client"


class Reply:
    """A response on a stream. `error` is the server's error text; "" if there is no error."""

    def __init__(self, response: pb.ModelStreamInferResponse) -> None:
        self._response = response.infer_response
        self.error: str = response.error_message
        self.final = bool(self.error) or is_final(self._response)
        self.cancelled = self.error == _CANCELLED
        """True if the error says that a request was stopped.

        The llmapi model sends this error twice: for the stopped request, and for the stop request
        itself.
        """

    def has(self, name: str) -> bool:
        return any(tensor.name == name for tensor in self._response.outputs)

    def names(self) -> list[str]:
        return [tensor.name for tensor in self._response.outputs]

    def array(self, name: str) -> npt.NDArray[Any] | None:
        """Return an output tensor as an array. Return None if the response has no such output.

        BF16 numbers are returned as uint16 with the same bits. BYTES tensors are returned as arrays
        of texts. All outputs of the llmapi model are BYTES tensors, also those with numbers.
        """
        found = self._raw(name)
        if found is None:
            return None
        tensor, raw = found
        if tensor.datatype == "BYTES":
            return np.array(bytes_tensor.unpack(raw), np.object_).reshape(tensor.shape)
        return np.frombuffer(raw, NUMBERS[tensor.datatype]).reshape(tensor.shape)

    def _raw(self, name: str) -> tuple[Any, bytes] | None:
        """Return an output's metadata and bytes. Return None if the response has no such output."""
        contents = self._response.raw_output_contents
        for tensor, raw in zip(self._response.outputs, contents, strict=True):
            if tensor.name == name:
                return tensor, raw
        return None

    def ids(self) -> list[list[int]]:
        """Return the token ids of each beam in `output_ids`, without padding.

        Return an empty list if the response has no `output_ids`.
        """
        ids, lengths = self.array("output_ids"), self.array("sequence_length")
        if ids is None:
            return []
        if lengths is None:
            return [row.tolist() for row in ids[0]]
        return [row[:n].tolist() for row, n in zip(ids[0], lengths.reshape(-1), strict=True)]

    def texts(self) -> list[str]:
        """Return the text of each beam. Return an empty list if there is no `text_output`."""
        raw = self._raw("text_output")
        return [] if raw is None else bytes_tensor.unpack(raw[1])

    def delta(self, reader: LlmapiReader) -> TokenDelta:
        """Return the text that is new in this reply of an llmapi model, as a delta."""
        return reader.delta(self._response)


class DirectModel:
    """Client of one model that Triton serves. Inputs that the model does not declare are not sent.

    Attributes:
        llmapi: True for the model of the llmapi repository. Each of its streamed responses has the
            complete text so far.
        sends_at_end: True for a release of the llmapi model that sends streamed responses only when
            the answer is complete.
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

        Raise GatewayError or TimeoutError if the model is not served or Triton is unreachable.
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
        """Data type of the input `lora_weights`; None if the model does not support adapters."""
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
        """Return one request with a batch of rows, such as several prompts.

        `inputs` maps the names of the model's inputs to matrices of shape [rows, n]. Inputs that
        the model does not declare are left out. The request asks for the outputs with the generated
        tokens.
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
        """Send a request on a new gRPC stream. Return its response stream.

        Raise GatewayError if there is no connection.
        """
        if isinstance(request, InferRequest):
            return await self._client.infer(request.pieces)
        return await self._client.infer(request)


async def replies(stream: Responses) -> AsyncIterator[Reply]:
    """Yield all replies to a request. End after a final reply or a reply with an error.

    Raise GatewayError if the connection is lost or the stream ends early. Raise CancelledError if
    the stream is cancelled.
    """
    while (response := await stream.read()) is not None:
        reply = Reply(response)
        yield reply
        if reply.final:
            return
    raise EngineUnavailable("The inference server ended the stream early.")
