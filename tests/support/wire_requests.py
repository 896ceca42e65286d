"""Requests to the core model as serialized gRPC messages."""

from __future__ import annotations

from tritonclient.grpc import service_pb2 as pb


def stream_request(tokens: int) -> bytes:
    """Return a serialized request for a stream of `tokens` tokens."""
    message = pb.ModelInferRequest(model_name="tensorrt_llm", id=f"r{tokens}")
    message.parameters["triton_enable_empty_final_response"].bool_param = True
    for name, values in (
        ("input_ids", [5, 6]),
        ("input_lengths", [2]),
        ("request_output_len", [tokens]),
    ):
        message.inputs.add(name=name, datatype="INT32", shape=[1, len(values)])
        message.raw_input_contents.append(b"".join(n.to_bytes(4, "little") for n in values))
    message.inputs.add(name="streaming", datatype="BOOL", shape=[1, 1])
    message.raw_input_contents.append(b"\x01")
    return message.SerializeToString()
