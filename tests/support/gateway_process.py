"""A separate `gateway serve` process for a test, with the real Triton of the stack."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
import yaml

from gateway.config.tenants import key_hash
from ops.commands.up import DEMO_MODEL
from ops.local_stack.ports import PortClaims
from tests.support.cluster import Tritons
from tests.support.forked_gateway import ForkedGateway
from tests.support.local_stack import Stack
from tests.support.patience import PATIENCE_S

READY_WITHIN_S = 180  # two seconds are normal
# Ports stay claimed until this process ends. Another test could take a port while no gateway
# listens.
_CLAIMS = PortClaims()


class GatewayProcess:
    """A gateway process as a context manager: ready inside, ended at the exit."""

    def __init__(
        self,
        folder: Path,
        stack: Stack | Tritons,
        environment: Mapping[str, str] | None = None,
        **settings: object,
    ) -> None:
        """Prepare the process, whose log and adapters are in `folder`.

        `settings` become GATEWAY_ variables, and `environment` has further variables.
        """
        folder.mkdir(exist_ok=True)
        self.log = folder / "gateway.log"
        self.port, self.admin_port = _CLAIMS.take_free(), _CLAIMS.take_free()
        self.url = f"http://127.0.0.1:{self.port}"
        if settings.get("admin_port") == 0:
            settings["admin_port"] = self.admin_port
        fields: dict[str, object] = {
            "port": self.port,
            "triton_grpc": stack.triton_grpc,
            "tokenizer_dir": DEMO_MODEL,
            "store_dir": folder / "adapters",
            **settings,
        }
        inherited = {name: value for name, value in os.environ.items() if "GATEWAY_" not in name}
        self._env = inherited | dict(environment or {})
        self._env |= {f"GATEWAY_{k.upper()}": str(v) for k, v in fields.items()}

    def __enter__(self) -> GatewayProcess:
        self.process = ForkedGateway(self._env, self.log)
        try:
            self._wait_ready()
        except BaseException:  # after an exception here, __exit__ is not called
            self.process.kill()
            self.process.wait()
            raise
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise

    @property
    def text(self) -> str:
        """The content of the log."""
        return self.log.read_text(encoding="utf-8")

    def wait_for(self, text: str, times: int = 1, within_s: float = 60.0) -> None:
        """Wait until the log has `text` at least `times` times."""
        deadline = time.monotonic() + within_s
        while self.text.count(text) < times:
            assert time.monotonic() < deadline, f"no {text!r} in\n{self.text}"
            time.sleep(0.05)

    def client(self, key: str | None = None) -> httpx.Client:
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        return httpx.Client(base_url=self.url, headers=headers, timeout=60)

    def async_client(self, key: str) -> httpx.AsyncClient:
        limits = httpx.Limits(max_connections=None)
        headers = {"authorization": f"Bearer {key}"}
        return httpx.AsyncClient(base_url=self.url, headers=headers, timeout=60, limits=limits)

    def _wait_ready(self) -> None:
        deadline = time.monotonic() + READY_WITHIN_S
        while not self._is_ready():
            assert self.process.poll() is None, self.text
            assert time.monotonic() < deadline, self.text
            time.sleep(0.05)

    def _is_ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health/ready", timeout=PATIENCE_S).status_code == 200
        except httpx.TransportError:
            return False


def tenant(name: str, key: str, **fields: Any) -> dict[str, Any]:
    """Return an entry of `tenants`. The tenant may use all models unless `models` limits it."""
    return {"name": name, "keys": [key_hash(key)], "models": ["*"], **fields}


def write_config(path: Path, *tenants: dict[str, Any], **sections: Any) -> Path:
    """Write the configuration file with an atomic rename, as operators should."""
    new = path.with_suffix(".new")
    new.write_text(yaml.safe_dump({"tenants": list(tenants), **sections}), encoding="utf-8")
    return new.replace(path)


def body(**fields: Any) -> dict[str, Any]:
    """Return the JSON body of a short completion."""
    return {"model": "demo", "prompt": "Hi", "max_tokens": 1, "temperature": 0, **fields}
