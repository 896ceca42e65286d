"""Input tensors that a release renamed: each has its effect through import, Triton and gateway.

A backend ignores an unknown input name without an error, and so does the rendered test model.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.commands import gateway
from tests.support.in_process import running
from tests.support.triton_server import MODEL, Server, serving

pytestmark = pytest.mark.slow

# The greedy answer to this prompt has five tokens.
PROMPT = "The capital of Japan is"
# No next token is likely after this prompt, so that samples differ.
HOT_PROMPT = "Zq 7 (("
WORDS = {"bad_words": "", "stop_words": ""}
SEEDS = range(1, 6)
OLD_NAMES = "core_of_old_names"


@pytest.fixture(scope="module")
def triton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Yield a Triton with the newest release's repository and a core model with outdated names."""
    folder = tmp_path_factory.mktemp("names")
    made = folder / "made"
    answer = gateway("import", MODEL, "--name", "m", "--cpu", "--output", made)
    assert answer.returncode == 0, answer.stderr
    (folder / "repository").symlink_to(made / "repository")
    declares_old_names(made / "repository")
    with serving(folder) as server:
        yield server


def declares_old_names(repository: Path) -> None:
    """Add a copy of the core model whose configuration has the input names of v0.19."""
    copy = repository / OLD_NAMES
    shutil.copytree(repository / "tensorrt_llm", copy)
    config = (copy / "config.pbtxt").read_text(encoding="utf-8")
    for new, old in (("tensorrt_llm", OLD_NAMES), ("seed", "random_seed")):
        config = config.replace(f'name: "{new}"', f'name: "{old}"')
    (copy / "config.pbtxt").write_text(config, encoding="utf-8")


async def complete(client: httpx.AsyncClient, **more: Any) -> dict[str, Any]:
    body = {"model": "m", "prompt": PROMPT, "max_tokens": 24} | more
    response = await client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


@pytest.mark.parametrize("mode", ["token", "text"])
async def test_seed_and_min_tokens_reach_the_engine(
    triton: Server, tmp_path: Path, mode: str
) -> None:
    settings: dict[str, Any] = {"tokenizer_dir": MODEL, "max_seq_len": 512, "triton_mode": mode}
    async with running(tmp_path, triton.grpc, **settings) as (client, _, _):
        hot = {"prompt": HOT_PROMPT, "temperature": 2.0, "top_p": 1.0}
        drawn = [(await complete(client, **hot, seed=seed))["choices"] for seed in SEEDS]
        again = [(await complete(client, **hot, seed=seed))["choices"] for seed in SEEDS]
        assert drawn == again
        assert len({choices[0]["text"] for choices in drawn}) > 1
        # A text that ends early ends despite `min_tokens`.
        if mode == "token":
            counts = [
                (await complete(client, temperature=0, min_tokens=least))["usage"]
                for least in (0, 20)
            ]
            assert counts[0]["completion_tokens"] < 20 <= counts[1]["completion_tokens"]


@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls"])
def test_the_text_models_take_the_new_names(triton: Server, model: str) -> None:
    asked = {"text_input": PROMPT, "max_tokens": 24, "exclude_input_in_output": True, **WORDS}
    hot = {**asked, "text_input": HOT_PROMPT, "temperature": 2.0, "top_p": 1.0}

    def text(**body: Any) -> str:
        status, answer = triton.generate(model, **body)
        assert status == 200, answer
        said: str = answer["text_output"]
        return said

    drawn = [text(**hot, seed=seed) for seed in SEEDS]
    assert drawn == [text(**hot, seed=seed) for seed in SEEDS]
    assert len(set(drawn)) > 1
    assert len(text(**asked, min_tokens=20)) > len(text(**asked))
    status, answer = triton.generate(model, **asked, random_seed=3)
    # The name is no input of this model, so Triton takes it for a request parameter.
    assert (status, answer["text_output"]) == (200, text(**asked))


def test_a_name_of_another_release_is_declared_and_ignored(triton: Server) -> None:
    """Check that the model ignores the name, as real backends do, and `gateway repo check` reports
    it.
    """
    body = {
        "input_ids": [5, 6, 7],
        "input_lengths": 3,
        "request_output_len": 12,
        "temperature": 2.0,
        "runtime_top_p": 1.0,
    }

    def ids(model: str, **more: Any) -> tuple[int, ...]:
        status, answer = triton.generate(model, **body, **more)
        assert status == 200, answer
        return tuple(answer["output_ids"])

    assert len({ids("tensorrt_llm", seed=seed) for seed in SEEDS}) > 1
    unseeded = ids(OLD_NAMES)
    assert {ids(OLD_NAMES, random_seed=seed) for seed in SEEDS} == {unseeded}
