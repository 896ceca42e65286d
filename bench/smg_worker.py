"""A scripted TensorRT-LLM worker for SMG's gRPC mode, without an engine.

    python -m bench.smg_worker --port N --model NAME [--events FILE]

The messages are the same as from TensorRT-LLM's own gRPC server (`TrtllmService`). Each token is a
chunk, which also has the number of tokens so far. The last message repeats all token ids. The
request selects the number and the pace of the tokens, as in the scripted Triton (`bench.upstream`).
The pace is in `top_k`, because SMG does not pass on seeds. FILE is the log of the requests' events.
A call of the method Abort is logged as a stop request. The worker needs the package smg-grpc-proto.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import uvloop
from smg_grpc_proto.generated import trtllm_service_pb2 as pb

from bench import frames
from bench.grpc_server import Log, ScriptedService, ServerCall, StreamedAnswer, serve
from bench.upstream import TOKEN
from gateway.triton.request import varint

SERVICE = "/trtllm.TrtllmService/"
_MAX_SEQ_LEN = 1_000_000


class SmgWorker(ScriptedService):
    """Scripted service with the gRPC methods that SMG calls on its worker."""

    def __init__(self, model: str, log: Log) -> None:
        info = pb.GetModelInfoResponse(
            model_id=model, max_input_len=_MAX_SEQ_LEN, max_seq_len=_MAX_SEQ_LEN, vocab_size=4096
        )
        replies = {
            "HealthCheck": pb.HealthCheckResponse(status="OK"),
            "GetModelInfo": info,
            "GetServerInfo": pb.GetServerInfoResponse(version="1.2.0", backend="tensorrt-llm"),
        }
        self._replies = {SERVICE + name: reply for name, reply in replies.items()}
        super().__init__(log, {*self._replies, SERVICE + "Generate", SERVICE + "Abort"})

    def receive(self, call: ServerCall, message: bytes) -> None:
        if (reply := self._replies.get(call.path)) is not None:
            call.send_message(reply.SerializeToString())
        elif call.path == SERVICE + "Abort":
            ran = self.stop(pb.AbortRequest.FromString(message).request_id)
            call.send_message(pb.AbortResponse(success=ran).SerializeToString())
        else:
            request = pb.GenerateRequest.FromString(message)
            answer = GenerateAnswer(call, request)
            self.begin(answer, request.max_tokens, request.sampling_config.top_k)


class GenerateAnswer(StreamedAnswer):
    """A response to a Generate request: a chunk per token, then a message with all token ids."""

    __slots__ = ("_heads", "_prompt", "_tokens")

    def __init__(self, call: ServerCall, request: pb.GenerateRequest) -> None:
        super().__init__(call, request.request_id, request.max_tokens)
        self._tokens = 0
        self._prompt = len(request.tokenized.input_token_ids)
        # Serialize the beginning of a chunk in advance. Chunks differ only in the last field,
        # `completion_tokens`, and in the message length at the beginning. The length depends only
        # on the size of the field (1 to 4 bytes), so four beginnings are enough.
        self._heads = [self._chunk(128**size)[: -size - 1] for size in range(4)]
        self._reserve()

    def message(self) -> list[bytes]:
        self._tokens += 1
        count = varint(self._tokens)
        chunk = self._heads[len(count) - 1] + count
        if not self.left:
            return [chunk, self._complete()]
        self._reserve()
        return [chunk]

    def send_stop(self) -> None:
        """Send nothing, because the call of an aborted request ends without a further message."""

    def _reserve(self) -> None:
        last = self.left == 1
        self.size = len(self._heads[-1]) + 4 + (len(self._complete()) if last else 0)

    def _chunk(self, count: int) -> bytes:
        """Return the DATA frame of a chunk with one token.

        `count` is the number of tokens so far, including this token.
        """
        chunk = pb.GenerateStreamChunk(
            token_ids=[TOKEN], prompt_tokens=self._prompt, completion_tokens=count
        )
        return self._frame(pb.GenerateResponse(request_id=self.request_id, chunk=chunk))

    def _complete(self) -> bytes:
        tokens = self._tokens + self.left
        complete = pb.GenerateComplete(
            output_token_ids=[TOKEN] * tokens,
            finish_reason="length",
            prompt_tokens=self._prompt,
            completion_tokens=tokens,
        )
        return self._frame(pb.GenerateResponse(request_id=self.request_id, complete=complete))

    def _frame(self, response: pb.GenerateResponse) -> bytes:
        return frames.data(self.call.stream, response.SerializeToString())


async def run(port: int, model: str, events: Path | None) -> None:
    """Serve the model on a port of 127.0.0.1 until the task is cancelled."""
    await serve(SmgWorker(model, Log(events.open("a") if events else None)), port)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--events", type=Path)
    options = parser.parse_args()
    uvloop.run(run(options.port, options.model, options.events))


if __name__ == "__main__":
    main()
