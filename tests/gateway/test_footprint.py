"""Large libraries that a gateway loads only once a request needs them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.gateway_process import GatewayProcess, body
from tests.support.local_stack import Stack

# Parts of the paths of compiled modules, of numpy and grpcio.
HEAVY = ("/numpy/", "/grpc/")


def test_what_most_requests_do_not_need_is_not_loaded(stack: Stack, tmp_path: Path) -> None:
    """A plain request loads neither numpy nor grpcio. A request for logprobs then loads numpy."""
    with GatewayProcess(tmp_path, stack) as gateway, gateway.client() as client:
        assert client.post("/v1/completions", json=body()).status_code == 200
        maps = Path(f"/proc/{gateway.process.pid}/maps")
        mapped = maps.read_text(encoding="utf-8")
        assert "/tokenizers/" in mapped
        assert [name for name in HEAVY if name in mapped] == []
        # The first request for logprobs loads numpy, and succeeds like any later one.
        assert client.post("/v1/completions", json=body(logprobs=3)).status_code == 200
        assert "/numpy/" in maps.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["redis", "yaml", "pydantic.v1"])
def test_what_few_need_is_not_loaded_by_imports(name: str) -> None:
    """A gateway may have neither Redis nor a YAML file, and no code uses models of pydantic 1."""
    code = f"import gateway.server, sys; print({name!r} in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    assert found.stdout == "False\n"


CLIENT_FIRST = "import tritonclient.grpc as client, gateway.triton.protobuf as ours"
OURS_FIRST = "import gateway.triton.protobuf as ours, tritonclient.grpc as client"


@pytest.mark.parametrize("order", [CLIENT_FIRST, OURS_FIRST])
def test_tritonclient_is_whole_beside_its_messages(order: str) -> None:
    """Tools and tests use tritonclient in the same process as the gateway's messages."""
    same = "client.service_pb2 is ours.pb, client.model_config_pb2 is ours.model_config_pb2"
    code = f"{order}; print({same}, client.InferenceServerClient.__name__)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    assert found.stdout == "True True InferenceServerClient\n"
