"""`gateway up`: runs Redis, Triton and the gateway on this machine."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from ops.commands.folders import adapter_folder_problem

if TYPE_CHECKING:
    from ops.local_stack.stack import StackOptions

DEMO_MODEL = Path(__file__).parents[2] / "demo" / "model"
DEMO_ADAPTERS = DEMO_MODEL.parent / "adapters"
INFLIGHT, LLMAPI = REPOSITORIES = ("inflight_batcher_llm", "llmapi")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Starts Redis, Triton with a model and the gateway, in the foreground. Prints "
        "`ready: URL` when requests are served; SIGINT or SIGTERM ends everything."
    )
    parser.add_argument(
        "--port",
        type=_port,
        default=9000,
        metavar="PORT",
        help="the gateway's; 0 takes a free one (default: 9000)",
    )
    parser.add_argument(
        "--state-dir",
        type=Path,
        default=Path(".state"),
        metavar="DIR",
        help="folder for data, logs and state.json (default: .state)",
    )
    model = parser.add_mutually_exclusive_group()
    model.add_argument(
        "--imported",
        type=Path,
        metavar="DIR",
        help="a folder that `gateway import --cpu` made, with its repository and model name",
    )
    model.add_argument(
        "--model",
        type=Path,
        metavar="DIR",
        help="Hugging Face folder of a Llama or GPT-2, or engine folder, with tokenizer.json "
        "(default: demo/model of the source tree)",
    )
    parser.add_argument(
        "--adapter",
        action="append",
        default=[],
        type=_adapter,
        metavar="NAME=DIR",
        help="a LoRA adapter in PEFT form to serve; may be repeated (default with the default "
        "model: those of demo/adapters)",
    )
    parser.add_argument(
        "--model-name",
        metavar="NAME",
        help="the model's name for clients (default: demo, or as imported)",
    )
    for server in ("redis", "triton-http", "triton-grpc", "triton-metrics"):
        parser.add_argument(
            f"--{server}-port", type=_port, default=0, metavar="PORT", help="default: a free one"
        )
    parser.add_argument(
        "--repository",
        choices=REPOSITORIES,
        default=REPOSITORIES[0],
        help="the model repository that Triton loads: five models and token ids, or the one of "
        "TensorRT-LLM's LLM API and text (default: %(default)s)",
    )
    parser.add_argument(
        "--parameter",
        action="append",
        default=[],
        type=_parameter,
        metavar="NAME=VALUE",
        help="a template parameter of the model repository, such as llmapi's behaves_as=1.2; may "
        "be repeated",
    )
    parser.add_argument(
        "--load-model",
        action="append",
        default=[],
        metavar="NAME",
        help="load only this model of the repository; may be repeated (default: all of them; "
        "the gateway needs `tensorrt_llm` alone, which starts for two fifths of the CPU time)",
    )
    parser.add_argument(
        "--restart",
        action="store_true",
        help="start Redis or Triton again when it or a model of it dies, instead of ending",
    )


def run(parsed: argparse.Namespace) -> int:
    """Run the local stack until SIGINT or SIGTERM. Return the exit code."""
    from gateway.config.environment import find_unknown_variables
    from ops.local_stack.up import RequestedPorts, up

    # Check the environment variables before any server is started. The gateway checks them, too,
    # but starts only when Redis and Triton are ready.
    if problems := find_unknown_variables():
        raise SystemExit("gateway up: " + "\n".join(problems))
    wanted = RequestedPorts(
        gateway=parsed.port,
        redis=parsed.redis_port,
        triton_http=parsed.triton_http_port,
        triton_grpc=parsed.triton_grpc_port,
        triton_metrics=parsed.triton_metrics_port,
    )
    return up(_imported_options(parsed) if parsed.imported else _options(parsed), wanted)


def _options(parsed: argparse.Namespace) -> StackOptions:
    from ops.local_stack.stack import StackOptions

    if parsed.model is None and not DEMO_MODEL.exists():
        raise SystemExit(f"gateway up: {DEMO_MODEL} does not exist; name a model with --model DIR")
    return StackOptions(
        model=parsed.model or DEMO_MODEL,
        adapters=dict(parsed.adapter) or (_demo_adapters() if parsed.model is None else {}),
        state_dir=parsed.state_dir,
        model_name=parsed.model_name or "demo",
        parameters=dict(parsed.parameter),
        llmapi=parsed.repository == LLMAPI,
        load_models=tuple(parsed.load_model),
        restart=parsed.restart,
    )


def _imported_options(parsed: argparse.Namespace) -> StackOptions:
    from ops.deployment.importing import ImportingError, read_imported
    from ops.local_stack.llmapi import MAX_SEQ_LEN
    from ops.local_stack.stack import StackOptions

    if parsed.repository != INFLIGHT:
        raise SystemExit("gateway up: --repository: an imported one is there; leave it out")
    if parsed.parameter:
        raise SystemExit("gateway up: --parameter: the repository is rendered; import it anew")
    try:
        imported = read_imported(parsed.imported)
    except ImportingError as error:
        raise SystemExit(f"gateway up: {error}") from error
    limit = imported.max_seq_len
    return StackOptions(
        model=imported.tokenizer_dir,
        adapters=dict(parsed.adapter),
        state_dir=parsed.state_dir,
        model_name=parsed.model_name or imported.name,
        parameters={} if limit is None else {MAX_SEQ_LEN: str(limit)},
        llmapi=limit is not None,
        repository=imported.repository,
        triton_model=imported.own_triton_name,
        load_models=tuple(parsed.load_model),
        restart=parsed.restart,
    )


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65_535:
        raise argparse.ArgumentTypeError(f"found {text!r}, allowed 0 to 65535")
    return int(text)


def _demo_adapters() -> dict[str, Path]:
    return {folder.name: folder for folder in sorted(DEMO_ADAPTERS.glob("*/"))}


def _adapter(text: str) -> tuple[str, Path]:
    name, equals, folder = text.partition("=")
    if not equals or not name or not folder:
        raise argparse.ArgumentTypeError(f"found {text!r}, allowed NAME=DIR")
    if problem := adapter_folder_problem(Path(folder)):
        raise argparse.ArgumentTypeError(f"{name}: {problem}")
    return name, Path(folder)


def _parameter(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise argparse.ArgumentTypeError(f"found {text!r}, allowed NAME=VALUE")
    return name, value
