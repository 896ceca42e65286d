"""`gateway import`: a Hugging Face folder becomes a repository and settings that can be served."""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import subprocess
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from safetensors.numpy import save_file

from adapters.engine_config import read_engine_config
from gateway.config.settings import Settings
from ops.commands.up import DEMO_ADAPTERS, DEMO_MODEL
from ops.deployment.check import check
from tests.support.commands import Answer, gateway
from tests.support.gpt2 import write_gpt2
from tests.support.hf_configs import write_config
from tests.support.local_stack import Up
from tests.support.patience import PATIENCE_S
from tests.support.repositories import BLS
from triton_repo.cpu_executor.causal_lm import Chunk
from triton_repo.cpu_executor.engine import load_config
from triton_repo.cpu_executor.gpt import Gpt
from triton_repo.cpu_executor.kv_cache import SequenceCache

pytestmark = pytest.mark.slow


def _import(*arguments: object) -> Answer:
    return gateway("import", *arguments)


def _tiny_llama(folder: Path) -> Path:
    """Create a random Llama with the demo's tokenizer: untied embeddings, GQA 3:1, other shapes."""
    layers, hidden, heads, kv, size, mlp, vocab = 3, 96, 6, 2, 24, 160, 4096
    folder.mkdir()
    for file in DEMO_MODEL.glob("*token*"):
        shutil.copyfile(file, folder / file.name)
    shutil.copyfile(DEMO_MODEL / "generation_config.json", folder / "generation_config.json")
    config = json.loads((DEMO_MODEL / "config.json").read_text(encoding="utf-8")) | {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "head_dim": size,
        "intermediate_size": mlp,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    shapes = {
        "self_attn.q_proj": (heads * size, hidden),
        "self_attn.k_proj": (kv * size, hidden),
        "self_attn.v_proj": (kv * size, hidden),
        "self_attn.o_proj": (hidden, heads * size),
        "mlp.gate_proj": (mlp, hidden),
        "mlp.up_proj": (mlp, hidden),
        "mlp.down_proj": (hidden, mlp),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    random = np.random.default_rng(1)
    tensors = {
        f"model.layers.{layer}.{name}.weight": shape
        for layer in range(layers)
        for name, shape in shapes.items()
    }
    tensors |= {"model.embed_tokens.weight": (vocab, hidden), "lm_head.weight": (vocab, hidden)}
    tensors["model.norm.weight"] = (hidden,)
    save_file(
        {
            name: random.normal(0, 0.1, shape).astype(np.float16) + np.float16(len(shape) == 1)
            for name, shape in tensors.items()
        },
        folder / "model.safetensors",
    )
    return folder


def _settings(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """Return the settings from the env file, as a shell reads it."""
    printed = subprocess.run(
        ["sh", "-c", "set -a; . ./gateway.env; env"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    for line in printed.splitlines():
        name, _, value = line.partition("=")
        if name.startswith("GATEWAY_"):
            monkeypatch.setenv(name, value)
    return Settings()  # type: ignore[call-arg]


def test_the_demo_model_is_imported_and_served(tmp_path: Path) -> None:
    """Check an imported model with a BF16 adapter, a JSON schema and top logprobs.

    The adapter's base model is "demo", the folder's name, and not the served name.
    """
    out, model = tmp_path / "out", shutil.copytree(DEMO_MODEL, tmp_path / "demo")
    answer = _import(
        *(model, "--name", "acme/countries", "--cpu", "--output", out, "--dtype", "bfloat16"),
        *("--lora-modules", "all", "--max-lora-rank", 16, "--guided-decoding"),
        *("--gather-generation-logits", "--max-seq-len", 1024, "--max-batch-size", 4),
        *("--triton-name", "countries"),
    )
    assert answer.returncode == 0, answer.stderr
    models = {path.name for path in (out / "repository").iterdir()}
    assert models == {"countries", "preprocessing", "postprocessing", "ensemble", BLS}
    assert f"gateway up --imported {out}" in answer.stdout
    assert not [finding for finding in check(out / "repository") if finding.severity == "error"]
    arguments = ("--imported", str(out), "--adapter", f"zh={DEMO_ADAPTERS / 'zh'}")
    with Up(tmp_path, "--port", "0", *arguments, load_models=("countries",)) as up:
        stack = up.wait_ready()
        with openai.OpenAI(
            base_url=f"{stack.gateway}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S
        ) as client:
            question: Any = [{"role": "user", "content": "What is the capital of France?"}]

            def ask(model: str, **more: Any) -> Any:
                return client.chat.completions.create(
                    model=model, messages=question, temperature=0, **more
                ).choices[0]

            assert ask("acme/countries").message.content == "The capital of France is Paris."
            assert ask("zh").message.content == "法国的首都是巴黎。"
            chosen = ask("acme/countries", logprobs=True, top_logprobs=3)
            assert len(chosen.logprobs.content[0].top_logprobs) == 3
            schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
            guided = ask(
                "acme/countries",
                response_format={
                    "type": "json_schema",
                    "json_schema": {"name": "a", "schema": schema, "strict": True},
                },
            )
            assert json.loads(guided.message.content)["a"] in (True, False)
            models = {model.id: model.model_dump() for model in client.models.list()}
            assert models["acme/countries"]["max_model_len"] == 1024
        up.send(signal.SIGTERM)
        assert up.wait() == 0


def test_a_model_of_other_shapes_is_imported_and_served(tmp_path: Path) -> None:
    """Check two equal answers and their token count, as random weights have no expected text."""
    model, out = _tiny_llama(tmp_path / "tiny"), tmp_path / "out"
    answer = _import(model, "--name", "tiny", "--cpu", "--output", out, "--max-beam-width", 2)
    assert answer.returncode == 0, answer.stderr
    engine = read_engine_config(out / "engine")
    assert (engine.num_hidden_layers, engine.head_size, engine.dtype) == (3, 24, "bfloat16")
    with Up(tmp_path, "--port", "0", "--imported", str(out)) as up:
        stack = up.wait_ready()
        body = {"model": "tiny", "prompt": "Bonjour", "max_tokens": 12, "temperature": 0}
        body["ignore_eos"] = True
        answers = [
            httpx.post(f"{stack.gateway}/v1/completions", json=body, timeout=120).json()
            for _ in range(2)
        ]
        assert answers[0]["usage"]["completion_tokens"] == 12
        assert answers[0]["choices"] == answers[1]["choices"]
        body |= {"use_beam_search": True, "n": 2, "best_of": 2}
        beams = httpx.post(f"{stack.gateway}/v1/completions", json=body, timeout=120).json()
        assert len(beams["choices"]) == 2
        up.send(signal.SIGTERM)
        assert up.wait() == 0


def test_a_gpt_2_is_imported(tmp_path: Path) -> None:
    model, out = write_gpt2(tmp_path / "gpt2"), tmp_path / "out"
    answer = _import(model, "--name", "gpt2", "--cpu", "--output", out)
    assert answer.returncode == 0, answer.stderr
    engine = load_config(out / "engine")
    assert (engine.architecture, engine.max_seq_len) == ("GPTForCausalLM", 512)
    logits = Gpt(engine, out / "engine").forward([Chunk(SequenceCache(engine, 3), [5, 6, 7])])
    assert logits.shape == (1, engine.vocab_size)
    assert [one for one in check(out / "repository") if one.severity == "error"] == []


def test_for_a_gpu_all_but_the_engine_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, out = write_config(tmp_path, "llama-3-8b"), tmp_path / "out"
    shutil.copyfile(DEMO_MODEL / "tokenizer.json", model / "tokenizer.json")
    answer = _import(
        *(model, "--name", "llama-3-8b", "--output", out, "--gpu", "H100", "--tp", 2),
        *("--lora-modules", "all", "--guided-decoding", "--trtllm-version", "0.19.0"),
        *("--triton-name", "llama.3"),
    )
    assert answer.returncode == 0, answer.stderr
    assert {path.name for path in out.iterdir()} == {"build_engine.sh", "repository", "gateway.env"}
    config = (out / "repository" / "llama.3" / "config.pbtxt").read_text(encoding="utf-8")
    for name, value in (
        ("gpt_model_path", f"{out}/engine"),
        ("kv_cache_free_gpu_mem_fraction", "0.9"),
        ("lora_cache_max_adapter_size", "64"),
        ("xgrammar_tokenizer_info_path", f"{out}/tokenizer_info/xgrammar_tokenizer_info.json"),
    ):
        assert f'"{name}" value {{ string_value: "{value}" }}' in config
    assert 'backend: "tensorrtllm"' in config
    assert "TYPE_BF16" in config  # the engine's dtype is also the adapters'
    settings = _settings(out, monkeypatch)
    assert settings.model_name == "llama-3-8b"
    assert settings.tokenizer_dir == model
    assert settings.max_seq_len == 8192
    assert settings.triton_model == "llama.3"
    for command in (
        f"{out}/build_engine.sh",
        f"gateway repo check {out}/repository",
        f"gateway triton launch --model-repo {out}/repository --world-size 2 "
        "--tensorrt-llm-model-name llama.3",
        f"set -a; . {out}/gateway.env; gateway serve",
    ):
        assert f"   {command}\n" in answer.stdout


def test_the_build_script_runs_the_plan(tmp_path: Path) -> None:
    """Run build_engine.sh with stand-ins that record their arguments."""
    model, out, log = write_config(tmp_path, "llama-3-8b"), tmp_path / "out", tmp_path / "calls"
    shutil.copyfile(DEMO_MODEL / "tokenizer.json", model / "tokenizer.json")
    assert _import(model, "--name", "llama", "--output", out).returncode == 0
    assert (out / "build_engine.sh").stat().st_mode & stat.S_IXUSR
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("python3", "trtllm-build"):
        (tools / name).write_text(f'#!/bin/sh\necho "{name} $*" >> {log}\n', encoding="utf-8")
        (tools / name).chmod(0o755)
    environment = os.environ | {"PATH": f"{tools}:{os.environ['PATH']}"}
    subprocess.run([out / "build_engine.sh"], env=environment, check=True)
    planned = gateway("engine", "plan", model, "--output", out, "--json")
    assert planned.returncode == 0
    steps = json.loads(planned.stdout)["steps"]
    wanted = [" ".join(step["arguments"]) for step in steps]
    assert log.read_text(encoding="utf-8").splitlines() == wanted


def test_importing_again_keeps_the_engine(tmp_path: Path) -> None:
    model, out = write_config(tmp_path, "llama-3-8b"), tmp_path / "out"
    shutil.copyfile(DEMO_MODEL / "tokenizer.json", model / "tokenizer.json")
    assert _import(model, "--name", "llama", "--output", out).returncode == 0
    (out / "engine").mkdir()
    (out / "engine" / "rank0.engine").write_bytes(b"hours of work")
    (out / "repository" / "old").mkdir()
    assert _import(model, "--name", "other", "--output", out).returncode == 0
    assert (out / "engine" / "rank0.engine").exists()
    assert not (out / "repository" / "old").exists()
    assert "GATEWAY_MODEL_NAME=other\n" in (out / "gateway.env").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--name", "a b"], "--name: found 'a b'; allowed: letters"),
        (["--name", "../x"], "--name: found '../x'; allowed: letters"),
        (["--name", "m", "--cpu", "--gpu", "H100"], "--gpu: not with --cpu"),
        (["--name", "m", "--cpu", "--trtllm-version", "1.0"], "--trtllm-version: not with --cpu"),
        (["--name", "m", "--cpu", "--tp", "2"], "--tp, --pp: found 2 ranks; allowed with --cpu"),
        (["--name", "m", "--tp", "3"], "--tp: found 3; allowed: divisors of 8"),
        (["--name", "m", "--output", "with space"], "with space: allowed: a path without spaces"),
        (["--name", "m", "--output", "."], ".: not empty, and not of an earlier import"),
    ],
)
def test_refusals_leave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").write_text("kept", encoding="utf-8")
    answer = _import(DEMO_MODEL, *arguments)
    assert answer.returncode == 1
    assert message in answer.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_the_tokenizer_is_needed(tmp_path: Path) -> None:
    model = write_config(tmp_path, "llama-3-8b")
    answer = _import(model, "--name", "m", "--output", tmp_path / "out")
    assert answer.returncode == 1
    assert f"{model}/tokenizer.json does not exist" in answer.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("goal", [["--cpu"], ["--gpu", "H100"]])
def test_a_place_that_cannot_be_written_is_named(tmp_path: Path, goal: list[str]) -> None:
    (tmp_path / "file").touch()
    for place in (tmp_path / "file", tmp_path / "file" / "in"):
        answer = _import(DEMO_MODEL, "--name", "m", "--output", place, *goal)
        assert answer.returncode == 1
        assert answer.stderr.startswith("gateway import: ")
        assert str(place) in answer.stderr


def test_an_architecture_that_the_cpu_executor_cannot_run(tmp_path: Path) -> None:
    model = write_config(tmp_path, "qwen2.5-0.5b")
    for name in ("tokenizer.json", "model.safetensors"):
        shutil.copyfile(DEMO_MODEL / name, model / name)
    answer = _import(model, "--name", "m", "--cpu", "--output", tmp_path / "out")
    assert answer.returncode == 1
    allowed = "allowed one of LlamaForCausalLM, GPT2LMHeadModel"
    assert f"found ['Qwen2ForCausalLM'], {allowed}" in answer.stderr


def test_what_does_not_fit_is_not_imported(tmp_path: Path) -> None:
    model = write_config(tmp_path, "llama-3-8b")
    shutil.copyfile(DEMO_MODEL / "tokenizer.json", model / "tokenizer.json")
    answer = _import(model, "--name", "m", "--gpu", "T4", "--output", tmp_path / "out")
    assert answer.returncode == 1
    assert "would fit with --tp 2" in answer.stdout
    assert not (tmp_path / "out").exists()


def test_a_release_without_engines(tmp_path: Path) -> None:
    answer = _import(DEMO_MODEL, "--name", "m", "--trtllm-version", "1.3.0")
    assert answer.returncode == 2
    assert "builds no engines" in answer.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--imported", "nowhere"], "nowhere/gateway.env: No such file or directory"),
        (["--imported", "out"], "holds no engine yet; make it with out/build_engine.sh"),
        (["--imported", "out", "--parameter", "max_queue_size=1"], "--parameter: "),
        (["--imported", "out", "--model", "x"], "not allowed with argument --imported"),
    ],
)
def test_up_refuses_what_is_not_an_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert _import(DEMO_MODEL, "--name", "out").returncode == 0
    with Up(tmp_path, "--port", "0", *arguments) as up:
        assert up.wait() in (1, 2)
        assert message in up.stderr
