"""`gateway key`: keys for the tenants of the configuration file."""

from __future__ import annotations

import argparse
import getpass
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gateway.config.file import Configuration
    from gateway.config.marked_yaml import MarkedYaml


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Makes and checks keys. The configuration file keeps their SHA-256 hashes alone, so a key "
        "that is lost cannot be found again: make another one."
    )
    commands = parser.add_subparsers(dest="key_command", required=True, metavar="COMMAND")
    new = commands.add_parser(
        "new",
        help="print a new key, once, and the line for the configuration file",
        description="Prints the key on the first line of standard output and what the "
        "configuration file needs on the second.",
    )
    whose = new.add_mutually_exclusive_group(required=True)
    whose.add_argument("--tenant", metavar="NAME", help="whose key it is")
    whose.add_argument("--admin", action="store_true", help="a key for the adapter endpoints")
    check = commands.add_parser(
        "check",
        help="check the configuration file, and whose a key is",
        description="Checks the configuration file, then reads a key from standard input and says "
        "whose it is. An empty line asks for the file alone.",
    )
    for command in (new, check):
        command.add_argument(
            "--config",
            type=Path,
            default=os.environ.get("GATEWAY_CONFIG"),
            metavar="FILE",
            help="the configuration file (default: GATEWAY_CONFIG)",
        )


def run(parsed: argparse.Namespace) -> int:
    """Returns the exit code: 1 for a key that is nobody's. Raises SystemExit with what is wrong."""
    if parsed.key_command == "new":
        return _new(parsed)
    return _check(parsed)


def _new(parsed: argparse.Namespace) -> int:
    from gateway.config.tenants import key_hash, new_key

    place = "admin_keys" if parsed.admin else f"keys of the tenant {parsed.tenant}"
    if parsed.config is not None:
        configuration, document = _load(parsed.config)
        names = [tenant.name for tenant in configuration.tenants or ()]
        if parsed.admin:
            line = document.line(["admin_keys"])
        elif parsed.tenant in names:
            line = document.line(["tenants", names.index(parsed.tenant), "keys"])
        else:
            known = ", ".join(names) or "none"
            raise SystemExit(
                f"gateway key: {parsed.config} has no tenant {parsed.tenant!r}; it has: {known}"
            )
        place += f", {parsed.config}:{line}"
    key = new_key()
    print(key)
    print(f"- {key_hash(key)}")
    print(f"The key is not shown again. The second line goes to the {place}.", file=sys.stderr)
    return 0


def _check(parsed: argparse.Namespace) -> int:
    from gateway.config.tenants import key_hash

    if parsed.config is None:
        raise SystemExit("gateway key: name a file with --config FILE or GATEWAY_CONFIG")
    configuration, _ = _load(parsed.config)
    tenants = configuration.tenants or ()
    keys = sum(len(tenant.keys) for tenant in tenants)
    print(f"{parsed.config}: tenants: {len(tenants)}, keys: {keys}")
    typed = getpass.getpass("key: ") if sys.stdin.isatty() else sys.stdin.readline()
    key = typed.strip()
    if not key:
        return 0
    found = key_hash(key)
    owners = [tenant.name for tenant in tenants if found in tenant.keys]
    owners += ["an admin"] * (found in configuration.admin_keys)
    print(f"the key is {owners[0]}'s" if owners else "the key is nobody's")
    return 0 if owners else 1


def _load(path: Path) -> tuple[Configuration, MarkedYaml]:
    from gateway.config.file import ConfigurationError, load

    try:
        return load(path)
    except ConfigurationError as error:
        raise SystemExit(f"gateway key: the file is wrong\n{error}") from error
