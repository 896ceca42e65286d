"""Names and paths from clients: none leads outside the adapters' folder."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import httpx
import pytest

from ops.commands.up import DEMO_MODEL
from tests.support.generated_adapters import write_adapter
from tests.support.local_stack import Stack, Up
from tests.support.raw_http import connect, next_answer

NAMES = [
    "..",
    "../x",
    "../../etc/passwd",
    "/etc/passwd",
    "a/../b",
    "a/..",
    "./a",
    "a//b",
    "..\\x",
    "a\0b",
    "a\nb",
    "a b",
    "%2e%2e%2fx",
    "..%2fx",
    "\u2024\u2024/x",
    "@epoch",
    "@revision",
    "a:b",
    "a*",
    "a{b}",
    "x" * 65,
    "a/b/c",
    "~root",
    "$HOME",
    "zh@../../x",
    "con\u0000",
    "\u202eevil",
]


@pytest.fixture
def admin(stack: Stack, up: Up) -> Iterator[httpx.Client]:
    key = (up.state_dir / "admin_key").read_text(encoding="utf-8")
    headers = {"authorization": f"Bearer {key}"}
    with httpx.Client(base_url=stack.gateway, headers=headers, timeout=60) as client:
        before = _everything(client, up)
        yield client
        assert _everything(client, up) == before


def _everything(admin: httpx.Client, up: Up) -> tuple[set[str], set[str]]:
    names = {record["name"] for record in admin.get("/v1/adapters").json()["data"]}
    files = {str(path) for path in up.state_dir.parent.rglob("*") if "adapters" in path.parts}
    return names, files


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_a_name_everywhere(admin: httpx.Client, tmp_path: Path, name: str) -> None:
    folder = write_adapter(tmp_path / "a", DEMO_MODEL, seed=31)
    files = [("file", (path.name, path.read_bytes())) for path in sorted(folder.iterdir())]
    added = admin.post("/v1/adapters", data={"name": name, "base": "demo"}, files=files)
    assert (added.status_code, added.json()["error"]["param"]) == (400, "name")
    with connect(str(admin.base_url)) as connection:
        key = admin.headers["authorization"]
        for path in (quote(name, safe=""), quote(name)):
            for line in (
                f"GET /v1/adapters/{path}",
                f"DELETE /v1/adapters/{path}",
                f"POST /v1/adapters/{path}/rollback",
                f"POST /v1/adapters/{path}/verify",
                f"GET /v1/models/{path}",
            ):
                head = f"{line} HTTP/1.1\r\nhost: x\r\nauthorization: {key}\r\n"
                connection.sendall(head.encode() + b"content-length: 0\r\n\r\n")
                assert next_answer(connection).status in {400, 404}, line
    body = {"model": name, "prompt": "x", "max_tokens": 1}
    answer = admin.post("/v1/completions", json=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
    for call in ("load", "unload"):
        body = {"lora_name": name} | ({"lora_path": "a"} if call == "load" else {})
        assert admin.post(f"/v1/{call}_lora_adapter", json=body).status_code in {400, 404}


@pytest.mark.parametrize("version", ["", "..", "../x", "*", "0" * 11, "0" * 65, "G" * 12, "\0"])
def test_a_version_is_hexadecimal(admin: httpx.Client, version: str) -> None:
    answer = admin.post("/v1/adapters/zh/rollback", json={"version": version})
    assert answer.status_code in {400, 404}
    body = {"model": f"zh@{version}", "prompt": "x", "max_tokens": 1}
    assert admin.post("/v1/completions", json=body).status_code == 404


def test_only_folders_below_the_root_are_read(admin: httpx.Client, up: Up, tmp_path: Path) -> None:
    outside = write_adapter(tmp_path / "outside", DEMO_MODEL, seed=32)
    root = up.adapter_root
    inside = root / "links"
    inside.mkdir()
    (root / "out").symlink_to(outside)
    (inside / "up").symlink_to("../..")
    for file in outside.iterdir():
        (inside / file.name).symlink_to(file)
    os.mkfifo(root / "fifo")
    beside = write_adapter(root.with_name(root.name + "-beside"), DEMO_MODEL, seed=33)
    paths = [
        str(outside),
        os.path.relpath(outside, root),
        "..",
        f"../{beside.name}",
        str(beside),
        "out",
        "links",
        "links/up",
        "fifo",
        "/proc/self/cwd",
        "/dev",
        "\0",
        "~",
        "",
    ]
    told = {}
    for path in paths:
        body = {"lora_name": "stolen", "lora_path": path}
        answer = admin.post("/v1/load_lora_adapter", json=body)
        assert answer.status_code == 400, path
        error = answer.json()["error"]
        told[path] = (error["code"], error["message"].replace(repr(path), "PATH"))
    # The answer for a path outside the folder is the same as for a missing one.
    nowhere = admin.post("/v1/load_lora_adapter", json={"lora_name": "stolen", "lora_path": "none"})
    expected = nowhere.json()["error"]["message"].replace("'none'", "PATH")
    for path in (str(outside), "..", "out", "links/up", "/dev", "/proc/self/cwd"):
        assert told[path] == (None, expected), path
    for path in (root / "fifo", root / "out", inside / "up", *inside.iterdir()):
        path.unlink(missing_ok=True)
    inside.rmdir()


def test_a_device_or_a_pipe_is_no_adapter(admin: httpx.Client, up: Up) -> None:
    folder = up.adapter_root / "pipe"
    folder.mkdir()
    os.mkfifo(folder / "adapter_config.json")
    body = {"lora_name": "pipe", "lora_path": "pipe"}
    answer = admin.post("/v1/load_lora_adapter", json=body)  # must not block
    assert answer.status_code == 400
    (folder / "adapter_config.json").unlink()
    folder.rmdir()
