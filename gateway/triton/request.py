"""Builder of serialized ModelInferRequest messages.

Inputs are added by logical name, and encoded in the data type that the model declares. Protobuf
fields may be serialized separately and then concatenated. Most fields are therefore serialized only
once for each model. For each request, only its id and the values of its inputs are serialized.
Building a request takes 9 us. With a protobuf object, it would take 13 us (python -m
bench.packing).

See decisions 011 and 012 in docs/decisions.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

from gateway.errors import EngineError
from gateway.triton import bytes_tensor
from gateway.triton.names import Inputs, LogicalInput
from gateway.triton.protobuf import pb
from gateway.triton.transport import Message

_EMPTY_FINAL = "triton_enable_empty_final_response"
# Protobuf keys of the length-delimited fields 3 (id) and 7 (raw_input_contents) of
# ModelInferRequest.
_ID, _CONTENTS = bytes([3 << 3 | 2]), bytes([7 << 3 | 2])
# Encoders for one little-endian value, by Triton's data type.
_ONE = {
    "BOOL": struct.Struct("<?"),
    "INT32": struct.Struct("<i"),
    "UINT32": struct.Struct("<I"),
    "INT64": struct.Struct("<q"),
    "UINT64": struct.Struct("<Q"),
    "FP32": struct.Struct("<f"),
}
# Minimum size in bytes of tensor contents that are sent as a separate chunk instead of being copied
# into the request. It is the size of an HTTP/2 frame. For shorter contents, separate chunks would
# save nothing, because the transport copies short contents into a frame in any case.
_LONG_BYTES = 2**14
_UNSIGNED = {"UINT32": 2**32 - 1, "UINT64": 2**64 - 1}


class InferRequest(NamedTuple):
    """A serialized ModelInferRequest, and the request's id. `pieces` has the bytes in chunks."""

    id: str
    pieces: Message

    @property
    def data(self) -> bytes:
        return b"".join(self.pieces)


class RequestPart(NamedTuple):
    """Serialized inputs and outputs that can be used in any request to the same model.

    Attributes:
        tensors: serialized declarations of the inputs and outputs.
        contents: serialized values of the inputs, in chunks.
        long: True if some chunks of `contents` have at least `_LONG_BYTES` bytes. Such chunks are
            not copied into the requests that use them.
    """

    tensors: bytes
    contents: Message
    long: bool

    @property
    def nbytes(self) -> int:
        return len(self.tensors) + sum([len(piece) for piece in self.contents])


class RequestBuilder:
    """Builder of one ModelInferRequest.

    If `batched` is True, each input gets a leading dimension of 1. If `names_outputs` is False, the
    request names no outputs, so the model returns all outputs (see `names.names_outputs`).

    Adding an input that the model does not declare raises EngineError. This is only a safeguard,
    because `pipeline.capabilities` refuses such requests earlier.
    """

    def __init__(
        self,
        model: str,
        inputs: Inputs,
        request_id: str,
        *,
        names_outputs: bool = True,
        batched: bool = True,
    ) -> None:
        self._model = model
        self._inputs = inputs
        self._names_outputs = names_outputs
        self._lead = (1,) if batched else ()
        self._id = request_id
        self._tensors: list[bytes] = []
        self._contents: list[bytes | memoryview] = []
        self._long = False

    @property
    def request(self) -> InferRequest:
        """The request with all inputs and outputs that were added so far."""
        name = self._id.encode()
        parts = [_head(self._model), _ID, varint(len(name)), name, *self._tensors, *self._contents]
        return InferRequest(self._id, _join_short(parts) if self._long else [b"".join(parts)])

    @property
    def part(self) -> RequestPart:
        """The inputs and outputs that were added so far, as an argument for `add`."""
        contents = _join_short(self._contents) if self._long else [b"".join(self._contents)]
        return RequestPart(b"".join(self._tensors), contents, self._long)

    def add(self, part: RequestPart) -> None:
        self._tensors.append(part.tensors)
        self._contents += part.contents
        self._long = self._long or part.long

    def has(self, logical: LogicalInput) -> bool:
        return logical in self._inputs

    def needs(self, logical: LogicalInput) -> bool:
        """Return True if the model requires this input."""
        return self.has(logical) and not self._inputs[logical].optional

    def scalar(self, logical: LogicalInput, value: int | float) -> None:
        """Add one number or boolean, of shape [1, 1]; [1] if `batched` is False."""
        tensor, contents, pack, limit = _scalar(*self._get_input(logical), (*self._lead, 1))
        self._tensors.append(tensor)
        self._contents += (contents, pack(int(value) & limit if limit else value))

    def numbers(self, logical: LogicalInput, values: Sequence[float], *dims: int) -> None:
        """Add numbers of shape [1, *dims] in row-major order.

        If the declared data type is unsigned, negative numbers wrap around.
        """
        _, datatype = self._get_input(logical)
        if limit := _UNSIGNED.get(datatype):
            values = [int(value) & limit for value in values]
        code = _ONE[datatype].format[1:]
        self.raw(logical, struct.pack(f"<{len(values)}{code}", *values), *dims)

    def int32s(self, logical: LogicalInput, values: array[int], *dims: int) -> None:
        """Add integers of shape [1, *dims], converted to the declared data type.

        A long array is not copied if the declared data type is INT32.
        """
        _, datatype = self._get_input(logical)
        if datatype != "INT32":
            self.numbers(logical, values, *dims)
        elif 4 * len(values) < _LONG_BYTES:
            self.raw(logical, values.tobytes(), *dims)
        else:
            self.raw(logical, memoryview(values).cast("B"), *dims)

    def texts(self, logical: LogicalInput, values: Sequence[str]) -> None:
        """Add texts, of shape [1, n]."""
        self.raw(logical, bytes_tensor.pack(values), len(values))

    def raw(self, logical: LogicalInput, raw: bytes | memoryview, *dims: int) -> None:
        """Add values of shape [1, *dims] that are already encoded in the declared data type.

        Long values are not copied.
        """
        self._tensors.append(_input(*self._get_input(logical), (*self._lead, *dims)))
        self._contents += (_CONTENTS, varint(len(raw)), raw)
        self._long = self._long or len(raw) >= _LONG_BYTES

    def output(self, name: str) -> None:
        """Request an output."""
        if self._names_outputs:
            self._tensors.append(_output(name))

    def _get_input(self, logical: LogicalInput) -> tuple[str, str]:
        """Return the name and the data type of an input."""
        declared = self._inputs.get(logical)
        if declared is None:
            raise EngineError(f"{self._model} has no input for {logical}.")
        return declared.name, declared.datatype


def _join_short(parts: Sequence[bytes | memoryview]) -> Message:
    """Return the same bytes in fewer chunks: neighbouring short chunks are joined."""
    pieces: list[bytes | memoryview] = []
    short: list[bytes | memoryview] = []
    for part in parts:
        if len(part) < _LONG_BYTES:
            short.append(part)
        else:
            pieces += (b"".join(short), part)
            short = []
    return [*pieces, b"".join(short)] if short else pieces


def varint(value: int) -> bytes:
    """Return protobuf's variable-length encoding of a number."""
    if value < 0x80:
        return bytes((value,))
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


@lru_cache(maxsize=64)
def _head(model: str) -> bytes:
    request = pb.ModelInferRequest(model_name=model)
    request.parameters[_EMPTY_FINAL].bool_param = True
    return bytes(request.SerializeToString())


# This cache is larger than the others: its keys contain shapes, and so the lengths of prompts.
@lru_cache(maxsize=4096)
def _input(name: str, datatype: str, shape: tuple[int, ...]) -> bytes:
    request = pb.ModelInferRequest()
    request.inputs.add(name=name, datatype=datatype, shape=shape)
    return bytes(request.SerializeToString())


@lru_cache(maxsize=256)
def _scalar(
    name: str, datatype: str, shape: tuple[int, ...]
) -> tuple[bytes, bytes, Callable[..., bytes], int | None]:
    """Return what is needed to serialize an input with one number.

    The result has four items: the serialized declaration of the input, the bytes before the number,
    the function that packs the number, and the bit mask for unsigned data types (None for other
    types).
    """
    one = _ONE[datatype]
    contents = _CONTENTS + varint(one.size)
    return _input(name, datatype, shape), contents, one.pack, _UNSIGNED.get(datatype)


@lru_cache(maxsize=256)
def _output(name: str) -> bytes:
    request = pb.ModelInferRequest()
    request.outputs.add(name=name)
    return bytes(request.SerializeToString())
