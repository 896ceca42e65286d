"""The `gateway` command. Each subcommand imports what it needs, so that --help is quick."""

# ruff: noqa: PLC0415
from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from gateway import lora_commands

DEMO_MODEL = Path(__file__).parents[1] / "demo" / "model"
DEMO_ADAPTERS = DEMO_MODEL.parent / "adapters"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line `arguments` (those of the process if None); returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="gateway",
        description="OpenAI-compatible API gateway for Triton running TensorRT-LLM.",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_up(
        commands.add_parser(
            "up", help="start Redis, Triton and the gateway on this machine", allow_abbrev=False
        )
    )
    commands.add_parser(
        "serve",
        help="run the gateway alone",
        description="Runs the gateway against the Triton that the GATEWAY_* variables name.",
    )
    lora_commands.add_arguments(commands.add_parser("lora", help="add, list and change adapters"))
    parsed = parser.parse_args(arguments)
    if parsed.command == "lora":
        return lora_commands.run(parsed)
    return _up(parsed) if parsed.command == "up" else _serve(parser)


def _add_up(parser: argparse.ArgumentParser) -> None:
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
    parser.add_argument(
        "--model",
        type=Path,
        metavar="DIR",
        help="Hugging Face Llama folder or engine folder, with tokenizer.json (default: demo/model "
        "of the source tree)",
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
        default="demo",
        metavar="NAME",
        help="the model's name for clients (default: demo)",
    )
    for server in ("redis", "triton-http", "triton-grpc", "triton-metrics"):
        parser.add_argument(
            f"--{server}-port", type=_port, default=0, metavar="PORT", help="default: a free one"
        )
    parser.add_argument(
        "--parameter",
        action="append",
        default=[],
        type=_parameter,
        metavar="NAME=VALUE",
        help="a template parameter of the model repository; may be repeated",
    )
    parser.add_argument(
        "--restart",
        action="store_true",
        help="start Redis or Triton again when it dies, instead of ending",
    )


def _up(parsed: argparse.Namespace) -> int:
    from gateway.stack.stack import Options
    from gateway.stack.up import WantedPorts, up

    if parsed.model is None and not DEMO_MODEL.exists():
        raise SystemExit(f"gateway up: {DEMO_MODEL} does not exist; name a model with --model DIR")
    options = Options(
        model=parsed.model or DEMO_MODEL,
        adapters=dict(parsed.adapter) or (_demo_adapters() if parsed.model is None else {}),
        state_dir=parsed.state_dir,
        model_name=parsed.model_name,
        parameters=dict(parsed.parameter),
        restart=parsed.restart,
    )
    wanted = WantedPorts(
        gateway=parsed.port,
        redis=parsed.redis_port,
        triton_http=parsed.triton_http_port,
        triton_grpc=parsed.triton_grpc_port,
        triton_metrics=parsed.triton_metrics_port,
    )
    return up(options, wanted)


def _serve(parser: argparse.ArgumentParser) -> int:
    from pydantic import ValidationError

    from gateway.server import serve
    from gateway.settings import Settings

    try:
        settings = Settings()  # type: ignore[call-arg]  # pydantic reads the environment
    except ValidationError as error:
        problems = (
            f"GATEWAY_{'_'.join(str(part) for part in problem['loc']).upper()}: {problem['msg']}"
            for problem in error.errors()
        )
        parser.exit(2, "gateway serve: " + "\n".join(problems) + "\n")
    serve(settings)
    return 0


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
    return name, Path(folder)


def _parameter(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise argparse.ArgumentTypeError(f"found {text!r}, allowed NAME=VALUE")
    return name, value
