"""Client of a running gateway's admin endpoints, for `gateway key` and `gateway lora`."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any
from urllib.parse import quote

_TIMEOUT_S = 600.0


def options() -> argparse.ArgumentParser:
    """Return a parent parser with the options for the gateway's URL and the state folder."""
    where = argparse.ArgumentParser(add_help=False)
    where.add_argument("--url", default=os.environ.get("GATEWAY_URL"), help="the gateway's URL")
    where.add_argument(
        "--state-dir",
        type=Path,
        default=Path(".state"),
        metavar="DIR",
        help="folder of the `gateway up` whose URL and admin key are used (default: .state)",
    )
    return where


class AdminApi:
    """Client of the admin endpoints whose path begins with `root`, such as /v1/keys.

    An instance is called with an HTTP method and the rest of the path. Failures raise SystemExit
    with an error message.

    The admin key comes from GATEWAY_ADMIN_KEY or from the state folder of `gateway up`. There is no
    option for the key, because all users of the machine can see the arguments of a command.
    """

    def __init__(self, command: str, root: str, parsed: argparse.Namespace) -> None:
        """Create the client.

        Args:
            command: name of the command, for error messages.
            root: the common beginning of the endpoints' paths.
            parsed: arguments of the parser that `options` returns.
        """
        from ops.local_stack.state import ADMIN_KEY_FILE, StackState

        self._command = command
        url, key = parsed.url, os.environ.get("GATEWAY_ADMIN_KEY")
        try:
            if url is None:
                url = StackState.read(parsed.state_dir).gateway
            if key is None:
                key = (parsed.state_dir / ADMIN_KEY_FILE).read_text().strip()
        except OSError as error:
            raise SystemExit(
                f"{command}: {error.filename}: {error.strerror}; is `gateway up` running? "
                "Otherwise set GATEWAY_URL and GATEWAY_ADMIN_KEY."
            ) from error
        self._base = f"{url}{root}"
        self._headers = {"authorization": f"Bearer {key}"}

    def __call__(self, method: str, path: str, **options: Any) -> Any:
        import httpx

        url = f"{self._base}/{quote(path)}".rstrip("/")
        try:
            response = httpx.request(
                method, url, headers=self._headers, timeout=_TIMEOUT_S, **options
            )
        except httpx.HTTPError as error:
            raise SystemExit(f"{self._command}: {url}: {error}") from error
        if response.is_error:
            try:
                message = response.json()["error"]["message"]
            except (ValueError, KeyError, TypeError):
                message = response.text
            raise SystemExit(f"{self._command}: {message}")
        return response.json()
