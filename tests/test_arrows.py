"""Dependencies point one way. ARCHITECTURE.md says which."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("adapters", "lora_store", "gateway", "ops", "triton_repo")

FORBIDDEN: dict[str, tuple[str, ...]] = {
    "adapters": ("lora_store", "gateway", "triton_repo", "redis", "grpc", "fastapi", "httpx"),
    "lora_store": ("gateway", "triton_repo", "grpc", "fastapi", "httpx"),
    "triton_repo": ("adapters", "lora_store", "gateway"),
    "triton_repo/cpu_executor": ("torch", "transformers"),
    "gateway": ("torch", "demo"),
    "gateway/errors.py": ("gateway", "fastapi", "starlette", "grpc"),
    "gateway/config/settings.py": ("fastapi", "starlette", "grpc", "redis", "tokenizers"),
    **dict.fromkeys(
        (
            "gateway/generation.py",
            "gateway/parsers/message.py",
            "gateway/parsers/reasoning.py",
            "gateway/tools",
        ),
        ("fastapi", "starlette", "grpc", "redis", "tokenizers"),
    ),
}
ONLY_IN: dict[str, tuple[str, ...]] = {
    "grpc": ("gateway/triton/",),
    "tritonclient": ("gateway/triton/",),
    "fastapi": ("gateway/api/", "gateway/app.py", "gateway/server.py"),
    "starlette": ("gateway/api/", "gateway/app.py"),
    "redis": ("lora_store/", "gateway/tenancy/limits/redis.py"),
}


def _imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module)
    return found


FILES = [
    path.relative_to(ROOT).as_posix()
    for package in PACKAGES
    for path in sorted((ROOT / package).rglob("*.py"))
]


@pytest.mark.parametrize("file", FILES)
def test_imports_point_the_right_way(file: str) -> None:
    roots = {name.split(".")[0] for name in _imports(ROOT / file)}
    for place, names in FORBIDDEN.items():
        if file == place or file.startswith(place + "/"):
            assert not roots & set(names), f"{file} imports {roots & set(names)}"
    if file.startswith("gateway/"):
        for name, places in ONLY_IN.items():
            assert name not in roots or file.startswith(places), f"{file} imports {name}"
