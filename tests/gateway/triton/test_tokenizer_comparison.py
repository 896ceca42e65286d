"""Comparison of tokenizers if Triton serves no model that turns text into token ids."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer
from tritonclient.grpc.model_config_pb2 import ModelConfig

from gateway.tokenization.identity import TokenizerIdentity
from gateway.tokenization.prompts import Prompts
from gateway.triton.tokenizer.comparison import Findings, compare, read_engine
from tests.support.in_process import ids_of, save_tokenizer

SPARE, MISSING = 64, 1024
OWN = 256
"""Number of tokens of the model itself, one per byte."""


def _save(folder: Path, added: int = 0, change: Callable[[Any], None] = lambda _: None) -> Path:
    folder.mkdir()
    save_tokenizer(folder)
    path = folder / "tokenizer.json"
    definition = json.loads(path.read_text())
    change(definition)
    tokenizer = Tokenizer.from_str(json.dumps(definition))
    tokenizer.add_tokens([AddedToken(f"<{n}>", special=True) for n in range(added)])
    tokenizer.save(str(path))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "!", "pad_token": "?"}')
    return folder


class _Compared:
    """A comparison of one tokenizer with configurations of engines."""

    def __init__(self, folder: Path, prompts: Prompts) -> None:
        self._folder = folder
        self._own = TokenizerIdentity(folder, prompts)

    async def found(self, engine: dict[str, Any] | None = None, **parameters: str) -> Findings:
        found, folder, config = (
            Findings(),
            self._folder / "engine",
            ModelConfig(name="tensorrt_llm"),
        )
        for name, value in parameters.items():
            config.parameters[name].string_value = value
        if engine is not None:
            folder.mkdir()
            whole = {"pretrained_config": engine, "build_config": {"max_seq_len": 64}}
            (folder / "config.json").write_text(json.dumps(whole))
        await compare(self._own, {"tensorrt_llm": config}, read_engine(folder, found), found)
        return found


@pytest.fixture
def own(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[_Compared]:
    """Yield a tokenizer with the number of added tokens that the parameter gives."""
    folder = _save(tmp_path / "own", getattr(request, "param", 0))
    prompts = Prompts.load(folder)
    yield _Compared(folder, prompts)
    prompts.close()


@pytest.mark.parametrize(
    ("own", "rows", "is_other"),
    [
        (SPARE, OWN, False),
        (SPARE + 1, OWN, True),
        # The ids outside of the engine's range include one of the model itself, which text may
        # encode to.
        (4, OWN - 1, True),
        (0, OWN - 1, True),
    ],
    indirect=["own"],
)
async def test_only_a_few_added_tokens_may_lie_beyond_the_engines(
    own: _Compared, rows: int, is_other: bool
) -> None:
    found = await own.found({"vocab_size": rows})
    told, silent = (found.differences, found.doubts)[:: 1 if is_other else -1]
    assert len(told) == 1
    assert f"tokens, the engine {rows}." in told[0]
    assert silent == []


async def test_to_pad_with_an_end_id_is_usual(own: _Compared, tmp_path: Path) -> None:
    [end], [pad] = (ids_of(tmp_path / "own", text) for text in "!?")
    for pads in (end, pad):
        assert (await own.found(pad_id=str(pads))).differences == []
    [told] = (await own.found(pad_id=str(pad + 1))).differences
    assert told == f"Triton's 'tensorrt_llm' has pad_id [{pad + 1}]; here: {pad}."


def _swap(definition: dict[str, Any]) -> None:
    words = definition["model"]["vocab"]
    words["a"], words["b"] = words["b"], words["a"]


def _lower(definition: dict[str, Any]) -> None:
    definition["normalizer"] = {"type": "Lowercase"}


@pytest.mark.parametrize(
    ("added", "change", "told"),
    [
        (0, lambda _: None, None),
        (MISSING, lambda _: None, None),
        (MISSING + 1, lambda _: None, f" has {OWN + MISSING + 1} tokens; here: {OWN}."),
        (0, _swap, " has 'b' as token "),
        (0, _lower, " ids of a text in several scripts; here: "),
    ],
    ids=["the same", "a few added", "many added", "swapped", "lower case"],
)
async def test_a_folder_that_triton_names_is_compared(
    own: _Compared, tmp_path: Path, added: int, change: Callable[[Any], None], told: str | None
) -> None:
    other = _save(tmp_path / "other", added, change)
    found = await own.found(tokenizer_dir=str(other))
    assert found.compared
    assert found.doubts == []
    if told is None:
        assert found.differences == []
    else:
        [difference] = found.differences
        assert difference.startswith(f"Triton's tokenizer_dir {other} ")
        assert told in difference
