"""Request for the token ids of a text, which Triton's model `preprocessing` answers."""

from __future__ import annotations

from array import array
from typing import Any

from google.protobuf.message import DecodeError

from gateway.triton import bytes_tensor
from gateway.triton.names import datatype, names_outputs
from gateway.triton.protobuf import pb
from gateway.triton.tokenizer.triton_api import TritonApi

_TEXT, _IDS, _LENGTH = "QUERY", "INPUT_ID", "REQUEST_INPUT_LEN"
# Values for required inputs other than the text, by data type. Each value is one little-endian
# number: 1 for integers, 0.0 for floats, False for booleans.
_ONE = {"INT32": b"\1\0\0\0", "UINT32": b"\1\0\0\0", "INT64": b"\1" + bytes(7)}
_ONE |= {"UINT64": _ONE["INT64"], "FP32": bytes(4), "BOOL": b"\0"}


class QuestionFailed(Exception):
    """Error if no request can be built for the model, or if its response cannot be read.

    The message has the reason.
    """


def can_be_asked(config: Any) -> bool:
    """Return True if a ModelConfig belongs to a model that converts texts to token ids."""
    return _TEXT in {each.name for each in config.input} and _IDS in {
        each.name for each in config.output
    }


async def ask_ids(server: TritonApi, config: Any, text: str, within_s: float) -> list[int]:
    """Ask a model for the token ids of a text, and return them without padding.

    Raises:
        GatewayError: the call has failed.
        TimeoutError: the model has not answered within `within_s` seconds.
        QuestionFailed: the response has no ids, or the model requires an input of a data type for
            which there is no default value.
    """
    reply = await server.infer_once(_request(config, text), within_s)
    try:
        response = pb.ModelInferResponse.FromString(reply)
        outputs = zip(response.outputs, response.raw_output_contents, strict=True)
        found = {each.name: (each.datatype, raw) for each, raw in outputs}
    except (DecodeError, ValueError):
        raise QuestionFailed("its answer cannot be read") from None
    kind, raw = found.get(_IDS, ("nothing", b""))
    if kind != "INT32" or not raw or len(raw) % 4:
        raise QuestionFailed(f"its {_IDS} is {kind} of {len(raw)} bytes; expected: INT32")
    ids = array("i", raw).tolist()
    lengths = array("i", found[_LENGTH][1]) if _LENGTH in found else ()
    # Return only the last ids, because padding is on the left.
    return ids[-lengths[0] :] if lengths and 0 < lengths[0] < len(ids) else ids


def _request(config: Any, text: str) -> bytes:
    """Return a serialized ModelInferRequest with the text.

    Other required inputs get an empty text, or the number in `_ONE`.
    """
    request = pb.ModelInferRequest(model_name=config.name)
    batch = [1] if config.max_batch_size else []
    for tensor in config.input:
        if tensor.optional and tensor.name != _TEXT:
            continue
        kind = datatype(tensor.data_type)
        if kind == "BYTES":
            raw = bytes_tensor.pack([text if tensor.name == _TEXT else ""])
        elif kind in _ONE:
            raw = _ONE[kind]
        else:
            raise QuestionFailed(f"its input {tensor.name} is {kind}, and must be there")
        shape = [*batch, *[1 for _ in tensor.dims]]
        request.inputs.add(name=tensor.name, datatype=kind, shape=shape)
        request.raw_input_contents.append(raw)
    if names_outputs(config):
        for name in (_IDS, _LENGTH):
            if name in {each.name for each in config.output}:
                request.outputs.add(name=name)
    return bytes(request.SerializeToString())
