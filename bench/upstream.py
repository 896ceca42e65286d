"""A scripted Triton: the parts of its gRPC service that a gateway needs, without an engine.

    python -m bench.upstream --port N --repository DIR [--events FILE]

The server answers ServerReady, ModelReady, ModelConfig (from the rendered config.pbtxt of
`tensorrt_llm` in DIR) and ModelStreamInfer. The messages are, byte for byte, those that Triton 2.51
sends for the synthetic engine. A response has `request_output_len` messages with one token each,
always TOKEN. The parameter `random_seed` selects the pace (see `bench.pace`). All tokens of a
request share one serialized message. A token therefore takes about a microsecond of CPU time; a
gRPC library would take tens of microseconds. With the config.pbtxt of the llmapi repository, each
message has the text so far (see `bench.text_answer`), and is serialized separately.

A request is marked if its `request_output_len` is at least MARKED. For each marked request, FILE
gets lines of JSON: {"key": request_output_len, "event": "arrival" | "reset" | "stop", "at":
monotonic seconds}. The events are the request's arrival, the reset of its stream, and its stop
request. A stop request does not end a marked request, so that a reset of the same stream can still
be observed. It ends all other requests, as in an engine.
"""

from __future__ import annotations

import argparse
import struct
from pathlib import Path
from typing import Any

import uvloop
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2
from tritonclient.grpc import service_pb2 as pb

from bench import frames
from bench.grpc_server import Log, ScriptedService, ServerCall, StreamedAnswer, serve
from bench.text_answer import Texts, tokens_before

TOKEN = 96
"""Token id of `~` in the demo's tokenizer. All answers consist of this token.

The load client counts this character, which occurs nowhere else in a response.
"""

_SERVICE = "/inference.GRPCInferenceService/"
_MODEL_READY = _SERVICE + "ModelReady"
_MAX_TOKENS = "sampling_param_max_tokens"
_OUTPUTS = {"output_ids": (1, 1, 1), "sequence_length": (1, 1), "kv_cache_reused_blocks": (1, 1)}
_STATISTICS = "return_kv_cache_reuse_stats"
_VALUES = {"output_ids": TOKEN, "sequence_length": 1, "kv_cache_reused_blocks": 0}


class Upstream(ScriptedService):
    """Scripted service with Triton's gRPC methods.

    If `seed` is not None, it replaces the seeds of all requests.
    """

    def __init__(self, config: Any, log: Log, seed: int | None) -> None:
        replies = {
            "ServerLive": pb.ServerLiveResponse(live=True),
            "ServerReady": pb.ServerReadyResponse(ready=True),
            "ModelConfig": pb.ModelConfigResponse(config=config),
        }
        self._replies = {_SERVICE + name: reply for name, reply in replies.items()}
        self._model = config.name
        super().__init__(log, {*self._replies, _MODEL_READY, _SERVICE + "ModelStreamInfer"})
        self._seed = seed
        self._answers = 0

    def receive(self, call: ServerCall, message: bytes) -> None:
        """Handle a message that the client sent on `call`.

        Each message of a ModelStreamInfer call is a separate request.
        """
        if (reply := self._replies.get(call.path)) is not None:
            call.send_message(reply.SerializeToString())
            return
        if call.path == _MODEL_READY:
            # No other model is there. A gateway would ask a preprocessing model for token ids again
            # and again, which would fall into one measurement or another.
            ready = pb.ModelReadyRequest.FromString(message).name == self._model
            call.send_message(pb.ModelReadyResponse(ready=ready).SerializeToString())
            return
        request = pb.ModelInferRequest.FromString(message)
        names = [tensor.name for tensor in request.inputs]
        values = dict(zip(names, request.raw_input_contents, strict=True))
        if "stop" in values:
            self.stop(request.id)
            call.send_message(_final(request.id))
            return
        self._answer(call, request, values)

    def _answer(
        self, call: ServerCall, request: pb.ModelInferRequest, values: dict[str, bytes]
    ) -> None:
        prefix = "sampling_param_" if _MAX_TOKENS in values else ""
        tokens = struct.unpack("<i", values[_MAX_TOKENS if prefix else "request_output_len"])[0]
        raw = values.get("sampling_param_seed" if prefix else "random_seed", bytes(8))
        if prefix:
            # Number the answers of a measurement from 0. If no other answer is running, this answer
            # is the first of a new measurement.
            number = self._answers if self.running else 0
            self._answers = number + 1
            answer: StreamedAnswer = TextAnswer(
                call, request, tokens, tokens_before(number, tokens)
            )
        else:
            answer = TokenAnswer(call, request, tokens)
        asked = struct.unpack("<Q", raw)[0]
        self.begin(answer, tokens, asked if self._seed is None else self._seed)


class TokenAnswer(StreamedAnswer):
    """An answer of the model tensorrt_llm, with one token id per message.

    All messages have the same bytes, except the last message.
    """

    __slots__ = ("_last", "_next")

    def __init__(self, call: ServerCall, request: pb.ModelInferRequest, tokens: int) -> None:
        super().__init__(call, request.id, tokens)
        self._next, self._last = (
            [frames.data(call.stream, _response(request, final=final))] for final in (False, True)
        )
        self.size = len(self._next[0])

    def message(self) -> list[bytes]:
        return self._next if self.left else self._last

    def send_stop(self) -> None:
        self.call.send_message(_final(self.request_id))


class TextAnswer(StreamedAnswer):
    """An answer of the llmapi repository's model, with the complete text so far in each message.

    The text of the first message has `before` + 1 tokens, that of the last message `tokens` tokens.
    """

    __slots__ = ("_texts", "_tokens")

    def __init__(
        self, call: ServerCall, request: pb.ModelInferRequest, tokens: int, before: int
    ) -> None:
        super().__init__(call, request.id, tokens - before)
        self._texts = Texts(request, call.stream)
        self._tokens = before

    def message(self) -> list[bytes]:
        self._tokens += 1
        sent = self._texts.frames(self._tokens, final=not self.left)
        # Use the size of this message as an estimate: the next message is only one token longer.
        self.size = sum(map(len, sent))
        return sent

    def send_stop(self) -> None:
        self.call.send_message(_final(self.request_id))


def _final(request_id: str) -> bytes:
    """Return a serialized final response without outputs, which ends a stopped request."""
    final = pb.ModelStreamInferResponse()
    final.infer_response.id = request_id
    final.infer_response.model_name = "tensorrt_llm"
    final.infer_response.parameters["triton_final_response"].bool_param = True
    return bytes(final.SerializeToString())


def _response(request: pb.ModelInferRequest, *, final: bool) -> bytes:
    message = pb.ModelStreamInferResponse()
    response = message.infer_response
    response.model_name, response.model_version = request.model_name, "1"
    response.id = request.id
    response.parameters["triton_final_response"].bool_param = final
    # Return the default outputs if the request does not name any.
    names = [output.name for output in request.outputs] or ["output_ids", "sequence_length"]
    if not request.outputs and any(tensor.name == _STATISTICS for tensor in request.inputs):
        names.append("kv_cache_reused_blocks")
    for name in names:
        response.outputs.add(name=name, datatype="INT32", shape=_OUTPUTS[name])
        response.raw_output_contents.append(struct.pack("<i", _VALUES[name]))
    return bytes(message.SerializeToString())


async def run(port: int, repository: Path, events: Path | None, seed: int | None) -> None:
    """Serve the model tensorrt_llm of a model repository until the task is cancelled."""
    config = model_config_pb2.ModelConfig()
    text_format.Parse((repository / "tensorrt_llm" / "config.pbtxt").read_text(), config)
    await serve(Upstream(config, Log(events.open("a") if events else None), seed), port)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--repository", type=Path, required=True)
    parser.add_argument("--events", type=Path)
    parser.add_argument("--seed", type=int, help="the script of all requests, in place of theirs")
    options = parser.parse_args()
    uvloop.run(run(options.port, options.repository, options.events, options.seed))


if __name__ == "__main__":
    main()
