"""`gateway lora agent`: copies adapters from Redis to a disk from which Triton loads them."""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lora_store.peft_keeper import EngineLimits

_GRACE_S = 900.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Keeps the adapters of the gateways' Redis (GATEWAY_REDIS_URL) as PEFT folders on this "
        "disk, for a Triton that reads them from there, and reports to the gateways what it holds. "
        "SIGINT or SIGTERM end it; the folders stay."
    )
    parser.add_argument("folder", type=Path, help="folder of the adapters, this agent's alone")
    parser.add_argument(
        "--replica",
        action="append",
        required=True,
        type=_replica,
        metavar="HOST:PORT",
        help="Triton's gRPC endpoint as the gateways know it; repeated where several see it",
    )
    parser.add_argument(
        "--max-bytes",
        required=True,
        type=_bytes,
        metavar="BYTES",
        help="what the adapters may take of the disk",
    )
    parser.add_argument(
        "--path", metavar="DIR", help="the folder as Triton sees it (default: as it is here)"
    )
    parser.add_argument(
        "--model-name",
        default=os.environ.get("GATEWAY_MODEL_NAME", "demo"),
        metavar="NAME",
        help="the gateways' GATEWAY_MODEL_NAME (default: that of this environment, or demo)",
    )
    parser.add_argument(
        "--grace",
        type=_seconds,
        default=_GRACE_S,
        metavar="SECONDS",
        help="how long an adapter outlives its last name, and what a gateway used its death; more "
        f"than the gateways' GATEWAY_REQUEST_TIMEOUT (default: {_GRACE_S:g})",
    )

    parser.add_argument(
        "--model-yaml",
        type=Path,
        metavar="FILE",
        help="what Triton's model was loaded with: adapters above max_lora_rank and "
        "lora_target_modules of its lora_config are not held, and gateways learn why",
    )


def run(parsed: argparse.Namespace) -> int:
    """Run the agent until SIGINT or SIGTERM. Return 0.

    Raises SystemExit, with an error message, if an option is wrong or the agent cannot start.
    """
    import logging
    import signal
    import threading
    from urllib.parse import quote

    from lora_store.peft_agent import Agent
    from lora_store.peft_folders import PeftFolders
    from lora_store.peft_notices import PeftNotices
    from lora_store.redis import RedisSettings, RedisTier

    url = os.environ.get("GATEWAY_REDIS_URL")
    if not url:
        raise SystemExit("gateway lora agent: set GATEWAY_REDIS_URL, as for the gateways")
    path = parsed.path or str(parsed.folder.resolve())
    if not path.startswith("/"):
        raise SystemExit(f"gateway lora agent: --path: found {path!r}, allowed an absolute path")
    limits = None if parsed.model_yaml is None else _limits(parsed.model_yaml)
    settings = RedisSettings(url, prefix=f"lora:{quote(parsed.model_name, safe='')}")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    try:
        tier, notices = RedisTier(settings), PeftNotices(settings)
        folders = PeftFolders(parsed.folder)
    except (OSError, ValueError) as error:
        raise SystemExit(f"gateway lora agent: {error}") from error
    try:
        Agent(
            folders,
            tier,
            notices,
            replicas=parsed.replica,
            path=path,
            max_bytes=parsed.max_bytes,
            grace_s=parsed.grace,
            limits=limits,
        ).run(ended)
    finally:
        notices.close()
        tier.close()
    return 0


def _limits(path: Path) -> EngineLimits:
    """Return the maximum rank and the LoRA modules of an engine that the LLM API runs.

    Both are read from `lora_config` in `path`, the model.yaml of the llmapi repository.

    Raises SystemExit, with an error message, if the file is missing or has no usable `lora_config`.
    """
    import yaml

    from lora_store.peft_keeper import EngineLimits
    from ops.deployment.check_llm_arguments import MAX_LORA_RANK

    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise SystemExit(f"gateway lora agent: --model-yaml: {error}") from error
    config = found.get("lora_config") if isinstance(found, dict) else None
    if not isinstance(config, dict):
        raise SystemExit(
            f"gateway lora agent: --model-yaml: {path} has no lora_config: its engine is loaded "
            "without adapters"
        )
    rank, modules = config.get("max_lora_rank"), config.get("lora_target_modules")
    if not isinstance(rank, int | None) or not isinstance(modules, list | None):
        raise SystemExit(
            f"gateway lora agent: --model-yaml: {path}: lora_config: found max_lora_rank {rank!r} "
            f"and lora_target_modules {modules!r}; allowed a number and a list"
        )
    rank = MAX_LORA_RANK if rank is None else rank
    return EngineLimits(rank, None if modules is None else frozenset(map(str, modules)))


def _replica(text: str) -> str:
    """Return the address HOST:PORT in `text`. A URL scheme, such as grpc://, is removed.

    Raises ArgumentTypeError if the rest is not HOST:PORT.
    """
    address = text.rpartition("://")[2]
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise argparse.ArgumentTypeError(f"found {text!r}, allowed HOST:PORT")
    return address


def _bytes(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"found {text!r}, allowed a number of bytes")
    return int(text)


def _seconds(text: str) -> float:
    try:
        if 0 <= (seconds := float(text)) < math.inf:
            return seconds
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"found {text!r}, allowed a number of seconds, 0 or more")
