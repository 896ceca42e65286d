"""The `gateway` command.

Each subcommand imports its implementation only when it runs, so `gateway --help` starts fast.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import NoReturn

from ops.commands import (
    bench,
    client,
    database,
    engine,
    identity,
    import_,
    key,
    lora,
    repo,
    serve,
    triton,
    up,
)

COMMANDS: tuple[tuple[str, ModuleType, str], ...] = (
    ("up", up, "start Redis, Triton and the gateway on this machine"),
    ("serve", serve, "run the gateway alone"),
    ("key", key, "make and check keys of tenants"),
    ("lora", lora, "add, list and change adapters"),
    ("database", database, "tables of PostgreSQL, and import of older keys"),
    ("engine", engine, "plan and build a TensorRT-LLM engine"),
    ("import", import_, "engine, repository and settings of a Hugging Face model"),
    ("repo", repo, "make and check Triton's model repository"),
    ("triton", triton, "run Triton on a TensorRT-LLM engine"),
    ("client", client, "send one request straight to Triton"),
    ("identity-test", identity, "time batches of token ids straight to Triton"),
    ("bench", bench, "measure Triton and the gateway under load"),
)


class _Version(argparse.Action):
    """argparse action of --version, which prints the version of the package and exits.

    The version is looked up only here, so that other commands start fast.
    """

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        from importlib.metadata import version

        print(f"gateway {version('triton-openai-gateway')}")
        parser.exit()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line `arguments` (default: `sys.argv[1:]`) and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="gateway",
        description="OpenAI-compatible API gateway for Triton running TensorRT-LLM.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version and exit")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, module, text in COMMANDS:
        command = commands.add_parser(name, help=text, allow_abbrev=False)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    parsed = parser.parse_args(list(with_dashes(sys.argv[1:] if arguments is None else arguments)))
    try:
        code = int(parsed.run(parsed))
        sys.stdout.flush()
    except BrokenPipeError:
        # Redirect stdout to /dev/null. The reader has closed the pipe, so Python's flush at exit
        # would raise BrokenPipeError a second time.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code


def with_dashes(arguments: Sequence[str]) -> Iterator[str]:
    """Yield the arguments, with each underscore in an option name replaced by a dash.

    The options of NVIDIA's scripts for Triton have underscores. Users may copy the options from
    command lines of these scripts. Arguments after `--` are unchanged.
    """
    rest = iter(arguments)
    for argument in rest:
        if argument == "--":
            yield argument
            break
        name, equals, value = argument.partition("=")
        yield name.replace("_", "-") + equals + value if name.startswith("--") else argument
    yield from rest
