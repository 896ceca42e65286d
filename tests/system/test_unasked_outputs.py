"""Upstream's core model with outputs that were not requested: no request may crash the model.

A v0.17 model that received the list of requested outputs crashed after 237 chats, a v0.19 model at
once. Set `CHATS=5000` in the environment for a soak test.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path

import psutil
import pytest

from ops.local_stack.servers import MODEL_PROCESS
from tests.support import in_process, triton_server
from triton_repo.render import render

MODELS = Path(__file__).parents[1] / "support" / "models"
CONCURRENT = 32
# For each release, more chats than a model with a list of requested outputs survived.
CHATS = {"0.17": 500, "0.19": 100}


def repository(folder: Path, release: str) -> None:
    """Write the core model of this release to `folder`, with another model.py."""
    models = folder / "repository"
    parameters = triton_server.repository_parameters(folder)
    unused = {name for name in parameters if name.endswith("_instance_count")}
    kept = {name: value for name, value in parameters.items() if name not in unused}
    render(models, kept, ["tensorrt_llm"], release=release)
    shutil.copyfile(MODELS / "unasked.py", models / "tensorrt_llm" / "1" / "model.py")


def model_processes() -> set[int]:
    """Return the process ids of all Python models of this test's Tritons."""
    children = psutil.Process().children(recursive=True)
    return {child.pid for child in children if child.name().startswith(MODEL_PROCESS[:15])}


@pytest.mark.slow
@pytest.mark.parametrize("release", CHATS)
async def test_its_process_lives_on(tmp_path: Path, release: str) -> None:
    chats = int(os.environ.get("CHATS", CHATS[release]))
    repository(tmp_path, release)
    others = model_processes()
    with triton_server.serving(tmp_path) as triton:
        [before] = model_processes() - others
        settings = {"tokenizer_dir": triton_server.MODEL, "max_seq_len": 2048}
        async with in_process.running(tmp_path, triton.grpc, **settings) as (client, _, _):
            todo = iter(range(chats))
            answered = 0

            async def ask() -> None:
                nonlocal answered
                for number in todo:
                    body = {
                        "model": "m",
                        "messages": [{"role": "user", "content": f"Chat {number}"}],
                        "max_tokens": 32,
                    }
                    answer = await client.post("/v1/chat/completions", json=body, timeout=60)
                    assert answer.status_code == 200, (answered, answer.text)
                    assert answer.json()["usage"]["completion_tokens"] == 32
                    answered += 1

            async with asyncio.TaskGroup() as tasks:
                for _ in range(CONCURRENT):
                    tasks.create_task(ask())
        assert answered == chats
        assert model_processes() - others == {before}
