"""`gateway key`: keys for tenants and admins, in the configuration file or at a running gateway."""

from __future__ import annotations

import argparse
import getpass
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from ops.commands import admin_api
from ops.commands.admin_api import AdminApi

if TYPE_CHECKING:
    from gateway.config.file import Configuration
    from gateway.config.marked_yaml import MarkedYaml

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 24 * 3600}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Makes, checks, lists and revokes keys. The configuration file and the gateway keep their "
        "SHA-256 hashes alone, so a key that is lost cannot be found again: make another one."
    )
    commands = parser.add_subparsers(dest="key_command", required=True, metavar="COMMAND")
    new = commands.add_parser(
        "new",
        parents=[admin_api.options()],
        help="print a new key, once, and the line for the configuration file",
        description="Prints the key on the first line of standard output and what the "
        "configuration file needs on the second. With --url the gateway there makes the key, "
        "which is valid at once, and the second line is its id; the admin key is read from "
        "GATEWAY_ADMIN_KEY, or from the state folder of `gateway up`.",
    )
    # Do not use GATEWAY_URL as the default of --url. Without --url, the key is for the
    # configuration file. With --url, it is created at a running gateway.
    new.set_defaults(url=None)
    whose = new.add_mutually_exclusive_group(required=True)
    whose.add_argument("--tenant", metavar="NAME", help="whose key it is")
    whose.add_argument("--admin", action="store_true", help="a key for the endpoints of admins")
    new.add_argument("--note", default="", help="what it is for; only with --url")
    new.add_argument(
        "--expires-in",
        type=_seconds,
        metavar="TIME",
        help="how long it is valid, such as 90d, 12h, 30m or 60s; only with --url",
    )
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
    where = admin_api.options()
    commands.add_parser("list", parents=[where], help="the keys that a gateway has made")
    revoke = commands.add_parser("revoke", parents=[where], help="end one of these keys for good")
    revoke.add_argument("id", help="as `gateway key list` shows it")


def run(parsed: argparse.Namespace) -> int:
    """Run the subcommand `new`, `check`, `list` or `revoke`, and return the exit code.

    The code is 1 if `check` finds that a key is unknown, else 0. Raises SystemExit, with an error
    message, for other failures.
    """
    if parsed.key_command == "new":
        return _new(parsed) if parsed.url is None else _new_at_gateway(parsed)
    if parsed.key_command == "check":
        return _check(parsed)
    call = AdminApi("gateway key", "/v1/keys", parsed)
    if parsed.key_command == "list":
        for key in call("GET", "")["data"]:
            print(
                f"{key['id']}\t{key['tenant']}\tcreated {_format_time(key['created_at'])}"
                f"\texpires {_format_time(key['expires_at'])}"
                f"\tused {_format_time(key['last_used_at'])}"
                f"\t{key['note']}"
            )
    else:
        call("DELETE", parsed.id)
    return 0


def _seconds(text: str) -> int:
    unit = _UNITS.get(text[-1:])
    if unit is None or not text[:-1].isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number with s, m, h or d")
    return int(text[:-1]) * unit


def _format_time(when: int | None) -> str:
    return "never" if when is None else time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(when))


def _new(parsed: argparse.Namespace) -> int:
    from gateway.config.tenants import key_hash, new_key

    if parsed.note or parsed.expires_in is not None:
        raise SystemExit("gateway key: a key of the file has no --note and --expires-in; see --url")
    location = "admin_keys" if parsed.admin else f"keys of the tenant {parsed.tenant}"
    if parsed.config is not None:
        configuration, document = _load(parsed.config)
        names = [tenant.name for tenant in configuration.tenants or ()]
        if parsed.admin:
            line = document.find_line(["admin_keys"])
        elif parsed.tenant in names:
            line = document.find_line(["tenants", names.index(parsed.tenant), "keys"])
        else:
            known = ", ".join(names) or "none"
            raise SystemExit(
                f"gateway key: {parsed.config} has no tenant {parsed.tenant!r}; it has: {known}"
            )
        location += f", {parsed.config}:{line}"
    key = new_key()
    print(key)
    print(f"- {key_hash(key)}")
    print(f"The key is not shown again. The second line goes to the {location}.", file=sys.stderr)
    return 0


def _new_at_gateway(parsed: argparse.Namespace) -> int:
    if parsed.admin:
        raise SystemExit("gateway key: admins' keys are in the configuration file alone")
    body = {"tenant": parsed.tenant, "note": parsed.note, "expires_in": parsed.expires_in}
    made = AdminApi("gateway key", "/v1/keys", parsed)("POST", "", json=body)
    print(made["value"])
    print(made["id"])
    print("The key is not shown again. It is valid now.", file=sys.stderr)
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
    print(f"the key is {owners[0]}'s" if owners else "the key belongs to nobody")
    return 0 if owners else 1


def _load(path: Path) -> tuple[Configuration, MarkedYaml]:
    from gateway.config.file import ConfigurationError, load

    try:
        return load(path)
    except ConfigurationError as error:
        raise SystemExit(f"gateway key: the file is wrong\n{error}") from error
