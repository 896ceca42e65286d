"""A panic of the Rust tokenizer: a 500 for the request that caused it, no effect on others.

Python sees a Rust panic as a BaseException that is no Exception.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.fake_triton import FakeTriton, serving
from tests.support.http2_peer import Server, connect, grpc_message, silence, until
from tests.support.in_process import ids_of, metric_of, running, save_tokenizer

TEXT = "hello"


def _panics_above(folder: Path, tokens: int) -> None:
    """Save a tokenizer in `folder` that panics on a text of more than `tokens` tokens."""
    save_tokenizer(folder)
    path = folder / "tokenizer.json"
    definition = json.loads(path.read_text(encoding="utf-8"))
    # A stride equal to the truncation length fails an assertion in `tokenizers`.
    definition["truncation"] = {
        "direction": "Right",
        "max_length": tokens,
        "strategy": "LongestFirst",
        "stride": tokens,
    }
    path.write_text(json.dumps(definition), encoding="utf-8")


@pytest.mark.parametrize("stream", [True, False])
async def test_one_request_is_answered_and_others_go_on(tmp_path: Path, stream: bool) -> None:
    _panics_above(tmp_path, 8)
    engine = FakeTriton(tokens=ids_of(tmp_path, TEXT), fault="slow", step=2)
    asked: dict[str, Any] = {"model": "m", "prompt": "short", "max_tokens": 40}
    async with serving(engine) as endpoint, running(tmp_path, endpoint) as (client, service, _):
        under_way = asyncio.create_task(client.post("/v1/completions", json=asked))
        while not engine.reached:
            await asyncio.sleep(0.01)
        for more in ({"prompt": "far too long"}, {"stop": ["far too long"]}):
            answer = await client.post("/v1/completions", json={**asked, **more, "stream": stream})
            assert answer.status_code == 500
            assert answer.json()["error"]["message"] == "The server had an unexpected error."
            assert answer.headers["x-request-id"]
        engine.released.set()
        assert (await under_way).json()["choices"][0]["text"] == TEXT
        assert metric_of(service, "gateway_places_taken") == 0


async def test_where_the_engines_bytes_are_received_others_share_the_connection() -> None:
    class Panic(BaseException):
        """A stand-in for pyo3's PanicException."""

    def panics(_: object) -> bool:
        raise Panic

    server = Server(silence)
    async with connect(server) as transport:
        one = await transport.stream("/a/Stream", [b"x"], bytes, {})
        other = await transport.stream("/a/Stream", [b"x"], bytes, {})
        fed = asyncio.create_task(one.feed(panics))
        await until(lambda: server.peers and len(server.peers[0].requests) == 2)
        (peer,) = server.peers
        peer.send(1, grpc_message(b"one"))
        with pytest.raises(Panic):
            await fed
        peer.send(3, grpc_message(b"other"))
        assert await other.read() == b"other"
