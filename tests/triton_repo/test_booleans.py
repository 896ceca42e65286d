"""Parsing of booleans: the shared parser, the gateway's, and the Triton models' agree."""

from __future__ import annotations

from pathlib import Path

import pytest
from tritonclient.grpc import model_config_pb2

from gateway.triton.model_capabilities import core_flag, flag
from tests.support.triton_server import MODEL, repository_parameters, serving
from triton_repo.booleans import FALSE, MODEL_FALSE, MODEL_TRUE, TRUE, parse_boolean
from triton_repo.cpu_executor import engine
from triton_repo.render import render

UNREADABLE = ("true ", " False", "on", "2", "tru", "false,", "0,9")


def config_of(value: str) -> model_config_pb2.ModelConfig:
    config = model_config_pb2.ModelConfig()
    config.parameters["p"].string_value = value
    return config


@pytest.mark.parametrize("word", [*MODEL_TRUE, *MODEL_FALSE])
@pytest.mark.parametrize("form", ["lower", "upper", "capitalize"])
def test_the_gateway_reads_what_the_models_read(word: str, form: str) -> None:
    written = getattr(word, form)()
    assert parse_boolean(written, of_text_model=True) == (word in MODEL_TRUE)
    for default in (True, False):
        assert flag(config_of(written), "p", default=default) == (word in MODEL_TRUE)
    if word in (*TRUE, *FALSE):
        assert parse_boolean(written) == core_flag(config_of(written), "p") == (word in TRUE)
    else:
        with pytest.raises(ValueError, match=f"^found '{written}'; allowed: true or false$"):
            parse_boolean(written)
        assert not core_flag(config_of(written), "p")


@pytest.mark.parametrize("value", UNREADABLE)
def test_other_words_are_refused_and_a_default_to_upstream(value: str) -> None:
    for of_text_model in (True, False):
        with pytest.raises(ValueError, match="allowed: true or false"):
            parse_boolean(value, of_text_model=of_text_model)
    assert flag(config_of(value), "p", default=True)
    assert not flag(config_of(value), "p", default=False)
    assert not core_flag(config_of(value), "p")


@pytest.mark.slow
def test_a_model_with_a_word_that_it_cannot_read_does_not_load(tmp_path: Path) -> None:
    engine.build(MODEL, tmp_path / "engine")
    written = {
        "tensorrt_llm": ("exclude_input_in_output", "yes"),
        "preprocessing": ("add_special_tokens", "true "),
        "postprocessing": ("skip_special_tokens", " False"),
        "tensorrt_llm_bls": ("accumulate_tokens", "on"),
    }
    render(tmp_path / "repository", repository_parameters(tmp_path))
    for model, (name, value) in written.items():
        path = tmp_path / "repository" / model / "config.pbtxt"
        head, found, tail = path.read_text().partition(f'key: "{name}" value {{ string_value: "')
        assert found
        path.write_text(head + found + value + '"' + tail.partition('"')[2])
    with serving(tmp_path, "--exit-on-error=false", "--strict-readiness=false") as server:
        reasons = server.why_unavailable()
    for model, (name, value) in written.items():
        assert f"{name}: found {value!r}; allowed: true or false" in reasons[model]
