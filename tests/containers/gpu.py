"""The Compose profile `gpu` set up like a deployment: models, tenants with limits, an admin."""

from __future__ import annotations

import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import yaml

from gateway.config.tenants import key_hash
from ops.commands.up import DEMO_MODEL
from tests.containers.compose import ADMIN, Project, project
from tests.containers.engine import TREE, Engine
from tests.support.patience import PATIENCE_S
from triton_repo.cpu_executor import engine as cpu_engine

ADAPTERS = TREE / "demo/adapters"


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


class Deployment:
    """Folders for `MODELS_DIR` and `CONFIG_DIR`, and the keys of tenants and the admin."""

    def __init__(self, folder: Path) -> None:
        self.admin, self.acme, self.small = (secrets.token_urlsafe(32) for _ in range(3))
        self.variables = {
            "COMPOSE_PROFILES": "gpu",
            "MODELS_DIR": str(_models(folder / "models")),
            "CONFIG_DIR": str(self._configuration(folder / "config")),
            "GATEWAY_CONFIG": "/etc/gateway/tenants.yaml",
            "GATEWAY_MODEL_NAME": "demo",
            "TRITON_SHM_SIZE": "512mb",
            "REDIS_MAXMEMORY": "256mb",
        }

    @contextmanager
    def up(
        self, engine: Engine, name: str, *overrides: Path, **variables: str
    ) -> Iterator[Project]:
        with project(engine, name, *overrides, **self.variables | variables) as compose:
            compose.up()
            yield compose

    def add_adapter(self, name: str, source: str, url: str = ADMIN) -> httpx.Response:
        """Upload one of the demo's adapters, and return the answer."""
        files = [
            ("files", (path.name, path.read_bytes())) for path in (ADAPTERS / source).iterdir()
        ]
        data = {"name": name, "base": "demo"}
        return httpx.post(
            f"{url}/v1/adapters",
            headers=bearer(self.admin),
            data=data,
            files=files,
            timeout=PATIENCE_S,
        )

    def make_key(self) -> httpx.Response:
        """Ask for a new key of the tenant `acme`, and return the answer."""
        return httpx.post(
            f"{ADMIN}/v1/keys",
            headers=bearer(self.admin),
            json={"tenant": "acme"},
            timeout=PATIENCE_S,
        )

    def _configuration(self, folder: Path) -> Path:
        folder.mkdir()
        anything = {"models": ["*"]}
        tenants = [
            {"name": "acme", "keys": [key_hash(self.acme)], **anything},
            {"name": "small", "keys": [key_hash(self.small)], "tokens_per_day": 40, **anything},
        ]
        text = yaml.safe_dump({"admin_keys": [key_hash(self.admin)], "tenants": tenants})
        (folder / "tenants.yaml").write_text(text)
        folder.chmod(0o755)
        return folder


def _models(folder: Path) -> Path:
    """Create the model folder as docs/deployment.md describes, for the CPU engine."""
    make_engine(folder)
    render: list[str | Path] = [Path(sys.executable).parent / "gateway", "repo", "render"]
    render += ["--output", folder / "repository", "--triton-backend", "python"]
    for name in ("engine", "tokenizer"):
        render += [f"--{name}-dir", f"/models/{name}", f"--local-{name}-dir", folder / name]
    subprocess.run(render, check=True, capture_output=True)
    subprocess.run(["chmod", "--recursive", "o+rX", folder, folder.parent], check=True)
    return folder


def make_engine(folder: Path) -> None:
    """Create the engine and tokenizer that a deployment provides."""
    folder.mkdir()
    modules = cpu_engine.lora_modules(DEMO_MODEL)
    cpu_engine.build(DEMO_MODEL, folder / "engine", max_batch_size=16, lora_target_modules=modules)
    shutil.copytree(DEMO_MODEL, folder / "tokenizer")
