"""deploy/triton/tritonserver.sh with a real Triton: without the key only health is served."""

from __future__ import annotations

import json
import os
import shutil
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

from gateway.errors import EngineUnavailable
from gateway.triton.client import TritonClient
from gateway.triton.transport import ConnectionOptions, TransportName
from ops.local_stack.binaries import find_triton_server
from ops.local_stack.ports import LOCALHOST, PortClaims
from ops.local_stack.process import Child
from ops.local_stack.shared_memory import region_prefix, remove_regions
from tests.support.in_process import running
from tests.support.triton_server import MODEL, render_core, wait_ready
from triton_repo.cpu_executor import synthetic

SCRIPT = Path(__file__).parents[2] / "deploy/triton/tritonserver.sh"
KEY = "5e" * 32
METADATA = {"triton-grpc-protocol-gateway": KEY}
# Containers start it without capabilities. Other users than root have none to drop.
NO_RIGHTS = ["setpriv", "--no-new-privs"]
if os.geteuid() == 0:
    NO_RIGHTS += ["--bounding-set=-all", "--inh-caps=-all"]


@pytest.fixture(scope="module")
def triton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """Yield the gRPC and HTTP addresses."""
    folder = tmp_path_factory.mktemp("closed")
    synthetic.build(folder / "engine", vocab_size=4096, tokens_per_second=200)
    render_core(folder)
    (folder / "key").write_text(KEY)
    server = find_triton_server(folder / "backends")
    prefix = region_prefix(folder)
    with PortClaims() as claims:
        grpc_port, http_port = claims.take_free(), claims.take_free()
        command = NO_RIGHTS if shutil.which("setpriv") else []
        command = [*command, "sh", str(SCRIPT), *server.arguments]
        command += [f"--model-repository={folder / 'repository'}", "--allow-metrics=false"]
        command += ["--disable-auto-complete-config"]
        command += [f"--grpc-port={grpc_port}", f"--http-port={http_port}"]
        command += [f"--backend-config=python,shm-region-prefix-name={prefix}"]
        files = {"TRITON_KEY_FILE": str(folder / "key"), "TRITONSERVER": str(server.executable)}
        child = Child("triton", command, server.env | files, folder / "triton.log")
        child.start()
        try:
            wait_ready(child, f"{LOCALHOST}:{http_port}")
            yield f"{LOCALHOST}:{grpc_port}", f"http://{LOCALHOST}:{http_port}"
        finally:
            child.terminate()
            child.reap(10.0)
            remove_regions(prefix)


CALLS: dict[str, Callable[[Any], Any]] = {
    "inference": lambda stub: stub.ModelInfer(pb.ModelInferRequest(model_name="tensorrt_llm")),
    "metadata": lambda stub: stub.ModelMetadata(pb.ModelMetadataRequest(name="tensorrt_llm")),
    "server metadata": lambda stub: stub.ServerMetadata(pb.ServerMetadataRequest()),
    "model-config": lambda stub: stub.ModelConfig(pb.ModelConfigRequest(name="tensorrt_llm")),
    "model-repository": lambda stub: stub.RepositoryIndex(pb.RepositoryIndexRequest()),
    "unload": lambda stub: stub.RepositoryModelUnload(
        pb.RepositoryModelUnloadRequest(model_name="tensorrt_llm")
    ),
    "shared-memory": lambda stub: stub.SystemSharedMemoryStatus(
        pb.SystemSharedMemoryStatusRequest()
    ),
    "statistics": lambda stub: stub.ModelStatistics(pb.ModelStatisticsRequest()),
    "trace": lambda stub: stub.TraceSetting(pb.TraceSettingRequest()),
    "logging": lambda stub: stub.LogSettings(pb.LogSettingsRequest()),
}


def test_grpc_without_the_key(triton: tuple[str, str]) -> None:
    with grpc.insecure_channel(triton[0]) as channel:
        stub: Any = GRPCInferenceServiceStub(channel)  # type: ignore[no-untyped-call]
        assert stub.ServerReady(pb.ServerReadyRequest()).ready
        assert stub.ModelReady(pb.ModelReadyRequest(name="tensorrt_llm")).ready
        for name, call in CALLS.items():
            with pytest.raises(grpc.RpcError) as caught:
                call(stub)
            assert "This protocol is restricted" in caught.value.details(), name
        stream = stub.ModelStreamInfer(iter([pb.ModelInferRequest(model_name="tensorrt_llm")]))
        with pytest.raises(grpc.RpcError, match="This protocol is restricted"):
            next(stream)


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v2"),
        ("GET", "/v2/models/tensorrt_llm"),
        ("GET", "/v2/models/tensorrt_llm/config"),
        ("GET", "/v2/models/tensorrt_llm/stats"),
        ("GET", "/v2/systemsharedmemory/status"),
        ("GET", "/v2/trace/setting"),
        ("GET", "/v2/logging"),
        ("POST", "/v2/repository/index"),
        ("POST", "/v2/repository/models/tensorrt_llm/unload"),
        ("POST", "/v2/models/tensorrt_llm/infer"),
        ("POST", "/v2/models/ensemble/generate"),
        ("POST", "/v2/models/ensemble/generate_stream"),
    ],
)
def test_http_without_the_key(triton: tuple[str, str], method: str, path: str) -> None:
    body = json.dumps({}).encode() if method == "POST" else None
    request = urllib.request.Request(triton[1] + path, data=body, method=method)
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request, timeout=60)
    with caught.value as answer:
        assert answer.status == 403
        assert b"This API is restricted" in answer.read()


@pytest.mark.parametrize("transport", ["http2", "grpcio"])
async def test_the_gateway_needs_nothing_but_its_key(
    triton: tuple[str, str], tmp_path: Path, transport: TransportName
) -> None:
    settings = {"triton_metadata": METADATA, "triton_transport": transport}
    async with running(tmp_path, triton[0], tokenizer_dir=MODEL, **settings) as (client, _, _):
        body = {"model": "m", "prompt": "Hello", "max_tokens": 5, "ignore_eos": True}
        answer = await client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 5


@pytest.mark.parametrize("transport", ["http2", "grpcio"])
async def test_without_the_key_the_gateway_is_refused(
    triton: tuple[str, str], transport: TransportName
) -> None:
    client = TritonClient(triton[0], ConnectionOptions(transport))
    try:
        assert await client.model_ready("tensorrt_llm")
        with pytest.raises(EngineUnavailable):
            await client.model_config("tensorrt_llm")
    finally:
        await client.close()
