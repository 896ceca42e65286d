"""Start of a gateway whose port is already in use."""

from __future__ import annotations

import socket
from pathlib import Path

from tests.support.refused_start import refusals


def test_it_is_told_in_a_line_before_anything_is_loaded(tmp_path: Path) -> None:
    """The tokenizer is missing, too, but the gateway checks the port before it loads anything."""
    common = {"port": 0, "redis_url": "redis://127.0.0.1:1", "tokenizer_dir": tmp_path}
    cases = [("port", 1), ("port", 2), ("admin_port", 1)]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        told = refusals(*[common | {"workers": workers, name: port} for name, workers in cases])
    assert told == [
        f"gateway: GATEWAY_{name.upper()}: 127.0.0.1:{port}: Address already in use\n"
        for name, _ in cases
    ]
