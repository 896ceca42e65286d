"""`gateway repo check`: valid repositories of each type have no findings; its output."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ops.deployment.check import check
from ops.deployment.check_repository import RepositoryError
from tests.support.repositories import (
    BLS,
    CORE,
    ENSEMBLE,
    RenderedRepository,
    error,
    list_findings,
    note,
    warning,
)


def test_a_right_repository_has_no_findings(place: RenderedRepository) -> None:
    assert check(place.repository) == []


def test_static_batching_with_what_only_inflight_batching_has(place: RenderedRepository) -> None:
    place.set(CORE, "gpt_model_type", "V1")
    assert list_findings(place) == {
        error(CORE, "enable_kv_cache_reuse"),
        error(CORE, "guided_decoding_backend"),
        warning(CORE, "batching_strategy"),
    }


def test_a_repository_for_another_machine_is_checked_with_local_folders(
    place: RenderedRepository,
) -> None:
    for model in (CORE, "preprocessing"):
        place.set(model, "gpt_model_path", "/models/engine")
    for model in ("preprocessing", "postprocessing", CORE):
        place.set(model, "tokenizer_dir", "/models/tokenizer")
    assert list_findings(place) == {
        error(CORE, "engine_dir"),
        error("preprocessing", "tokenizer_dir"),
    }
    where = {"engine_dir": place.engine, "tokenizer_dir": place.tokenizer}
    assert list_findings(place, **where) == set()
    place.build("build_config", max_batch_size=8)
    assert list_findings(place, **where) == {error(CORE, "triton_max_batch_size")}


def test_the_model_whose_tokenizer_is_not_there_is_named(place: RenderedRepository) -> None:
    place.set("postprocessing", "tokenizer_dir", "/nowhere")
    findings = check(place.repository)
    assert {(one.severity, one.model, one.field) for one in findings} == {
        error("postprocessing", "tokenizer_dir")
    }
    assert any("/nowhere is not a folder" in one.problem for one in findings)


def test_a_chat_template_may_be_a_file_of_its_own(place: RenderedRepository) -> None:
    place.drop_chat_template()
    (place.tokenizer / "chat_template.jinja").touch()
    assert check(place.repository) == []


def test_a_prompt_may_fill_the_context_so_max_utilization_refuses_nothing(
    place: RenderedRepository,
) -> None:
    place.set(CORE, "batch_scheduler_policy", "max_utilization")
    place.build("build_config", max_input_len=2048)
    assert list_findings(place) == set()


def test_a_draft_model_is_a_core_model_that_the_ensemble_does_not_use(
    place: RenderedRepository,
) -> None:
    draft = place.repository / "draft"
    shutil.copytree(place.repository / CORE, draft)
    place.edit("draft", 'name: "tensorrt_llm"', 'name: "draft"')
    place.set(BLS, "tensorrt_llm_draft_model_name", "draft")
    assert check(place.repository) == []
    place.drop_lora_from_ensemble()
    assert [one.model for one in check(place.repository)] == [ENSEMBLE]
    place.set("draft", "gpt_model_type", "")
    assert error("draft", "batching_strategy") in list_findings(place)


def test_engines_before_v08_have_other_file_names(place: RenderedRepository) -> None:
    (place.engine / "model.safetensors").unlink()
    (place.engine / "llama_float16_tp1_rank0.engine").touch()
    assert list_findings(place) == set()


def test_adapters_are_for_the_llmapi_repository(place: RenderedRepository) -> None:
    with pytest.raises(RepositoryError, match="--adapter: only for a model of the llmapi"):
        check(place.repository, adapters=[place.folder])


def test_a_single_quoted_hole_is_a_string(place: RenderedRepository) -> None:
    place.add(CORE, "x", "y")
    place.edit(CORE, 'string_value: "y"', "string_value: '${y}' # ${z}\n")
    assert list_findings(place) == {note(CORE, "parameters")}


def _command(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ops", "repo", "check", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ,
        timeout=60,
    )


def test_the_command_prints_findings_and_says_errors_by_its_exit_code(
    place: RenderedRepository,
) -> None:
    place.edit(BLS, "count: 4", "count: 1")
    answer = _command(place.repository)
    assert answer.returncode == 0
    assert answer.stdout.splitlines() == [
        "warning  tensorrt_llm_bls: bls_instance_count",
        "         1: it serves one request at a time, and all others wait",
        "         fix: set bls_instance_count to the number of requests that run at once",
        "errors: 0, warnings: 1, notes: 0",
    ]
    place.build("build_config", max_batch_size=8)
    answer = _command(place.repository, "--json")
    assert answer.returncode == 1
    findings = json.loads(answer.stdout)["findings"]
    assert [(one["severity"], one["field"]) for one in findings] == [
        ("error", "triton_max_batch_size"),
        ("warning", "bls_instance_count"),
    ]


def test_what_is_no_repository_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RepositoryError, match="no such folder"):
        check(tmp_path / "nowhere")
    with pytest.raises(RepositoryError, match=r"no folder in it has a config\.pbtxt"):
        check(tmp_path)
    answer = _command(tmp_path)
    assert answer.returncode == 1
    assert answer.stderr.startswith("gateway repo check: ")
