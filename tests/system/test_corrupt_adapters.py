"""Adapter files that are damaged while they are served: no request gets the wrong weights."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from lora_store.disk import Disk
from ops.commands.up import DEMO_MODEL
from tests.support.adapter_store import overwrite, version_file
from tests.support.gateway_process import GatewayProcess, body
from tests.support.generated_adapters import PROMPT, TOKENS, write_adapter
from tests.support.local_stack import Stack
from tests.support.metrics import metric

KEY = "the-admin-key-of-the-gateway-with-a-bad-disk"
ADMIN = {"authorization": f"Bearer {KEY}"}
STREAMS = 16


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gateway")


@pytest.fixture(scope="module")
def gateway(stack: Stack, store: Path) -> Iterator[GatewayProcess]:
    """Yield a gateway without Redis, so nothing but its own folder can repair an adapter."""
    with GatewayProcess(store, stack, admin_key=KEY) as gateway:
        yield gateway


def _add(gateway: GatewayProcess, folder: Path) -> None:
    files = [("file", (path.name, path.read_bytes())) for path in folder.iterdir()]
    data = {"name": folder.name, "base": "demo"}
    with gateway.client(KEY) as client:
        response = client.post("/v1/adapters", data=data, files=files)
    assert response.status_code == 201, response.text


def _answer(gateway: GatewayProcess, model: str) -> str:
    with gateway.client() as client:
        request = body(model=model, prompt=PROMPT, max_tokens=TOKENS)
        response = client.post("/v1/completions", json=request)
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["text"])


def _not_sent_yet(gateway: GatewayProcess, folder: Path) -> str:
    """Return the expected answer, and leave the adapter unloaded as far as the gateway knows.

    An adapter that is deleted and added again has a new task id, which no engine has loaded.
    """
    _add(gateway, folder)
    right = _answer(gateway, folder.name)
    with gateway.client(KEY) as client:
        assert client.delete(f"/v1/adapters/{folder.name}").status_code == 200
    _add(gateway, folder)
    return right


def _file(store: Path, gateway: GatewayProcess, name: str) -> Path:
    with gateway.client(KEY) as client:
        [version] = client.get(f"/v1/adapters/{name}").json()["versions"]
    [path] = (store / "adapters").rglob(f"{version['version']}*.lora")
    return path


def _corrupt_copies(gateway: GatewayProcess) -> float:
    return metric(f"{gateway.url}/metrics", "gateway_adapter_store_corrupt_copies_total")


def test_weights_changed_in_their_file_are_never_sent(
    gateway: GatewayProcess, store: Path, tmp_path: Path
) -> None:
    folder = write_adapter(tmp_path / "changed", DEMO_MODEL, seed=21)
    right = _not_sent_yet(gateway, folder)
    path = _file(store, gateway, "changed")
    before = _corrupt_copies(gateway)
    overwrite(path)
    assert _answer(gateway, "changed") == right
    assert _corrupt_copies(gateway) == before + 1
    root = path.parents[2]
    assert path == version_file(root, path.stem)
    assert Disk(root).get(path.stem), "mended from what was in memory"


@pytest.mark.slow
def test_a_file_cut_short_while_it_is_served_ends_nobody(
    gateway: GatewayProcess, store: Path, tmp_path: Path
) -> None:
    folder = write_adapter(tmp_path / "cut", DEMO_MODEL, seed=22)
    right = _not_sent_yet(gateway, folder)
    path = _file(store, gateway, "cut")

    async def stream(client: httpx.AsyncClient, begun: asyncio.Event, tokens: int) -> str:
        request = body(max_tokens=tokens, stream=True, ignore_eos=True)
        async with client.stream("POST", "/v1/completions", json=request) as response:
            text = ""
            async for piece in response.aiter_text():
                text += piece
                begun.set()
            return text

    async def under_load() -> tuple[str, list[str]]:
        async with gateway.async_client(KEY) as client:
            begun = [asyncio.Event() for _ in range(STREAMS)]
            tokens = [1500] + [200] * (STREAMS - 1)  # one of them outlasts all other requests
            streams = [
                asyncio.create_task(stream(client, each, count))
                for each, count in zip(begun, tokens, strict=True)
            ]
            await asyncio.gather(*[each.wait() for each in begun])
            with path.open("r+b") as file:
                file.truncate(4096)
            answer = await asyncio.to_thread(_answer, gateway, "cut")
            assert not all(each.done() for each in streams), "nothing ran meanwhile"
            return answer, await asyncio.gather(*streams)

    answer, texts = asyncio.run(under_load())
    assert answer == right
    assert all(text.endswith("data: [DONE]\n\n") for text in texts)
    assert '"error"' not in "".join(texts)
    assert gateway.process.poll() is None
