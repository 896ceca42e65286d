"""Requests to embedding and ranking models in Triton, and decoding of their responses.

Such a model takes rows of texts or token ids, and returns a row of numbers for each input row.
`TensorMapping` names the model's tensors. Shapes, data types and the maximum batch size are read
from the model's configuration.

The first dimension of each tensor is the batch dimension. If Triton does the batching, the shapes
in the configuration do not include the batch dimension. If the model itself does the batching
(`max_batch_size` is 0), the shapes in the configuration begin with the batch dimension. If the
configuration gives this dimension a fixed size, each request has only one row.

numpy (20 MiB) is loaded only if there is such a model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from google.protobuf.message import DecodeError

from gateway.errors import BadModelOutput, EngineError
from gateway.triton import bytes_tensor
from gateway.triton.names import datatype
from gateway.triton.numbers import FLOATS, float32
from gateway.triton.protobuf import pb

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

Rows: TypeAlias = "npt.NDArray[np.float32]"
"""The numbers of an output tensor, shape [rows, numbers per row]."""

_MAX_ANSWER_BYTES = 1 << 20
"""Maximum bytes of numbers in one response, unless the response has only one row.

The limit is necessary because processing a response blocks the event loop."""
_ASSUMED_WIDTH = 4096
_IDS = {"INT32": "<i4", "INT64": "<i8"}
_ID_BYTES = {"INT32": 4, "INT64": 8}


class TensorMapping(NamedTuple):
    """A model's name in Triton, and the names of its tensors.

    The inputs are either `texts` or `input_ids`. With `input_ids`, there may also be
    `attention_mask` and `token_type_ids`.
    """

    model: str
    output: str
    texts: tuple[str, ...] = ()
    input_ids: str | None = None
    attention_mask: str | None = None
    token_type_ids: str | None = None
    pad_id: int = 0


class InputRow(NamedTuple):
    """An input row: one text for each text tensor, or token ids with their token type ids.

    `types` has one byte per token. If `types` is empty, all token type ids are 0.
    """

    texts: tuple[str, ...] = ()
    ids: Sequence[int] = ()
    types: bytes = b""


@dataclass(frozen=True, slots=True)
class ResolvedMapping:
    """A `TensorMapping`, completed with shapes and data types from the model's configuration.

    Attributes:
        rows: maximum number of rows in one request.
        width: number of numbers in a row of the output; None if the configuration does not fix it.
        length: number of token ids in each row; None if the configuration does not fix it.
    """

    mapping: TensorMapping
    rows: int
    width: int | None
    length: int | None
    _types: dict[str, str]
    _flat: bool
    """True if text tensors have only the batch dimension."""

    def request(self, rows: Sequence[InputRow]) -> bytes:
        """Return a serialized ModelInferRequest for the rows."""
        mapping = self.mapping
        request = pb.ModelInferRequest(model_name=mapping.model)
        for column, name in enumerate(mapping.texts):
            shape = (len(rows),) if self._flat else (len(rows), 1)
            request.inputs.add(name=name, datatype="BYTES", shape=shape)
            request.raw_input_contents.append(bytes_tensor.pack([r.texts[column] for r in rows]))
        if mapping.input_ids is not None:
            length = self.length or max(len(row.ids) for row in rows)
            self._add_ids(request, rows, length)
        request.outputs.add(name=mapping.output)
        return bytes(request.SerializeToString())

    def _add_ids(self, request: Any, rows: Sequence[InputRow], length: int) -> None:
        import numpy as np  # noqa: PLC0415

        mapping, shape = self.mapping, (len(rows), length)
        ids = np.full(shape, mapping.pad_id, np.int32)
        mask, types = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
        for number, row in enumerate(rows):
            ids[number, : len(row.ids)] = row.ids
            mask[number, : len(row.ids)] = 1
            if row.types:
                types[number, : len(row.types)] = np.frombuffer(row.types, np.uint8)
        names = (mapping.input_ids, mapping.attention_mask, mapping.token_type_ids)
        for name, values in zip(names, (ids, mask, types), strict=True):
            if name is not None:
                request.inputs.add(name=name, datatype=self._types[name], shape=shape)
                raw = values.astype(_IDS[self._types[name]], copy=False).tobytes()
                request.raw_input_contents.append(raw)

    def cost(self, longest: int) -> int:
        """Return the approximate size of one row in a request, in bytes.

        `longest` is the length of the row's texts in characters, or the number of its token ids.
        """
        if self.mapping.input_ids is None:
            return longest + 4
        return (self.length or longest) * sum(_ID_BYTES[t] for t in self._types.values())

    def answer(self, reply: bytes, rows: int) -> Rows:
        """Return the numbers in a serialized ModelInferResponse to a request with `rows` rows.

        Raise BadModelOutput if the output is missing, has another shape, or is not finite.
        """
        import numpy as np  # noqa: PLC0415

        try:
            response = pb.ModelInferResponse.FromString(reply)
            found = {
                tensor.name: (tensor, raw)
                for tensor, raw in zip(response.outputs, response.raw_output_contents, strict=True)
            }
            tensor, raw = found[self.mapping.output]
            values = np.frombuffer(raw, FLOATS[tensor.datatype])
        except (DecodeError, ValueError, KeyError):
            raise BadModelOutput(f"The model's answer has no numbers in {self._output}.") from None
        shape = [int(size) for size in tensor.shape]
        if rows == 1 and shape[:1] != [1]:
            shape = [1, *shape]  # the model's output has no batch dimension
        wide = [size for size in shape[1:] if size != 1]
        if shape[:1] != [rows] or len(wide) > 1 or not values.size or values.size % rows:
            raise BadModelOutput(
                f"The model's {self._output} has the shape {shape}; for {rows} inputs it must be "
                f"[{rows}, N]. The model itself must pool what it has of each token."
            )
        numbers = float32(values, tensor.datatype).reshape(rows, -1)
        if not np.isfinite(numbers).all():
            raise BadModelOutput(f"The model's {self._output} has numbers that are not finite.")
        return numbers

    @property
    def _output(self) -> str:
        return f"output {self.mapping.output}"


def resolve_mapping(mapping: TensorMapping, config: Any) -> ResolvedMapping:
    """Complete a mapping with the shapes and data types in the model's `ModelConfig`.

    Raise EngineError if the mapping does not fit the configuration.
    """
    import numpy  # noqa: F401, PLC0415  # load numpy now, so that no client has to wait for it

    model = mapping.model
    if config.model_transaction_policy.decoupled:
        raise EngineError(f"Triton's model {model!r} is decoupled; it must answer once.")
    lead = [-1] if config.max_batch_size else []
    inputs = {t.name: (datatype(t.data_type), lead + list(t.dims)) for t in config.input}
    outputs = {t.name: (datatype(t.data_type), lead + list(t.dims)) for t in config.output}
    ids = (mapping.input_ids, mapping.attention_mask, mapping.token_type_ids)
    used = {name: {"BYTES"} for name in mapping.texts}
    used |= {name: set(_IDS) for name in ids if name is not None}
    batches, lengths, ranks = set(), set(), set()
    for name, allowed in used.items():
        kind, shape = _find_tensor(inputs, name, f"Triton's model {model!r} has no input {name!r}")
        rank = len(shape)
        if kind not in allowed or rank > 2 or (mapping.texts and shape[1:] not in ([], [1], [-1])):
            raise EngineError(
                f"Triton's model {model!r}: its input {name!r} is {kind} {shape}; it must be "
                f"{' or '.join(sorted(allowed))}, one text or one row of token ids for each input."
            )
        batches.add(shape[0])
        lengths.update(shape[1:])
        ranks.add(rank)
    if len(ranks) != 1 or (mapping.input_ids is not None and ranks != {2}):
        raise EngineError(f"Triton's model {model!r}: its inputs differ in their dimensions.")
    if others := inputs.keys() - used.keys() - {t.name for t in config.input if t.optional}:
        names = ", ".join(sorted(others))
        raise EngineError(f"Triton's model {model!r} needs inputs that are not named: {names}.")
    kind, shape = _find_tensor(
        outputs, mapping.output, f"Triton's model {model!r} has no output {mapping.output!r}"
    )
    if kind not in FLOATS:
        raise EngineError(f"Triton's model {model!r}: its output {mapping.output!r} is {kind}.")
    sizes = [size for size in (shape if shape[0] > 1 else shape[1:]) if size != 1]
    width = None if -1 in sizes or len(sizes) > 1 else sizes[0] if sizes else 1
    own = config.max_batch_size or (None if batches == {-1} else 1)
    most = max(1, _MAX_ANSWER_BYTES // (4 * (width or _ASSUMED_WIDTH)))
    fixed = {size for size in lengths if size > 0} if mapping.input_ids is not None else set()
    return ResolvedMapping(
        mapping=mapping,
        rows=most if own is None else min(own, most),
        width=width,
        length=min(fixed, default=None),
        _types={name: inputs[name][0] for name in used if not mapping.texts},
        _flat=ranks == {1},
    )


def _find_tensor(
    tensors: dict[str, tuple[str, list[int]]], name: str, missing: str
) -> tuple[str, list[int]]:
    if name not in tensors:
        raise EngineError(f"{missing}; it has {', '.join(sorted(tensors)) or 'none'}.")
    kind, shape = tensors[name]
    # An empty shape means a single number without a batch dimension. Treat it like [1].
    return kind, shape or [1]
