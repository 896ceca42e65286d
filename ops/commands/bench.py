"""`gateway bench`: load tests of a deployment of Triton and the gateway.

A test sends its requests to one of three: to Triton's model that runs the engine, to Triton's
ensemble, or to the gateway.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ops.commands.client import TOKENIZER_TYPE_HELP, TOKENIZER_TYPES, grpc_alone

if TYPE_CHECKING:
    from ops.loadtest.measurement import BenchPlan

MODES = ("core", "e2e", "chat")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Measures one request path or several with the same requests: core (token ids, or text to "
        "llmapi, to tensorrt_llm), e2e (text to the ensemble), chat (the gateway). Options and "
        "table are those of benchmark_core_model.py of tensorrtllm_backend. By default the stack "
        "of `gateway up` in this folder is measured."
    )
    parser.add_argument(
        "modes",
        type=_modes,
        metavar="MODE",
        help="core, e2e or chat; several with commas, or all: side by side, as a difference",
    )
    where = parser.add_argument_group("servers")
    where.add_argument("-u", "--url", metavar="HOST:PORT", help="Triton's gRPC endpoint")
    where.add_argument(
        *("-i", "--protocol"), type=grpc_alone, metavar="grpc", help="how Triton is asked"
    )
    where.add_argument("--gateway-url", default=os.environ.get("GATEWAY_URL"), metavar="URL")
    where.add_argument(
        "--state-dir",
        type=Path,
        default=Path(".state"),
        metavar="DIR",
        help="of the `gateway up` that is asked when no URL is given (default: .state)",
    )
    where.add_argument("--tensorrt-llm-model-name", default="tensorrt_llm", metavar="NAME")
    where.add_argument("--ensemble-model-name", default="ensemble", metavar="NAME")
    where.add_argument("--model", metavar="NAME", help="for chat (default: the gateway's first)")
    where.add_argument("--api-key", default=os.environ.get("OPENAI_API_KEY"), metavar="KEY")
    where.add_argument(
        "--tokenizer-dir",
        type=Path,
        metavar="DIR",
        help="Hugging Face folder (default: that of Triton's preprocessing model)",
    )
    where.add_argument("--tokenizer-type", choices=TOKENIZER_TYPES, help=TOKENIZER_TYPE_HELP)
    where.add_argument(
        "--endpoint",
        choices=("chat", "completions"),
        help="for chat; completions sends token ids, so that the engine gets what core sends it "
        "(default: chat for a dataset alone, else completions)",
    )
    load = parser.add_argument_group("load")
    load.add_argument(
        "-c",
        "--concurrency",
        type=_levels,
        metavar="N[,N]",
        help="requests at a time, or several levels to sweep (default: no limit)",
    )
    load.add_argument(
        "--request-rate",
        type=float,
        default=-1.0,
        metavar="R",
        help="requests per second; -1 sends all at once (default)",
    )
    load.add_argument(
        "--time-delay-dist",
        choices=("constant", "exponential_dist"),
        default="exponential_dist",
        help="between requests, with --request-rate (default: exponential_dist)",
    )
    load.add_argument(
        "--num-requests", type=_count, default=100, metavar="N", help="at most (default: 100)"
    )
    load.add_argument(
        "--max-input-len", type=_count, metavar="TOKENS", help="longer prompts are left out"
    )
    load.add_argument(
        "--warm-up", type=int, default=10, metavar="N", help="requests before (default: 10)"
    )
    load.add_argument("--seed", type=int, default=0, help="of lengths, ids and arrivals")
    load.add_argument(
        "-S", "--streaming", action="store_true", help="also times tokens; Triton must be decoupled"
    )
    load.add_argument(
        "--timeout", type=float, default=600.0, metavar="SECONDS", help="of one request"
    )
    report = parser.add_argument_group("report")
    report.add_argument("--op-stats-csv", type=Path, metavar="FILE", help="the table")
    report.add_argument("--requests-csv", type=Path, metavar="FILE", help="a line per request")
    report.add_argument("--json", type=Path, metavar="FILE")
    report.add_argument("--plot", type=_svg, metavar="FILE.svg", help="latency against concurrency")
    workloads = parser.add_subparsers(dest="workload", required=True, metavar="WORKLOAD")
    dataset = workloads.add_parser(
        "dataset", help="prompts of a JSON list of {input, instruction, output} or of ShareGPT"
    )
    _add_common(dataset)
    dataset.add_argument("--dataset", type=Path, required=True, metavar="FILE")
    dataset.add_argument(
        "--op-tokens-per-word",
        type=float,
        default=1.3,
        metavar="R",
        help="output length: the words of `output` times this (default: 1.3)",
    )
    normal = workloads.add_parser(
        "token-norm-dist", aliases=["token_norm_dist"], help="random prompts, normal lengths"
    )
    _add_common(normal)
    for side in ("input", "output"):
        normal.add_argument(f"--{side}-mean", type=float, required=True, metavar="TOKENS")
        normal.add_argument(f"--{side}-stdev", type=float, required=True, metavar="TOKENS")
    histogram = workloads.add_parser(
        "token-from-histogram",
        aliases=["token_from_histogram"],
        help="random prompts, lengths from a histogram",
    )
    _add_common(histogram)
    histogram.add_argument("--histogram-key", required=True, metavar="KEY")
    histogram.add_argument(
        "--histogram",
        type=Path,
        required=True,
        metavar="FILE",
        help='JSON: {"KEY_ip": {"buckets": [LENGTH], "freqs": [N]}, "KEY_op": ...}',
    )


def _add_common(workload: argparse.ArgumentParser) -> None:
    """Add options of `gateway bench` to the parser of a workload, such as `dataset`.

    The options may then come before the workload's name or, as in NVIDIA's
    benchmark_core_model.py, after the name.
    """
    unset = argparse.SUPPRESS
    workload.add_argument("--num-requests", type=_count, default=unset, metavar="N", help=unset)
    workload.add_argument("--tokenizer-dir", type=Path, default=unset, metavar="DIR", help=unset)
    workload.add_argument("--tokenizer-type", choices=TOKENIZER_TYPES, default=unset, help=unset)


def run(parsed: argparse.Namespace) -> int:
    """Run the load test and return the exit code.

    The code is 1 if a request failed, 2 if nothing could be measured, and 130 if Ctrl-C ended the
    test.
    """
    import asyncio

    from gateway.errors import GatewayError
    from ops.loadtest import report
    from ops.loadtest.measurement import measure
    from ops.loadtest.plot import latency_against_load
    from ops.loadtest.progress import Progress

    try:
        plan = _plan(parsed)
        runs = asyncio.run(measure(plan, Progress(sys.stderr)))
    except GatewayError as error:
        print(f"gateway bench: error: {error.message}", file=sys.stderr)
        return 2
    except (OSError, ValueError, TimeoutError) as error:
        print(f"gateway bench: error: {error or 'no answer in time'}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    print(report.text(runs))
    if parsed.op_stats_csv is not None:
        report.write_stats_csv(runs, parsed.op_stats_csv)
    if parsed.requests_csv is not None:
        report.write_requests_csv(runs, parsed.requests_csv)
    if parsed.json is not None:
        report.write_json(runs, parsed.json)
    if parsed.plot is not None:
        parsed.plot.write_text(latency_against_load(runs), encoding="utf-8")
    return 1 if any(run.failed for run in runs) else 0


def _plan(parsed: argparse.Namespace) -> BenchPlan:
    """Return the load test that the options describe: servers, modes, requests and load.

    Raises ValueError or OSError if `state.json`, the file with the addresses of the local stack,
    cannot be used.
    """
    from ops.loadtest.measurement import BenchLoad, BenchPlan, Servers
    from ops.loadtest.requests import FromDataset, FromHistogram, FromNormal

    servers = Servers(
        triton=parsed.url,
        gateway=parsed.gateway_url,
        core_model=parsed.tensorrt_llm_model_name,
        text_model=parsed.ensemble_model_name,
        chat_model=parsed.model,
        api_key=parsed.api_key,
        timeout_s=parsed.timeout,
    )
    source: FromDataset | FromHistogram | FromNormal
    if parsed.workload == "dataset":
        source = FromDataset(parsed.dataset, parsed.op_tokens_per_word)
    elif parsed.workload.replace("_", "-") == "token-norm-dist":
        source = FromNormal(
            (parsed.input_mean, parsed.input_stdev), (parsed.output_mean, parsed.output_stdev)
        )
    else:
        source = FromHistogram(parsed.histogram, parsed.histogram_key)
    alone = parsed.modes == ["chat"] and parsed.workload == "dataset"
    return BenchPlan(
        modes=parsed.modes,
        servers=servers.with_defaults(parsed.state_dir),
        source=source,
        load=BenchLoad(
            levels=parsed.concurrency or [None],
            rate=parsed.request_rate,
            arrivals=parsed.time_delay_dist,
            requests=parsed.num_requests,
            max_input=parsed.max_input_len,
            warm_up=parsed.warm_up,
            seed=parsed.seed,
            streaming=parsed.streaming,
        ),
        tokenizer_dir=parsed.tokenizer_dir,
        through_template=(parsed.endpoint or ("chat" if alone else "completions")) == "chat",
    )


def _modes(text: str) -> list[str]:
    modes = list(MODES) if text == "all" else list(dict.fromkeys(text.split(",")))
    if not set(modes) <= set(MODES):
        raise argparse.ArgumentTypeError(f"found {text!r}, allowed all, or of {', '.join(MODES)}")
    return modes


def _levels(text: str) -> list[int]:
    return [_count(part) for part in text.split(",")]


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"found {text!r}, allowed 1 and more")
    return int(text)


def _svg(text: str) -> Path:
    if not text.endswith(".svg"):
        raise argparse.ArgumentTypeError(f"found {text!r}; pictures are written as .svg")
    return Path(text)
