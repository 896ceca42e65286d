"""Clients that receive tokens and discard them: the minimum cost without a gateway.

    python -m bench.receivers tritonclient|direct --triton HOST:PORT --streams N --seed SEED

`tritonclient` is tritonclient.grpc.aio on uvloop, with one gRPC stream per request. `direct` is the
client of `bench.direct`, which reads HTTP/2 frames from a socket. Neither reads the contents of the
messages. The command prints an empty line when it is ready. It reads a line from stdin: the
monotonic times at which the measurement window begins and ends. After the window, it prints a line
of JSON: the number of messages in the window, and the sorted gaps between two messages of a stream
in seconds. If there are 1,000 gaps or more, it prints only every n-th gap.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import numpy.typing as npt
import tritonclient.grpc.aio as triton
import uvloop

from bench import direct

TOKENS = 500_000
MAX_GAPS = 1000


class MessageCounter:
    """Counter of the gRPC messages that arrive between `begin` and `end`.

    `gaps` has the times in seconds between two messages of the same stream.
    """

    def __init__(self, begin: float, end: float) -> None:
        self._begin, self._end = begin, end
        self.messages = 0
        self.gaps: list[float] = []

    def note(self, last: float) -> float:
        """Record the arrival of a message, and return the current time.

        `last` is the time of the previous message of the stream, or 0 for its first message.
        """
        now = time.monotonic()
        if self._begin <= now < self._end:
            self.messages += 1
            if last:
                self.gaps.append(now - last)
        return now


def _inputs(seed: int) -> list[Any]:
    values: dict[str, npt.NDArray[Any]] = {
        "input_ids": np.array([[5, 6, 7]], np.int32),
        "input_lengths": np.array([[3]], np.int32),
        "request_output_len": np.array([[TOKENS]], np.int32),
        "random_seed": np.array([[seed]], np.uint64),
        "streaming": np.array([[True]], np.bool_),
    }
    kinds = {"int32": "INT32", "uint64": "UINT64", "bool": "BOOL"}
    inputs = []
    for name, value in values.items():
        inputs.append(triton.InferInput(name, list(value.shape), kinds[value.dtype.name]))
        inputs[-1].set_data_from_numpy(value)
    return inputs


async def _tritonclient(address: str, streams: int, seed: int, counter: MessageCounter) -> None:
    client = triton.InferenceServerClient(address)
    outputs = [triton.InferRequestedOutput(name) for name in ("output_ids", "sequence_length")]

    async def stream(n: int) -> None:
        async def requests() -> AsyncIterator[dict[str, Any]]:
            yield {
                "model_name": "tensorrt_llm",
                "inputs": _inputs(seed),
                "outputs": outputs,
                "request_id": f"{n:032x}",
                "enable_empty_final_response": True,
            }

        while True:
            last = 0.0
            async for _, error in client.stream_infer(requests()):
                if error is not None:
                    raise error
                last = counter.note(last)

    await asyncio.gather(*[stream(n) for n in range(streams)])


async def _direct(address: str, streams: int, seed: int, counter: MessageCounter) -> None:
    line = await direct.connect(address)
    over = asyncio.get_running_loop().create_future()

    def ask(n: int) -> None:
        last = 0.0

        def received(count: int, *, end: bool) -> None:
            nonlocal last
            for _ in range(count):
                last = counter.note(last)
            if end:
                ask(n)

        line.ask(direct.infer_request(f"{n:032x}", [5, 6, 7], TOKENS, seed), received)

    for n in range(streams):
        ask(n)
    await over


async def _until(end: float, work: Any) -> None:
    try:
        async with asyncio.timeout(end - time.monotonic() + 0.1):
            await work
    except TimeoutError:
        return


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kind", choices=["tritonclient", "direct"])
    parser.add_argument("--triton", required=True)
    parser.add_argument("--streams", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    options = parser.parse_args()
    print(flush=True)
    begin, end = map(float, input().split())
    counter = MessageCounter(begin, end)
    receive = {"tritonclient": _tritonclient, "direct": _direct}[options.kind]
    work = receive(options.triton, options.streams, options.seed, counter)
    uvloop.run(_until(end, work))
    # Print a sample of the gaps that is small enough for one write to the pipe.
    gaps = sorted(counter.gaps)[:: len(counter.gaps) // MAX_GAPS + 1]
    print(json.dumps({"messages": counter.messages, "gaps": gaps}), flush=True)


if __name__ == "__main__":
    main()
