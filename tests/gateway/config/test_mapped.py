"""`embedding_models` and `rerank_models` in the configuration file: errors name their line."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from gateway.config.file import ConfigurationError, load
from ops.commands.up import DEMO_MODEL
from tests.support.gateway_process import write_config
from tests.support.refused_start import refusals

ENTRY = {"input": "TEXT", "output": "OUT"}
IDS = {"input_ids": "IDS", "output": "OUT", "tokenizer": str(DEMO_MODEL)}
PAIR = {"query": "Q", "document": "D", "output": "OUT"}
MISTAKES: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"m": {"input": "TEXT"}}, {}, "embedding_models.m.output: missing"),
    ({"m": {"output": "OUT"}}, {}, "must have either input or input_ids"),
    ({"m": ENTRY | IDS}, {}, "must have either input or input_ids"),
    ({"m": IDS | {"tokenizer": None}}, {}, "input_ids need the folder of a tokenizer"),
    ({"m": ENTRY | {"attention_mask": "M"}}, {}, "of use with input_ids only"),
    ({"m": ENTRY | {"max_tokens": 8}}, {}, "max_tokens needs the folder of a tokenizer"),
    ({"m": ENTRY | {"tokenizer": "here"}}, {}, "must be an absolute folder"),
    ({"m": ENTRY | {"outptu": "X"}}, {}, "outptu: unknown; allowed: triton_model, input_ids"),
    ({"output": ENTRY | {"x": 1}}, {}, "embedding_models.output.x: unknown; allowed:"),
    ({"a b": ENTRY}, {}, "must be NAME or TENANT/NAME"),
    ({}, {"m": {"query": "Q", "output": "OUT"}}, "must have both query and document"),
    ({"m": ENTRY}, {"m": PAIR}, "rerank_models.m: used twice; first by embedding_models"),
    ({"a": ENTRY}, {}, r"embedding_models.a: used twice; first by adapters\[0\]"),
    ({}, {"a": PAIR}, r"rerank_models.a: used twice; first by adapters\[0\]"),
]


@pytest.mark.parametrize(("embedding", "rerank", "message"), MISTAKES)
def test_mistakes(
    tmp_path: Path, embedding: dict[str, Any], rerank: dict[str, Any], message: str
) -> None:
    adapters = [{"name": "a", "source": "/srv/a"}]
    models = {"adapters": adapters, "embedding_models": embedding, "rerank_models": rerank}
    path = write_config(tmp_path / "c.yaml", **models)
    with pytest.raises(ConfigurationError, match=message) as found:
        load(path)
    line = re.match(rf"{path}:(\d+): ", str(found.value))
    assert line is not None
    assert int(line[1]) > 1


def test_names_and_folders_that_settings_know(tmp_path: Path) -> None:
    cases = {
        "base": ({"m": ENTRY}, "embedding_models.m: is the base model's name"),
        "setting": ({"zh": ENTRY}, "embedding_models.zh: is a name in GATEWAY_ADAPTERS"),
        "folder": ({"e": IDS | {"tokenizer": str(tmp_path)}}, "tokenizer.json"),
    }
    settings = {"tokenizer_dir": DEMO_MODEL, "model_name": "m", "adapters": '{"zh": "/srv/zh"}'}
    told = refusals(
        *(
            settings | {"config": write_config(tmp_path / f"{name}.yaml", embedding_models=models)}
            for name, (models, _) in cases.items()
        )
    )
    for text, (_, message) in zip(told, cases.values(), strict=True):
        assert message in text
