"""Error messages of each command for files whose content does not match their name."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import httpx
import pytest

from adapters.model_files import INDEX
from docs.generate import ROOT
from ops.commands.up import DEMO_ADAPTERS, DEMO_MODEL
from ops.deployment.check import check
from tests.support.commands import gateway
from tests.support.local_stack import Up
from tests.support.patience import PATIENCE_S
from tests.support.refused_start import refusals
from tests.support.repositories import RenderedRepository, render_repository

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n"
GIT_LFS = "is a Git LFS pointer, not the file that it stands for"
TEMPORARY = re.compile(r"/tmp/(?!pytest-of)|adapter-\w{8}\b")


def _copy(source: Path, folder: Path) -> Path:
    return Path(shutil.copytree(source, folder, copy_function=shutil.copyfile))


def _shards(model: Path) -> None:
    """Add an index of two weight files, the second of which is missing."""
    first, second = (f"model-0000{n}-of-00002.safetensors" for n in (1, 2))
    (model / "model.safetensors").rename(model / first)
    (model / INDEX).write_text(json.dumps({"weight_map": {"a": first, "b": second}}))


@pytest.mark.parametrize("goal", [["--cpu"], ["--gpu", "H100"], ["--llmapi"]], ids=str)
def test_import_names_what_cannot_be_served(tmp_path: Path, goal: list[str]) -> None:
    model, output = _copy(DEMO_MODEL, tmp_path / "model"), tmp_path / "out"

    def refused() -> list[str]:
        answer = gateway("import", model, "--name", "m", "--output", output, *goal)
        assert answer.returncode == 1, answer.stdout
        assert not output.exists()
        return answer.stderr.splitlines()

    (model / "tokenizer.json").write_text(POINTER)
    (model / "model.safetensors").write_text(POINTER)
    assert [line.partition("; ")[0] for line in refused()] == [
        f"gateway import: {model}/{name} {GIT_LFS}"
        for name in ("tokenizer.json", "model.safetensors")
    ]
    shutil.rmtree(model)
    _shards(_copy(DEMO_MODEL, model))
    [line] = refused()
    missing = model / "model-00002-of-00002.safetensors"
    assert line.startswith(f"gateway import: {missing} is missing: {INDEX} names 2 files")
    shutil.rmtree(model)
    weights = _copy(DEMO_MODEL, model) / "model.safetensors"
    os.truncate(weights, 1_000_000)
    [line] = refused()
    assert line.startswith(f"gateway import: {weights} was cut: it has 1000000 of ")
    weights.unlink()
    (model / "m.gguf").write_bytes(b"GGUF\x03\0\0\0")
    [line] = refused()
    assert line.startswith(f"gateway import: {model}/m.gguf is a GGUF file of llama.cpp")


def test_a_gpus_engine_is_planned_before_the_weights_are_there(tmp_path: Path) -> None:
    model = _copy(DEMO_MODEL, tmp_path / "model")
    (model / "model.safetensors").unlink()
    arguments = ("import", model, "--name", "m", "--output", tmp_path / "out")
    assert gateway(*arguments, "--gpu", "H100").returncode == 0
    refused = gateway(*arguments, "--cpu")
    assert f"{model} has no model*.safetensors; download" in refused.stderr


def test_import_of_other_forms_of_a_model(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "config.json").write_text('{"architecture": "LlamaForCausalLM", "mapping": {}}')
    (folder / "rank0.safetensors").touch()
    gguf = tmp_path / "m.gguf"
    gguf.write_bytes(b"GGUF\x03\0\0\0")
    for given, said in (
        (folder, "is that of a TensorRT-LLM checkpoint; name the Hugging Face folder"),
        (gguf, f"{gguf} is a GGUF file of llama.cpp"),
        (tmp_path / "nothing", f"there is no folder {tmp_path / 'nothing'}"),
    ):
        answer = gateway("import", given, "--name", "m", "--cpu", "--output", tmp_path / "out")
        assert answer.returncode == 1
        assert f"gateway import: {given}/config.json: {said}" in answer.stderr


def test_repo_check_finds_them(tmp_path: Path, cpu_engine: Path) -> None:
    place = render_repository(tmp_path, cpu_engine)

    def errors() -> list[tuple[str, str, str]]:
        found = check(place.repository)
        return [(f.field, f.problem, f.fix) for f in found if f.severity == "error"]

    assert errors() == []
    (place.tokenizer / "tokenizer.json").write_text(POINTER)
    [(field, problem, fix)] = errors()
    assert field == "tokenizer_dir"
    assert f"{place.tokenizer}/tokenizer.json {GIT_LFS}: the model does not load" == problem
    assert "git lfs pull" in fix
    _copy_back(place)
    (place.engine / "config.json").write_text('{"architecture": "X", "mapping": {}}')
    [(field, problem, _)] = errors()
    assert field == "engine_dir"
    assert f"trtllm-build --checkpoint_dir {place.engine} and name what it writes" in problem


def _copy_back(place: RenderedRepository) -> None:
    shutil.copyfile(DEMO_MODEL / "tokenizer.json", place.tokenizer / "tokenizer.json")


def test_a_gateway_says_what_to_set_its_tokenizer_to(tmp_path: Path) -> None:
    pointer = _copy(DEMO_MODEL, tmp_path / "model")
    (pointer / "tokenizer.json").write_text(POINTER)
    unset, wrong = refusals({}, {"tokenizer_dir": pointer})
    assert "GATEWAY_TOKENIZER_DIR: is not set; set it to the Hugging Face folder" in unset
    assert "Field required" not in unset
    assert f"GATEWAY_TOKENIZER_DIR: {pointer}/tokenizer.json {GIT_LFS}; install git-lfs" in wrong


def _lora(up: Up, *arguments: object) -> str:
    """Return stderr of the failing command."""
    answer = gateway("lora", *arguments, "--state-dir", up.state_dir)
    assert answer.returncode == 1, answer.stdout
    assert not TEMPORARY.search(answer.stderr), answer.stderr
    return answer.stderr


def test_lora_add_says_what_a_folder_has_instead(up: Up, tmp_path: Path) -> None:
    def add(folder: Path) -> str:
        return _lora(up, "add", "wrong", folder, "--base", "demo")

    assert f"{tmp_path}/none does not exist; name the adapter's folder" in add(tmp_path / "none")
    folder = _copy(DEMO_ADAPTERS / "zh", tmp_path / "zh")
    weights = folder / "adapter_model.safetensors"
    weights.write_text(POINTER)
    assert f"adapter_model.safetensors: {GIT_LFS}, and no safetensors file; install" in add(folder)
    weights.unlink()
    assert "adapter_model.safetensors: the adapter has no such file; PEFT's" in add(folder)
    (folder / "adapter_model.bin").write_bytes(b"PK\x03\x04")
    assert "adapter_model.bin: is a pickle, which runs code when it is read; save" in add(folder)
    (tmp_path / "gguf").mkdir()
    (tmp_path / "gguf" / "zh.gguf").write_bytes(b"GGUF")
    assert "zh.gguf is a GGUF file of llama.cpp" in add(tmp_path / "gguf")


def test_lora_rollback_and_sources_say_what_there_is(up: Up, tmp_path: Path) -> None:
    folder = DEMO_ADAPTERS / "zh"
    assert (
        gateway(
            *("lora", "add", "once", folder, "--base", "demo", "--state-dir", up.state_dir)
        ).returncode
        == 0
    )
    said = _lora(up, "rollback", "once")
    assert re.search(
        r"once: no version was served before (\w{12}), which is served now; name one of its "
        r"versions \(\1\), or add another one first",
        said,
    ), said
    assert gateway("lora", "remove", "once", "--state-dir", up.state_dir).returncode == 0
    said = _lora(up, "add", "away", "hf://acme/none", "--base", "demo")
    assert "GATEWAY_ADAPTER_SOURCES" in said


def test_lora_size_names_the_folder(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    answer = gateway("lora", "size", DEMO_MODEL, tmp_path / "empty")
    assert f"gateway lora size: {tmp_path}/empty: adapter_config.json: the adapter has no" in (
        answer.stderr
    )


def test_the_upload_of_the_guide(up: Up) -> None:
    """Run the curl upload of docs/lora.md unchanged."""
    guide = (ROOT / "docs/lora.md").read_text(encoding="utf-8")
    block = re.search(r"<!-- file: upload\.sh -->\n```sh\n(.*?)^```$", guide, re.M | re.S)
    assert block is not None
    url = up.state().gateway
    script = block[1].replace("http://127.0.0.1:9000", url).replace(".state", str(up.state_dir))
    done = subprocess.run(
        ["sh", "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    added = json.loads(done.stdout)
    assert (added["name"], added["base"]) == ("chinese", "demo")
    assert gateway("lora", "remove", "chinese", "--state-dir", up.state_dir).returncode == 0


def test_up_says_which_pages_to_open(up: Up) -> None:
    url = up.state().gateway
    key = up.state_dir / "admin_key"
    *_, playground, operators = up.stderr.splitlines()
    assert [playground, operators] == [
        f"playground: {url}/",
        f"operators' page: {url}/operators, key in {key}",
    ]
    for page in ("/", "/operators"):
        answer = httpx.get(url + page, timeout=PATIENCE_S)
        assert answer.headers["content-type"].startswith("text/html")
    assert key.exists()


def test_setup_says_what_comes_next() -> None:
    for goal, says in (("setup", True), ("lint", False)):
        make = ["make", "--dry-run", "--old-file=.venv/.installed", goal]
        printed = subprocess.run(
            make, cwd=ROOT, capture_output=True, text=True, check=True, env=os.environ
        ).stdout
        assert ("/operators" in printed and ".state/admin_key" in printed) is says


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--adapter", "zh=/nowhere"], "zh: /nowhere does not exist; name the adapter's folder"),
        (["--model", "{lfs}"], "--model: {lfs}/model.safetensors is a Git LFS pointer"),
        (["--model", "{lfs}"], "--model: {lfs}/tokenizer.json is a Git LFS pointer"),
    ],
)
def test_up_refuses_before_it_starts_anything(
    tmp_path: Path, arguments: list[str], said: str
) -> None:
    model = _copy(DEMO_MODEL, tmp_path / "lfs")
    for name in ("model.safetensors", "tokenizer.json"):
        (model / name).write_text(POINTER)
    given = [word.format(lfs=model) for word in arguments]
    with Up(tmp_path, "--port", "0", *given) as up:
        assert up.wait() in (1, 2)
        assert said.format(lfs=model) in up.stderr
        assert "redis: started" not in up.stderr


@pytest.mark.slow
def test_declared_adapters_of_upstreams_converter_are_served(up: Up, tmp_path: Path) -> None:
    """Check `gateway up --adapter` with npy files instead of a PEFT folder."""
    from adapters import npy  # noqa: PLC0415
    from tests.support.generated_adapters import convert_folder  # noqa: PLC0415

    (tmp_path / "npy").mkdir()
    npy.write(convert_folder(DEMO_ADAPTERS / "zh", up.state_dir / "engine"), tmp_path / "npy")
    with Up(tmp_path, "--port", "0", "--adapter", f"zh={tmp_path / 'npy'}") as other:
        url = other.wait_ready().gateway
        question = {"model": "zh", "prompt": "Hello", "max_tokens": 1}
        answer = httpx.post(f"{url}/v1/completions", json=question, timeout=PATIENCE_S)
        assert answer.status_code == 200, answer.text
