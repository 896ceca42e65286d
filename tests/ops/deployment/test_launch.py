"""The composed command lines, compared with the reference launcher's argument by argument."""

from __future__ import annotations

import json
import shlex
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from ops.deployment.launch import Launch, Mode, command, count_gpus, environment
from ops.deployment.launch_checks import (
    CoreModel,
    LaunchError,
    check,
    read_core_models,
    resolve_mode,
    warnings,
)
from tests.support.commands import gateway
from tests.support.triton_server import repository_parameters
from triton_repo.llmapi_repository import render_llmapi
from triton_repo.render import render

SERVER = "/opt/tritonserver/bin/tritonserver"
PORTS = ["--grpc-port=8001", "--http-port=8000", "--metrics-port=8002"]
WORKER = ["--model-control-mode=explicit", "--load-model=tensorrt_llm"]


def _last(rank: int) -> list[str]:
    return [
        "--disable-auto-complete-config",
        f"--backend-config=python,shm-region-prefix-name=prefix{rank}_",
    ]


def _rank(*parts: str) -> list[str]:
    return ["-n", "1", SERVER, "--model-repository=/repo", *parts, ":"]


def test_one_rank() -> None:
    assert command(Launch(model_repo="/repo")) == [
        *("mpirun", "--allow-run-as-root"),
        *("-n", "1", "/opt/tritonserver/bin/tritonserver", "--model-repository=/repo"),
        *("--grpc-port=8001", "--http-port=8000", "--metrics-port=8002"),
        "--disable-auto-complete-config",
        "--backend-config=python,shm-region-prefix-name=prefix0_",
        ":",
    ]
    assert environment(Launch(model_repo="/repo")) == {}


def test_other_ranks_load_the_core_models_alone() -> None:
    launch = Launch(
        model_repo="/repo",
        world_size=3,
        core_models=("tensorrt_llm", "draft"),
        oversubscribe=True,
        log_file="/log",
        multimodal_pool=7,
    )
    worker = [*WORKER, "--load-model=draft", *PORTS]
    assert command(launch) == [
        *("mpirun", "--allow-run-as-root", "--oversubscribe"),
        *_rank(
            *("--log-verbose=3", "--log-file=/log", "--cuda-memory-pool-byte-size=0:7"),
            *(*PORTS, *_last(0)),
        ),
        *_rank(*worker, *_last(1)),
        *_rank(*worker, *_last(2)),
    ]


def test_later_releases_name_the_ports_twice() -> None:
    launch = Launch(model_repo="/repo", world_size=2, log_file="/log", release="v0.19")
    assert command(launch) == [
        *("mpirun", "--allow-run-as-root"),
        *_rank(*PORTS, "--log-verbose=3", "--log-file=/log", *PORTS, *_last(0)),
        *_rank(*PORTS, *WORKER, *PORTS, *_last(1)),
    ]


def test_without_mpirun() -> None:
    launch = Launch(model_repo="/repo", mpi=False, release="v0.19", exit_timeout=9)
    assert command(launch) == [
        *(SERVER, "--model-repository=/repo", "--exit-timeout-secs=9", *PORTS, *PORTS),
        *_last(0),
    ]


def test_an_orchestrator_that_spawns_its_workers() -> None:
    launch = Launch(model_repo="/repo", mode=Mode.SPAWN, gpus_without_pool=2)
    assert command(launch) == [
        *("mpirun", "--allow-run-as-root"),
        *_rank(
            *("--pinned-memory-pool-byte-size=0", "--enable-peer-access=false"),
            *("--cuda-memory-pool-byte-size=0:0", "--cuda-memory-pool-byte-size=1:0"),
            *(*PORTS, *_last(0)),
        ),
    ]
    assert environment(launch) == {
        "TRTLLM_ORCHESTRATOR": "1",
        "TRTLLM_ORCHESTRATOR_SPAWN_PROCESSES": "1",
    }
    old = Launch(model_repo="/repo", mode=Mode.SPAWN)
    assert command(old) == command(Launch(model_repo="/repo"))


def test_an_orchestrator_with_workers_of_this_launch() -> None:
    # The workers use the GPUs, but the reference launcher sets no pool sizes in this mode.
    launch = Launch(model_repo="/repo", mode=Mode.PRESPAWNED, world_size=2, gpus_without_pool=2)
    assert command(launch) == command(Launch(model_repo="/repo", world_size=2))
    assert environment(launch)["TRTLLM_ORCHESTRATOR_SPAWN_PROCESSES"] == "0"


@pytest.mark.parametrize(
    ("version", "gpus"),
    [("24.06", None), ("24.07", 3), ("25.01", 3), ("23.12", None), ("", None), ("dev", None)],
)
def test_gpus_count_from_triton_24_07_on(
    version: str, gpus: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\nprintf 'GPU 0: a\\nGPU 1: b\\nGPU 2: c\\n'\n", encoding="utf-8")
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert count_gpus({"NVIDIA_TRITON_SERVER_VERSION": version}) == gpus


def test_the_llm_api_starts_its_workers_itself() -> None:
    launch = Launch(model_repo="/repo", mode=Mode.LLMAPI)
    assert command(launch) == [SERVER, "--model-repository=/repo", *PORTS, *_last(0)]
    assert environment(launch) == {}


def test_or_mpirun_starts_them_and_one_rank_serves() -> None:
    launch = Launch(model_repo="/repo", mode=Mode.LLMAPI, world_size=4, oversubscribe=True)
    assert command(launch) == [
        *("mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "4"),
        *("trtllm-llmapi-launch", SERVER, "--model-repository=/repo", *PORTS, *_last(0)),
    ]


def _core(name: str = "tensorrt_llm", **facts: str | int | None) -> CoreModel:
    usual: dict[str, str | int | None] = {
        "backend": "tensorrtllm",
        "engine_dir": "/engine",
        "participants": "1,2",
        "world_size": 2,
    }
    return CoreModel(name, **(usual | facts))  # type: ignore[arg-type]


def test_what_works_is_not_refused() -> None:
    two = {"model_repo": "/repo", "world_size": 2}
    check(Launch(**two), [_core()])  # type: ignore[arg-type]
    check(Launch(**two), [_core(world_size=None)])  # type: ignore[arg-type]
    check(Launch(model_repo="/repo", mode=Mode.SPAWN), [_core(backend="python"), _core("b")])
    check(
        Launch(model_repo="/repo", mode=Mode.PRESPAWNED, world_size=5),
        [_core(), _core("b", participants="3,4")],
    )


@pytest.mark.parametrize(
    ("options", "model", "expected"),
    [
        ({"world_size": 0}, {"world_size": None}, "--world-size: found 0, allowed 1 or more"),
        ({"world_size": 2, "mode": Mode.SPAWN}, {}, "allowed with --multi-model: 1"),
        ({"world_size": 2, "mpi": False}, {}, "--world-size: found 2, allowed with --no-mpi: 1"),
        ({"mpi": False, "oversubscribe": True}, {"world_size": 1}, "--oversubscribe: it is an"),
        ({"http_port": 8001, "world_size": 2}, {}, "--http-port, --grpc-port, --metrics-port"),
        ({"exit_timeout": 0, "world_size": 2}, {}, "--exit-timeout: found 0"),
        ({"multimodal_pool": -1, "world_size": 2}, {}, "pool-bytes: found -1"),
        ({"world_size": 4}, {}, "--world-size: found 4, allowed 2: the engine /engine of"),
        (
            {"world_size": 3, "mode": Mode.PRESPAWNED},
            {"backend": "python"},
            "--disable-spawn-processes: tensorrt_llm has the backend python",
        ),
        (
            {"world_size": 3, "mode": Mode.PRESPAWNED},
            {"participants": ""},
            "--disable-spawn-processes: tensorrt_llm has no parameter participant_ids",
        ),
        (
            {"world_size": 2, "mode": Mode.PRESPAWNED},
            {},
            "--world-size: found 2, allowed 3: the orchestrator and the engines' ranks "
            "(tensorrt_llm 2)",
        ),
    ],
)
def test_what_cannot_work_is_refused_by_name(
    options: dict[str, object], model: dict[str, str | int | None], expected: str
) -> None:
    with pytest.raises(LaunchError) as refused:
        check(Launch(model_repo="/repo", **options), [_core(**model)])  # type: ignore[arg-type]
    assert expected in str(refused.value)
    assert "\n" not in str(refused.value)


def _llmapi(**facts: int) -> CoreModel:
    return replace(_core(world_size=2), is_llmapi=True, **facts)  # type: ignore[arg-type]


def test_the_llmapi_repository_makes_the_mode() -> None:
    launch = Launch(model_repo="/repo")
    assert resolve_mode(launch, [_core()], is_llmapi=False) == launch
    for models, is_llmapi in (([_llmapi()], False), ([_llmapi()], True), ([], True)):
        assert resolve_mode(launch, models, is_llmapi=is_llmapi).mode == Mode.LLMAPI
    for world_size in (1, 2):
        check(Launch(model_repo="/repo", mode=Mode.LLMAPI, world_size=world_size), [_llmapi()])
    check(Launch(model_repo="/repo", mode=Mode.LLMAPI), [_llmapi(instances=2)])


@pytest.mark.parametrize(
    ("models", "options", "is_llmapi", "expected"),
    [
        ([_llmapi(), _core("b")], {}, False, "models of the llmapi repository and others"),
        ([_core()], {}, True, "--llmapi: tensorrt_llm is not a model of the llmapi repository"),
        ([_llmapi()], {"mode": Mode.SPAWN}, False, "--multi-model: not with the llmapi repository"),
        ([_llmapi()], {"world_size": 4}, False, "--world-size: found 4, allowed 2: model.yaml of"),
        ([_llmapi(instances=2)], {"world_size": 2}, False, "has 2 instances, which start their"),
        ([_llmapi()], {"oversubscribe": True}, False, "--oversubscribe: it is an option of mpirun"),
    ],
)
def test_what_the_llmapi_repository_cannot_is_refused_by_name(
    models: list[CoreModel], options: dict[str, object], is_llmapi: bool, expected: str
) -> None:
    launch = Launch(model_repo="/repo", **options)  # type: ignore[arg-type]
    with pytest.raises(LaunchError, match=expected):
        check(resolve_mode(launch, models, is_llmapi=is_llmapi), models)


def test_a_source_tree_here_would_be_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    launch = Launch(model_repo="/repo", mode=Mode.LLMAPI)
    (tmp_path / "tensorrt_llm").mkdir()
    check(launch, [_llmapi()])  # an installed package precedes a folder without __init__.py
    (tmp_path / "tensorrt_llm" / "__init__.py").touch()
    with pytest.raises(LaunchError, match="tensorrt_llm: Python would import it"):
        check(launch, [_llmapi()])


@pytest.mark.parametrize(("installed", "warned"), [("1.107.3", True), ("1.107.10", False)])
def test_an_openai_too_old_for_tensorrt_llm_is_told(
    installed: str, warned: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = Launch(model_repo="/repo", mode=Mode.LLMAPI)
    assert warnings(launch) == []  # TensorRT-LLM is not installed
    for name, version in (("tensorrt_llm", "1.2.1"), ("openai", installed)):
        folder = tmp_path / f"{name}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert [text.startswith("openai 1.107.3 is here") for text in warnings(launch)] == (
        [True] if warned else []
    )
    assert warnings(Launch(model_repo="/repo")) == []


def test_a_dry_run_of_the_llmapi_repository(tmp_path: Path) -> None:
    render_llmapi(tmp_path, {"model": "/models/llama", "tensor_parallel_size": 2})
    answer = gateway("triton", "launch", "--model-repo", tmp_path, "--dry-run")
    assert shlex.split(answer.stdout.replace("\\\n", "")) == [
        *(SERVER, f"--model-repository={tmp_path}", *PORTS, *_last(0)),
    ]
    by_mpi = gateway("triton", "launch", "--model-repo", tmp_path, "--dry-run", "--world-size", 2)
    assert "-n 2 trtllm-llmapi-launch /opt" in by_mpi.stdout
    (tmp_path / "tensorrt_llm" / "1" / "model.yaml").write_text("model: ]")
    broken = gateway("triton", "launch", "--model-repo", tmp_path, "--dry-run")
    assert broken.returncode == 2
    assert "model.yaml:1: not YAML" in broken.stderr


def test_the_engine_says_how_many_ranks_it_has(tmp_path: Path) -> None:
    _repository(tmp_path, world_size=4)
    launch = Launch(model_repo=str(tmp_path / "repository"), core_models=("tensorrt_llm",))
    (model,) = read_core_models(launch)
    assert (model.backend, model.participants, model.world_size) == ("python", "", 4)
    assert model.engine_dir == str(tmp_path / "engine")
    with pytest.raises(LaunchError, match="allowed 4: the engine"):
        check(launch, [model])


def _repository(folder: Path, world_size: int) -> None:
    render(folder / "repository", repository_parameters(folder))
    engine = {"pretrained_config": {"mapping": {"world_size": world_size}}, "build_config": {}}
    (folder / "engine").mkdir()
    (folder / "engine" / "config.json").write_text(json.dumps(engine), encoding="utf-8")


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ops", "triton", "launch", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_a_dry_run_takes_the_reference_launchers_spelling(tmp_path: Path) -> None:
    _repository(tmp_path, world_size=1)
    repository = str(tmp_path / "repository")
    answer = _run(
        *("--model_repo", repository, "--world_size=1", "--tensorrt_llm_model_name=tensorrt_llm"),
        *("--grpc_port", "1", "--http_port", "2", "--metrics_port", "3", "--exit_timeout", "4"),
        *("--multi-model", "--tritonserver", "/a b/tritonserver", "--dry-run", "-f"),
        *("--multimodal_gpu0_cuda_mem_pool_bytes", "5", "--log", "--log-file", "/log"),
    )
    assert answer.returncode == 0, answer.stderr
    assert shlex.split(answer.stdout.replace("\\\n", "")) == [
        *("TRTLLM_ORCHESTRATOR=1", "TRTLLM_ORCHESTRATOR_SPAWN_PROCESSES=1"),
        *("mpirun", "--allow-run-as-root", "-n", "1", "/a b/tritonserver"),
        *(f"--model-repository={repository}", "--exit-timeout-secs=4"),
        *("--log-verbose=3", "--log-file=/log", "--cuda-memory-pool-byte-size=0:5"),
        *("--grpc-port=1", "--http-port=2", "--metrics-port=3"),
        *(*_last(0), ":"),
    ]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--tensorrt-llm-model-name", "none"], "none/config.pbtxt cannot be read: No such file"),
        (["--disable-spawn-processes"], "--disable-spawn-processes: it needs --multi-model"),
        (["--log-file", "x"], "--log-file: it needs --log"),
        (["--nodes", "2"], "--nodes: it needs --slurm"),
        (["--output", "x"], "--output: it needs --slurm"),
        (["--slurm", "--no-mpi"], "with --slurm there is no mpirun"),
        (["--slurm", "--world-size", "3"], "--world-size: found 3, allowed 8"),
        (["--slurm", "--gpus-per-node", "1", "--multi-model"], "--multi-model: with --slurm"),
        (["--grpc-port", "0"], "--grpc-port/--grpc_port: found '0', allowed 1 to 65535"),
    ],
)
def test_the_command_refuses_with_exit_code_2(
    arguments: list[str], expected: str, tmp_path: Path
) -> None:
    _repository(tmp_path, world_size=1)
    answer = _run("--model-repo", str(tmp_path / "repository"), "--dry-run", *arguments)
    assert answer.returncode == 2
    assert expected in answer.stderr
    assert not answer.stdout
