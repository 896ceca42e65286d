"""The oldest llmapi repository, v0.19: it supports beam search and no stop requests."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from tests.support.in_process import running
from tests.support.llmapi_models import ENDLESS, build_inputs, build_synthetic
from tests.support.triton_server import MODEL, serving
from triton_repo.llmapi_repository import V1_2, render_llmapi

pytestmark = pytest.mark.slow

LACKS = r"stop|sampling_param_best_of|sampling_param_return_perf_metrics"
BEAMS = (
    '  { name: "sampling_param_beam_width" data_type: TYPE_INT32 dims: [ 1 ] optional: true },\n'
)


def write_oldest(folder: Path) -> None:
    """Write the model `oldest` with one slot, whose answers do not end by themselves."""
    model = build_synthetic(folder / "synthetic")
    render_llmapi(folder / "repository", {"model": str(model), "behaves_as": V1_2}, model="oldest")
    config = folder / "repository" / "oldest" / "config.pbtxt"
    text, count = re.subn(rf'(?m)^  {{ name: "({LACKS})" .*\n', "", config.read_text())
    assert count == 3
    config.write_text(text.replace("input [\n", f"input [\n{BEAMS}", 1))


async def test_a_client_that_leaves_frees_the_engine(tmp_path: Path) -> None:
    write_oldest(tmp_path)
    settings = {"tokenizer_dir": MODEL, "triton_model": "oldest", "max_seq_len": 2 * ENDLESS}
    with serving(tmp_path) as triton:
        async with running(tmp_path, triton.grpc, **settings) as (client, service, _):
            body = {"model": "m", "prompt": "x", "max_tokens": 3}
            answer = await client.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            assert answer.json()["choices"][0]["text"] == " one one one"
            [replica] = service.replicas
            request = asyncio.create_task(
                client.post("/v1/completions", json=body | {"max_tokens": ENDLESS})
            )
            async with asyncio.timeout(300):
                while replica.in_flight == 0:
                    await asyncio.sleep(0.01)
                request.cancel()
                while replica.in_flight:
                    await asyncio.sleep(0.01)
        # The model has one slot, so an answer shows that the other request has ended.
        more = {"sampling_param_max_tokens": 1, "sampling_param_exclude_input_from_output": True}
        [reply] = await asyncio.to_thread(triton.ask, build_inputs("x", **more), "oldest")
        assert reply.outputs["text_output"][0] == b" one"
