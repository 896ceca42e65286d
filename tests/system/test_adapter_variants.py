"""Adapters in the formats of several tools: upload, real engine, comparison with float64."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
from tokenizers import Tokenizer

from ops.commands.up import DEMO_MODEL
from tests.support.adapter_variants import VARIANTS
from tests.support.float64_llama import Float64Llama, Floats
from tests.support.local_stack import Stack, Up

pytestmark = pytest.mark.token_mode_only(
    "a text model does not say which tokens log probabilities belong to"
)
TEXT = "The capital of France is Paris. Repeat: owls and numbers 12345"
# The largest measured difference is 0.0042, with all modules: the engine rounds adapters to
# float16. An adapter without the tensors of one layer differs by 0.6 or more.
TOLERANCE = 0.005


@pytest.fixture(scope="module")
def model() -> Float64Llama:
    return Float64Llama(DEMO_MODEL)


@pytest.fixture(scope="module")
def ids() -> list[int]:
    found: list[int] = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json")).encode(TEXT).ids
    return found


@pytest.fixture(scope="module")
def admin(stack: Stack, up: Up) -> Iterator[httpx.Client]:
    headers = {"authorization": f"Bearer {(up.state_dir / 'admin_key').read_text()}"}
    with httpx.Client(base_url=stack.gateway, headers=headers, timeout=60) as client:
        yield client
        client.delete("/v1/adapters/variant")


def _logprobs(client: httpx.Client, name: str, ids: list[int]) -> Floats:
    """Return the log probabilities of the prompt's tokens, without the first token."""
    body = {"model": name, "prompt": ids, "echo": True, "logprobs": 1, "max_tokens": 1}
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    found = answer.json()["choices"][0]["logprobs"]["token_logprobs"]
    return np.array(found[1 : len(ids)], np.float64)


def test_the_base_model_itself(model: Float64Llama, admin: httpx.Client, ids: list[int]) -> None:
    found = _logprobs(admin, "demo", ids)
    np.testing.assert_allclose(found, model.logprobs(ids, {}), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_answers_as_its_merged_model(
    model: Float64Llama, admin: httpx.Client, ids: list[int], tmp_path: Path, name: str
) -> None:
    deltas = VARIANTS[name].write(tmp_path, model)
    files = [("file", (path.name, path.read_bytes())) for path in sorted(tmp_path.iterdir())]
    form = {"name": "variant", "base": "demo"}
    added = admin.post("/v1/adapters", data=form, files=files)
    assert added.status_code == 201, added.text
    expected = model.logprobs(ids, deltas)
    for lost in (*list(deltas)[:1], *list(deltas)[-1:]):
        rest = {module: delta for module, delta in deltas.items() if module != lost}
        assert np.abs(expected - model.logprobs(ids, rest)).max() > 50 * TOLERANCE, lost
    found = _logprobs(admin, "variant", ids)
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE)
