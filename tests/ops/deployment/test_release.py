"""Releases and containers named in options: each command uses the templates of that release."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ops.deployment.release import ReleaseError, ToolsRemoved, parse_release, read_sets
from tests.support.commands import gateway
from tests.support.hf_configs import write_config
from tests.support.repositories import BLS, CORE, ENSEMBLE, RenderedRepository
from triton_repo.releases import V0_17, V0_19, V0_20


@pytest.mark.parametrize(
    ("text", "release", "sets"),
    [
        ("0.9", "0.9", (V0_17,)),
        ("v0.17.0", "0.17", (V0_17,)),
        ("0.18.2", "0.18", (V0_17,)),
        ("0.19.0", "0.19", (V0_19, V0_20)),
        ("0.20.0", "0.20", (V0_20,)),
        ("1.2.0rc3", "1.2", (V0_20,)),
        ("24.12", "0.16", (V0_17,)),
        ("25.04-trtllm-python-py3", "0.18", (V0_17,)),
        ("25.05", "0.19", (V0_20,)),
        ("25.07", "0.20", (V0_20,)),
        ("25.11", "1.0", (V0_20,)),
        ("nvcr.io/nvidia/tritonserver:26.07-trtllm-python-py3", "1.2", (V0_20,)),
        ("registry:5000/tritonserver:26.02", "1.1", (V0_20,)),
    ],
)
def test_a_release_and_a_container_have_their_templates(
    text: str, release: str, sets: tuple[str, ...]
) -> None:
    assert str(parse_release(text)) == release
    assert read_sets(text) == sets


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("24.08", "found 24.08; containers known here: 24.12 to 26.07"),
        ("26.08", "Give the version of its TensorRT-LLM instead"),
        ("latest", "found 'latest'; allowed: a version such as 0.17.0, or a container's tag"),
        ("0.5", "allowed: 0.9 and later"),
    ],
)
def test_what_is_no_release_is_refused(text: str, said: str) -> None:
    with pytest.raises(ReleaseError, match=f"^--trtllm-version: .*{re.escape(said)}"):
        read_sets(text)
    with pytest.raises(ToolsRemoved):
        read_sets("1.3.0")


def inputs(repository: Path, model: str) -> set[str]:
    config = (repository / model / "config.pbtxt").read_text(encoding="utf-8")
    declared = set(re.findall(r'name: "(\w+)"', config))
    return declared & {"seed", "random_seed", "min_tokens", "min_length"}


@pytest.mark.parametrize(
    ("version", "names", "says"),
    [
        ("0.18.0", {"random_seed", "min_length"}, False),
        ("0.19.0", {"random_seed", "min_length"}, True),
        ("0.20.0", {"seed", "min_tokens"}, False),
        ("1.2.1", {"seed", "min_tokens"}, False),
        ("25.05", {"seed", "min_tokens"}, False),
        ("24.12", {"random_seed", "min_length"}, False),
    ],
)
def test_an_import_has_the_names_of_what_serves_it(
    tmp_path: Path, version: str, names: set[str], says: bool
) -> None:
    model, out = write_config(tmp_path, "llama-3-8b"), tmp_path / "out"
    (model / "tokenizer.json").touch()
    answer = gateway("import", model, "--name", "m", "--output", out, "--trtllm-version", version)
    assert answer.returncode == 0, answer.stderr
    for name in (CORE, ENSEMBLE, BLS):
        assert inputs(out / "repository", name) == names
    assert ("import with --trtllm-version 25.05" in answer.stdout) == says


@pytest.mark.parametrize("release", ["1.2.1", "25.10", "0.20"])
def test_a_description_names_a_release(place: RenderedRepository, release: str) -> None:
    """Check releases that YAML reads as numbers: 25.10 loses its zero."""
    file, out = place.folder / "description.yaml", place.folder / "out"
    file.write_text(
        f"release: {release}\nengine_dir: engine\ntokenizer_dir: tokenizer\n"
        "triton_backend: python\n"
    )
    answer = gateway("repo", "render", "--description", file, "--output", out)
    assert answer.returncode == 0, answer.stderr
    assert inputs(out, CORE) == {"seed", "min_tokens"}


def test_a_release_without_templates_is_refused(place: RenderedRepository) -> None:
    answer = gateway(
        *("repo", "render", "--engine-dir", place.engine, "--tokenizer-dir", place.tokenizer),
        *("--release", "0.16", "--output", place.folder / "out"),
    )
    assert answer.returncode == 1
    assert answer.stderr == (
        "gateway repo render: release: found '0.16'; allowed: 0.17 and later, and containers since "
        "25.01\n"
    )


@pytest.mark.parametrize("repository", ["inflight_batcher_llm", "gpt"])
def test_the_engines_release_is_taken_where_none_is_given(
    place: RenderedRepository, repository: str
) -> None:
    place.build("", version="1.1.0")
    out = place.folder / "out"
    options = ("--engine-dir", place.engine, "--tokenizer-dir", place.tokenizer, "--output", out)
    backend = () if repository == "gpt" else ("--triton-backend", "python")
    answer = gateway("repo", "render", "--repository", repository, *options, *backend)
    assert answer.returncode == 0, answer.stderr
    assert inputs(out, CORE) == {"seed", "min_tokens"}
    answer = gateway(
        *("repo", "render", "--repository", repository, *options, *backend, "--release", "0.17")
    )
    assert inputs(out, CORE) == {"random_seed", "min_length"}


@pytest.mark.parametrize("name", ["", "a/b", "ensemble", "../x"])
def test_a_name_that_triton_cannot_have_is_refused(tmp_path: Path, name: str) -> None:
    model, out = write_config(tmp_path, "llama-3-8b"), tmp_path / "out"
    (model / "tokenizer.json").touch()
    answer = gateway("import", model, "--name", "m", "--output", out, "--triton-name", name)
    assert answer.returncode == 1
    assert answer.stderr.startswith(f"gateway import: --triton-name: found {name!r}; allowed: ")
    assert not out.exists()


def test_a_check_is_told_what_will_serve(place: RenderedRepository) -> None:
    place.edit(CORE, 'backend: "python"', 'backend: "tensorrtllm"')
    (place.engine / "rank0.engine").touch()
    answers = {
        version: gateway("repo", "check", place.repository, "--trtllm-version", version)
        for version in ("25.08", "25.04", "latest")
    }
    assert answers["25.08"].returncode == 1
    for old, new in (
        ("min_length", "min_tokens"),
        ("random_seed", "seed"),
        ("return_kv_cache_reuse_stats", "return_perf_metrics"),
    ):
        place_of = f"error    tensorrt_llm: {old}\n         "
        assert (
            f"{place_of}--trtllm-version 25.08, whose backend reads {new}"
            in answers["25.08"].stdout
        )
    assert "random_seed" not in answers["25.04"].stdout
    assert answers["latest"].returncode == 1
    assert "--trtllm-version: found 'latest'" in answers["latest"].stderr
