"""Mappings of embedding models, checked against the model's config and its answers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tritonclient.grpc import model_config_pb2
from tritonclient.grpc import service_pb2 as pb

from gateway.errors import BadModelOutput, EngineError
from gateway.triton.tensor_mapping import InputRow, TensorMapping, resolve_mapping

TEXT = TensorMapping("m", "OUT", texts=("TEXT",))
IDS = TensorMapping("m", "OUT", input_ids="IDS", attention_mask="MASK", pad_id=9)
Tensors = dict[str, tuple[str, list[int]]]


def config(inputs: Tensors, outputs: Tensors, batch: int = 8, *, decoupled: bool = False) -> Any:
    found = model_config_pb2.ModelConfig(max_batch_size=batch)
    found.model_transaction_policy.decoupled = decoupled
    for field, tensors in ((found.input, inputs), (found.output, outputs)):
        for name, (kind, dims) in tensors.items():
            field.add(name=name, data_type=f"TYPE_{kind}", dims=dims)
    return found


def reply(values: Any, datatype: str = "FP32", name: str = "OUT") -> bytes:
    response = pb.ModelInferResponse()
    response.outputs.add(name=name, datatype=datatype, shape=values.shape)
    response.raw_output_contents.append(values.tobytes())
    return bytes(response.SerializeToString())


VECTOR: Tensors = {"OUT": ("FP32", [4])}
A_TEXT: Tensors = {"TEXT": ("STRING", [1])}
SOME_IDS: Tensors = {"IDS": ("INT64", [-1]), "MASK": ("INT32", [-1])}


@pytest.mark.parametrize(
    ("inputs", "outputs", "batch", "shape", "rows"),
    [
        (A_TEXT, VECTOR, 8, [2, 1], 8),
        ({"TEXT": ("STRING", [-1])}, VECTOR, 8, [2, 1], 8),
        ({"TEXT": ("STRING", [-1])}, {"OUT": ("FP32", [-1, 4])}, 0, [2], 65536),
        ({"TEXT": ("STRING", [-1, 1])}, {"OUT": ("FP32", [-1, 4])}, 0, [2, 1], 65536),
        ({"TEXT": ("STRING", [1])}, {"OUT": ("FP32", [4])}, 0, [2], 1),
        (A_TEXT, {"OUT": ("FP32", [4096])}, 2048, [2, 1], 64),
        (A_TEXT, {"OUT": ("FP32", [-1])}, 2048, [2, 1], 64),
    ],
)
def test_texts(inputs: Tensors, outputs: Tensors, batch: int, shape: list[int], rows: int) -> None:
    model = resolve_mapping(TEXT, config(inputs, outputs, batch))
    sent = pb.ModelInferRequest.FromString(model.request([InputRow(("a",)), InputRow(("bc",))]))
    [tensor] = sent.inputs
    assert (tensor.datatype, list(tensor.shape)) == ("BYTES", shape)
    assert list(sent.raw_input_contents) == [b"\1\0\0\0a\2\0\0\0bc"]
    assert model.rows == rows


@pytest.mark.parametrize(("dims", "length"), [([-1], 3), ([5], 5)])
def test_token_ids_are_padded_and_masked(dims: list[int], length: int) -> None:
    inputs: Tensors = {"IDS": ("INT64", dims), "MASK": ("INT32", dims)}
    model = resolve_mapping(IDS, config(inputs, VECTOR))
    sent = pb.ModelInferRequest.FromString(
        model.request([InputRow(ids=[1, 2, 3]), InputRow(ids=[4])])
    )
    ids = np.frombuffer(sent.raw_input_contents[0], "<i8").reshape(2, length)
    mask = np.frombuffer(sent.raw_input_contents[1], "<i4").reshape(2, length)
    assert ids.tolist() == [[*row, *[9] * (length - 3)] for row in ([1, 2, 3], [4, 9, 9])]
    assert mask.tolist() == [[*row, *[0] * (length - 3)] for row in ([1, 1, 1], [1, 0, 0])]


@pytest.mark.parametrize(
    ("mapping", "inputs", "outputs", "message"),
    [
        (TEXT, {"TXT": ("STRING", [1])}, VECTOR, "no input 'TEXT'; it has TXT"),
        (TEXT, A_TEXT, {"VEC": ("FP32", [4])}, "no output 'OUT'; it has VEC"),
        (TEXT, {"TEXT": ("INT32", [1])}, VECTOR, "must be BYTES"),
        (TEXT, {"TEXT": ("STRING", [2])}, VECTOR, "one text"),
        (TEXT, A_TEXT | {"K": ("INT32", [1])}, VECTOR, "needs inputs that are not named: K"),
        (TEXT, A_TEXT, {"OUT": ("INT32", [4])}, "is INT32"),
        (IDS, {"IDS": ("FP32", [-1]), "MASK": ("INT32", [-1])}, VECTOR, "INT32 or INT64"),
        (IDS, {"IDS": ("INT32", [-1, -1]), "MASK": ("INT32", [-1])}, VECTOR, "one row of token"),
    ],
)
def test_what_does_not_fit_is_told(
    mapping: TensorMapping, inputs: Tensors, outputs: Tensors, message: str
) -> None:
    with pytest.raises(EngineError, match=message):
        resolve_mapping(mapping, config(inputs, outputs))


def test_a_decoupled_model_is_refused() -> None:
    with pytest.raises(EngineError, match="decoupled"):
        resolve_mapping(TEXT, config(A_TEXT, VECTOR, decoupled=True))


@pytest.mark.parametrize("kind", ["FP32", "FP64", "FP16", "BF16"])
def test_numbers_of_every_type(kind: str) -> None:
    model = resolve_mapping(TEXT, config(A_TEXT, {"OUT": (kind, [3])}))
    wanted = np.array([[1.5, -2.0, 0.25], [0.0, 3.0, -0.125]], np.float32)
    types: dict[str, Any] = {"FP32": "<f4", "FP64": "<f8", "FP16": "<f2"}
    sent = (
        (wanted.view("<u4") >> 16).astype("<u2") if kind == "BF16" else wanted.astype(types[kind])
    )
    found = model.answer(reply(sent, kind), 2)
    assert found.dtype == np.float32
    assert (found == wanted).all()
    assert (model.answer(reply(sent[:, None], kind), 2) == wanted).all()


@pytest.mark.parametrize(
    "answer",
    [
        b"\xff",
        reply(np.zeros((2, 4), np.float32), name="OTHER"),
        reply(np.zeros((2, 4), np.int32), "INT32"),
        reply(np.zeros((1, 4), np.float32)),
        reply(np.zeros((2, 3, 4), np.float32)),
        reply(np.zeros((2, 0), np.float32)),
        reply(np.array([[1, np.nan], [1, 2]], np.float32)),
        reply(np.array([[1, np.inf], [1, 2]], np.float32)),
        reply(np.array([[1e300], [1]], np.float64), "FP64"),
    ],
)
@pytest.mark.filterwarnings("ignore:overflow")
def test_no_numbers_are_no_answer(answer: bytes) -> None:
    with pytest.raises(BadModelOutput):
        resolve_mapping(TEXT, config(A_TEXT, VECTOR)).answer(answer, 2)
