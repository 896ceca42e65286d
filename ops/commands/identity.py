"""`gateway identity-test`: measures the latency of batches of random token ids at Triton.

The options are those of identity_test.py in NVIDIA's tensorrtllm_backend.
"""

from __future__ import annotations

import argparse
import sys


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Sends batches of random token ids to the core model of Triton, past the gateway, and says "
        "what one takes. Options and output are those of identity_test.py of tensorrtllm_backend, "
        "over gRPC. Exit code 1 when a row does not come back with its prompt in front."
    )
    parser.add_argument("-u", "--url", default="localhost:8001", help="default: localhost:8001")
    parser.add_argument("--model-name", default="tensorrt_llm", help="default: tensorrt_llm")
    parser.add_argument("-w", "--warm-up", action="store_true")
    parser.add_argument(
        *("-m", "--mode"),
        choices=("sync", "async"),
        default="sync",
        help="requests one after another (default), or all at once",
    )
    for flags, default, what in (
        (("-p", "--request-parallelism"), 10, "requests in a run"),
        (("-n", "--num-runs"), 1, "runs to take the average of"),
        (("-b", "--batch-size"), 8, "rows of a request"),
        (("-s", "--start-len"), 8, "tokens of a prompt"),
        (("-o", "--output-len"), 10, "tokens of an answer"),
        (("-beam", "--beam-width"), 1, "beams"),
        (("-topk", "--topk"), 1, "top k"),
        (("--vocab-size",), 50255, "ids are below it"),
    ):
        text = f"{what} (default: {default})"
        parser.add_argument(*flags, type=_positive, default=default, metavar="N", help=text)
    parser.add_argument(
        "-topp", "--topp", type=float, default=0.0, metavar="P", help="default: 0, which is none"
    )


def run(parsed: argparse.Namespace) -> int:
    """Measure the latency and return the exit code.

    The code is 1 if an answer is wrong, and 2 if the requests could not be sent.
    """
    import asyncio

    from gateway.errors import GatewayError
    from ops.client.identity import Batches, NotIdentical, measure
    from ops.errors import OptionError

    batches = Batches(
        rows=parsed.batch_size,
        start_len=parsed.start_len,
        output_len=parsed.output_len,
        beam_width=parsed.beam_width,
        top_k=parsed.topk,
        top_p=parsed.topp,
        vocab_size=parsed.vocab_size,
        requests=parsed.request_parallelism,
        runs=parsed.num_runs,
        at_once=parsed.mode == "async",
        warm_up=parsed.warm_up,
    )
    try:
        latency = asyncio.run(measure(parsed.url, parsed.model_name, batches))
    except (GatewayError, TimeoutError, OptionError, NotIdentical) as error:
        print(f"gateway identity-test: error: {error or 'no answer in time'}", file=sys.stderr)
        return 1 if isinstance(error, NotIdentical) else 2
    print(
        f"[INFO] Batch size: {batches.rows}, Start len: {batches.start_len}, "
        f"Output len: {batches.output_len}"
    )
    print(f"[INFO] Latency: {latency:.3f} ms")
    print(f"[INFO] Throughput: {1000 / latency * batches.rows:.3f} sentences / sec")
    return 0


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"found {text}; allowed: an integer of at least 1")
    return int(text)
