"""`gateway lora`: manages the adapters of a running gateway over its HTTP endpoints."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adapters import npy_files
from adapters.file_kinds import describe_gguf
from ops.commands import admin_api, lora_agent
from ops.commands.admin_api import AdminApi
from ops.commands.folders import adapter_folder_problem

if TYPE_CHECKING:
    from adapters.adapter import Adapter

_PEFT_FILES = (
    *("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"),
    *("tokenizer_config.json", "chat_template.jinja"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Adds, lists and changes LoRA adapters. Talks to the gateway at --url, by default the one "
        "that `gateway up` runs with this state folder; the admin key is read from "
        "GATEWAY_ADMIN_KEY or from that folder."
    )
    where = admin_api.options()
    commands = parser.add_subparsers(dest="lora_command", required=True, metavar="COMMAND")
    for name, files in (("add", "PEFT"), ("import-npy", "model.lora_*.npy")):
        command = commands.add_parser(
            name, parents=[where], help=f"serve the adapter of a folder with {files} files"
        )
        command.add_argument("name", help="the adapter's name")
        command.add_argument(
            "source",
            help="folder here, which is uploaded"
            + ("; or https://, s3:// or hf://, which the gateway fetches" * (name == "add")),
        )
        command.add_argument("--base", required=True, help="the base model it was trained on")
    commands.add_parser("list", parents=[where], help="all adapters")
    for name, text in (
        ("show", "one adapter with its versions"),
        ("verify", "read every version of an adapter with its checksums"),
        ("remove", "stop serving an adapter"),
    ):
        commands.add_parser(name, parents=[where], help=text).add_argument(
            "name", help="the adapter's name"
        )
    rollback = commands.add_parser("rollback", parents=[where], help="serve an older version")
    rollback.add_argument("name", help="the adapter's name")
    rollback.add_argument("version", nargs="?", help="default: the one that was served before")
    lora_agent.add_arguments(
        commands.add_parser("agent", help="keep adapters on the disk of a Triton that reads them")
    )
    size = commands.add_parser("size", help="how many adapters fit TensorRT-LLM's caches")
    size.add_argument("engine", type=Path, help="engine folder, or a Hugging Face model folder")
    size.add_argument("adapters", type=Path, nargs="+", help="PEFT adapter folders")
    size.add_argument("--count", type=int, default=1, help="how many of each (default: 1)")
    size.add_argument("--host-bytes", type=int, help="host cache (default: 1 GiB)")
    size.add_argument("--gpu-bytes", type=int, help="bytes of the GPU cache, if known")


def run(parsed: argparse.Namespace) -> int:
    """Run one command and return the exit code.

    Raises SystemExit, with an error message, if the command fails.
    """
    if parsed.lora_command == "size":
        return _size(parsed)
    if parsed.lora_command == "agent":
        return lora_agent.run(parsed)
    call = AdminApi("gateway lora", "/v1/adapters", parsed)
    if parsed.lora_command in {"add", "import-npy"}:
        names = _PEFT_FILES if parsed.lora_command == "add" else npy_files.ALL
        if parsed.lora_command == "add" and "://" in parsed.source:
            wanted = {"name": parsed.name, "base": parsed.base, "source": parsed.source}
            _print(call("POST", "", json=wanted))
        else:
            _print(_upload(call, parsed.name, parsed.base, Path(parsed.source), names))
    elif parsed.lora_command == "list":
        _list(call("GET", ""))
    elif parsed.lora_command == "show":
        _print(call("GET", parsed.name))
    elif parsed.lora_command == "verify":
        _print(call("POST", f"{parsed.name}/verify"))
    elif parsed.lora_command == "rollback":
        body = {"version": parsed.version} if parsed.version else {}
        _print(call("POST", f"{parsed.name}/rollback", json=body))
    else:
        _print(call("DELETE", parsed.name))
    return 0


def _list(found: Any) -> None:
    for each in found["declared"]:
        if each["error"]:
            print(f"{each['name']}: {each['source']}: {each['error']}", file=sys.stderr)
    for record in found["data"]:
        columns = [record["name"], record["base"], record["served"]]
        [source] = [v["source"] for v in record["versions"] if v["version"] == record["served"]]
        print(*columns, f"{len(record['versions'])} version(s)", source, sep="\t")


def _upload(call: AdminApi, name: str, base: str, folder: Path, names: tuple[str, ...]) -> Any:
    if problem := adapter_folder_problem(folder):
        raise SystemExit(f"gateway lora: {problem}")
    found = [folder / file for file in names if (folder / file).is_file()]
    if not found:
        instead = describe_gguf(folder, "; ")
        raise SystemExit(f"gateway lora: {folder} has none of {', '.join(names)}{instead}")
    files = [("file", (path.name, path.open("rb"))) for path in found]
    try:
        return call("POST", "", data={"name": name, "base": base}, files=files)
    finally:
        for _, (_, file) in files:
            file.close()


def _size(parsed: argparse.Namespace) -> int:
    from dataclasses import replace

    from adapters import sizes
    from adapters.adapter import MODULE_IDS
    from adapters.base_model import read_base_model
    from adapters.convert import convert
    from adapters.errors import AdapterError

    try:
        read = [_read_adapter(folder) for folder in parsed.adapters]
        # Accept all base model names in the adapters: names do not affect sizes.
        named = {adapter.settings.base_model_name_or_path or "" for adapter in read}
        base = read_base_model(parsed.engine, tuple(named))
        each = [convert(adapter, base).modules for adapter in read]
        if base.lora_target_modules == tuple(MODULE_IDS):
            # Assume an engine with exactly the modules that the adapters change. `parsed.engine` is
            # a Hugging Face folder here, which does not state the engine's LoRA modules.
            used = tuple(dict.fromkeys(row.module for rows in each for row in rows))
            base = replace(base, lora_target_modules=used)
        adapters = each * parsed.count
        host = parsed.host_bytes or sizes.DEFAULT_HOST_BYTES
        fit = sizes.cache_fit(base, adapters, sizes.CacheSettings(host, parsed.gpu_bytes))
        best = sizes.recommend(base, adapters)
    except AdapterError as error:
        raise SystemExit(f"gateway lora size: {error}") from error
    print(f"adapters: {len(adapters)}; one page: {fit.page_bytes} bytes")
    print(f"host cache of {host} bytes: holds {fit.host_adapters} of the largest at once")
    if fit.gpu_adapters is not None:
        print(f"GPU cache of {parsed.gpu_bytes} bytes: holds {fit.gpu_adapters} at once")
    print("to hold all of them in host memory:")
    print(f"  lora_cache_host_memory_bytes:{best.host_bytes}")
    print(f"  lora_cache_optimal_adapter_size:{best.optimal_adapter_size}")
    print(f"  lora_cache_max_adapter_size:{best.max_adapter_size}")
    return 0


def _read_adapter(folder: Path) -> Adapter:
    """Read an adapter's folder. If it is not valid, raise SystemExit with an error message."""
    from adapters import peft
    from adapters.errors import AdapterError

    try:
        return peft.read(folder)
    except AdapterError as error:
        raise SystemExit(f"gateway lora size: {folder}: {error}") from error


def _print(value: Any) -> None:
    print(json.dumps(value, indent=2))
