"""What a gateway does not load: libraries of many MiB that little of what it can do needs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.gateway_process import GatewayProcess, body
from tests.support.local_stack import Stack

# By what stands in the paths of their compiled modules: numpy, grpcio.
HEAVY = ("/numpy/", "/grpc/")


def test_what_most_requests_do_not_need_is_not_loaded(stack: Stack, tmp_path: Path) -> None:
    """Of numpy and grpcio, of adapters and of logits."""
    with GatewayProcess(tmp_path, stack) as gateway, gateway.client() as client:
        assert client.post("/v1/completions", json=body()).status_code == 200
        maps = Path(f"/proc/{gateway.process.pid}/maps")
        mapped = maps.read_text(encoding="utf-8")
        assert "/tokenizers/" in mapped
        assert [name for name in HEAVY if name in mapped] == []
        # As soon as somebody does, it is: the first logits are worked on as any later ones.
        assert client.post("/v1/completions", json=body(logprobs=3)).status_code == 200
        assert "/numpy/" in maps.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["redis", "yaml", "pydantic.v1"])
def test_what_few_need_is_not_loaded_by_imports(name: str) -> None:
    """A gateway alone has no Redis and may have no file; nobody has models of pydantic 1."""
    code = f"import gateway.server, sys; print({name!r} in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    assert found.stdout == "False\n"


CLIENT_FIRST = "import tritonclient.grpc as client, gateway.triton.protobuf as ours"
OURS_FIRST = "import gateway.triton.protobuf as ours, tritonclient.grpc as client"


@pytest.mark.parametrize("order", [CLIENT_FIRST, OURS_FIRST])
def test_tritonclient_is_whole_beside_its_messages(order: str) -> None:
    """For tools and tests that use it in the same process."""
    same = "client.service_pb2 is ours.pb, client.model_config_pb2 is ours.model_config_pb2"
    code = f"{order}; print({same}, client.InferenceServerClient.__name__)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    assert found.stdout == "True True InferenceServerClient\n"
