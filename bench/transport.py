"""CPU time for receiving a token: the gateway's gRPC clients compared with tritonclient.

    python -m bench.transport --triton HOST:PORT [--streams N] [--seconds S] [--rounds N]

The server is `python -m bench.upstream`, which sends tokens at the pace that a request selects, or
a Triton, whose engine determines the pace. Each client is a separate process on the last CPU core.
It receives N streams and discards the data. All clients are measured once in each round. The
command prints the client's CPU time per message in microseconds, as the median of the rounds.
`trickle` is for slow tokens, one every 20 ms per stream. `burst` is for tokens that are sent as
fast as the client reads them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import tritonclient.grpc.aio as triton
import uvloop
from tritonclient.grpc import service_pb2 as pb

from gateway.triton.client import TritonClient
from gateway.triton.transport import ConnectionOptions

KINDS = ("tritonclient", "grpcio", "http2")
# Milliseconds between two tokens; 0 for tokens as fast as the client reads. The client sends this
# number as the seed of its requests. The scripted upstream takes the pace from the seed.
PACES = {"trickle": 20, "burst": 0}
TOKENS = 500_000
_WARM_UP_S = 1.5


def request_of(seed: int, number: int) -> pb.ModelInferRequest:
    request = pb.ModelInferRequest(model_name="tensorrt_llm", id=f"{number:032x}")
    request.parameters["triton_enable_empty_final_response"].bool_param = True
    for name, datatype, shape, raw in (
        ("input_ids", "INT32", (1, 3), [5, 6, 7]),
        ("input_lengths", "INT32", (1, 1), [3]),
        ("request_output_len", "INT32", (1, 1), [TOKENS]),
    ):
        request.inputs.add(name=name, datatype=datatype, shape=shape)
        request.raw_input_contents.append(b"".join(n.to_bytes(4, "little") for n in raw))
    request.inputs.add(name="random_seed", datatype="UINT64", shape=(1, 1))
    request.raw_input_contents.append(seed.to_bytes(8, "little"))
    request.inputs.add(name="streaming", datatype="BOOL", shape=(1, 1))
    request.raw_input_contents.append(b"\x01")
    for name in ("output_ids", "sequence_length"):
        request.outputs.add(name=name)
    return request


class Count:
    messages = 0


async def ours(kind: Any, address: str, request: pb.ModelInferRequest, count: Count) -> None:
    client = CLIENTS.get(address) or CLIENTS.setdefault(
        address, TritonClient(address, ConnectionOptions(transport=kind))
    )
    stream = await client.infer(request.SerializeToString())
    while await stream.read() is not None:
        count.messages += 1


CLIENTS: dict[str, TritonClient] = {}


async def theirs(client: Any, request: pb.ModelInferRequest, count: Count) -> None:
    inputs = []
    for tensor, raw in zip(request.inputs, request.raw_input_contents, strict=True):
        inputs.append(triton.InferInput(tensor.name, list(tensor.shape), tensor.datatype))
        inputs[-1]._raw_content = raw

    async def requests() -> AsyncIterator[dict[str, Any]]:
        yield {
            "model_name": "tensorrt_llm",
            "inputs": inputs,
            "outputs": [triton.InferRequestedOutput(output.name) for output in request.outputs],
            "request_id": request.id,
            "enable_empty_final_response": True,
        }

    async for _, error in client.stream_infer(requests()):
        if error is not None:
            raise error
        count.messages += 1


async def receive(kind: str, address: str, streams: int, seed: int, seconds: float) -> None:
    """Receive from `streams` concurrent streams with the client `kind`.

    Print the number of received messages and the CPU seconds of this process as JSON.
    """
    count = Count()
    requests = [request_of(seed, n) for n in range(streams)]
    if kind == "tritonclient":
        client = triton.InferenceServerClient(address)
        work = [theirs(client, request, count) for request in requests]
    else:
        work = [ours(kind, address, request, count) for request in requests]
    tasks = [asyncio.create_task(each) for each in work]
    await asyncio.sleep(_WARM_UP_S)
    messages, cpu = count.messages, time.process_time()
    await asyncio.sleep(seconds)
    print(json.dumps([count.messages - messages, time.process_time() - cpu]), flush=True)
    for task in tasks:
        if task.done():
            task.result()
    os._exit(0)  # exit without closing the streams, which would not end for a long time


def measure(options: argparse.Namespace, kind: str, pace: str) -> tuple[float, float]:
    """Run one client in a new process. Return CPU microseconds per message, messages per second."""
    core = max(os.sched_getaffinity(0))
    command = ["taskset", "-c", str(core), sys.executable, "-m", "bench.transport"]
    command += ["--triton", options.triton, "--streams", str(options.streams)]
    command += ["--seconds", str(options.seconds), "--receive", kind, str(PACES[pace])]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    messages, cpu = json.loads(done.stdout)
    return 1e6 * cpu / max(messages, 1), messages / options.seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--triton", required=True, help="host:port of its gRPC")
    parser.add_argument("--streams", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--pace", choices=list(PACES), nargs="*", default=list(PACES))
    parser.add_argument("--receive", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.receive:
        kind, seed = options.receive
        uvloop.run(receive(kind, options.triton, options.streams, int(seed), options.seconds))
        return
    for pace in options.pace:
        costs: dict[str, list[float]] = {kind: [] for kind in KINDS}
        rates: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for turn in range(options.rounds):
            for kind in KINDS if turn % 2 else reversed(KINDS):
                cost, rate = measure(options, kind, pace)
                costs[kind].append(cost)
                rates[kind].append(rate)
        first = statistics.median(costs[KINDS[0]])
        for kind in KINDS:
            cost = statistics.median(costs[kind])
            rate = statistics.median(rates[kind])
            print(f"{pace:8} {kind:13} {cost:6.1f} us  x {cost / first:.2f}  {rate:9,.0f} /s")


if __name__ == "__main__":
    main()
