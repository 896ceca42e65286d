"""`gateway repo render --repository gpt`, and `gateway repo check` of the result."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from gateway.triton.pbtxt import read_pbtxt
from ops.cli import main
from ops.deployment.check import check
from tests.support.triton_server import MODEL
from triton_repo.render import TEMPLATES


def render(engine: Path, output: Path, *options: str) -> int:
    places = ["--engine-dir", str(engine), "--tokenizer-dir", str(MODEL), "--output", str(output)]
    return main(["repo", "render", "--repository", "gpt", *places, *options])


def test_four_models_for_an_engine(
    cpu_engine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "gpt"
    assert render(cpu_engine, folder) == 0
    told = capsys.readouterr().out
    assert "the GPT repository: no answer is streamed" in told
    # No finding suggests an option that `render` would refuse.
    assert told.endswith("errors: 0, warnings: 0, notes: 1\n")
    models = {"preprocessing", "tensorrt_llm", "postprocessing", "ensemble"}
    assert {path.name for path in folder.iterdir()} == models
    core = read_pbtxt(folder / "tensorrt_llm" / "config.pbtxt")
    assert core.parameters["engine_dir"] == str(cpu_engine)
    modules = {path.name for path in (folder / "tensorrt_llm" / "1").iterdir()}
    assert modules == {"model.py", "executor_api.py", "executor_request.py"}


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--decoupled", "true"], "decoupled: unknown parameter; allowed for preprocessing, "),
        (["-p", "cancellation_check_period_ms=0"], "cancellation_check_period_ms: found '0'"),
        (["-p", "tokenizer_type=auto"], "tokenizer_type: unknown parameter"),
        (["--engine-dir", "/nonexistent"], "engine_dir: /nonexistent/config.json: there is no"),
        (["--description", "x.yaml"], "--description, --print: not with --repository gpt"),
    ],
)
def test_what_it_does_not_take_is_named(
    options: list[str],
    text: str,
    cpu_engine: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert render(cpu_engine, tmp_path / "gpt", *options) == 1
    assert capsys.readouterr().err.startswith(f"gateway repo render: {text}")
    assert not (tmp_path / "gpt").exists()


def test_one_that_was_not_filled(tmp_path: Path) -> None:
    shutil.copytree(TEMPLATES / "gpt", tmp_path / "gpt")
    found = [one for one in check(tmp_path / "gpt") if one.severity == "error"]
    assert {(one.model, one.field) for one in found if one.field.endswith("_dir")} == {
        ("tensorrt_llm", "engine_dir"),
        ("preprocessing", "tokenizer_dir"),
        ("postprocessing", "tokenizer_dir"),
    }
    # Templates lack the Python modules that `render` adds to the version folder.
    assert {one.field for one in found if not one.field.endswith("_dir")} == {"version folder"}
