"""Checks of a launch before its processes are started."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from adapters.config_json import ConfigError
from adapters.engine_config import read_engine_config
from gateway.triton.pbtxt import PbtxtError, read_pbtxt
from ops.deployment.check_repository import RepositoryModel
from ops.deployment.launch import Launch, Mode
from ops.deployment.llmapi_yaml import LlmapiYamlError, read_llmapi_yaml

# Version of the openai package in Triton's container 26.07. TensorRT-LLM 1.2 cannot be imported
# with this version or an older one.
_OLD_OPENAI = (1, 107, 3)


class LaunchError(ValueError):
    """The launch cannot work. The message has one line per problem."""


@dataclass(frozen=True)
class CoreModel:
    """The properties of a model with an engine that determine which ranks to start.

    The properties are read from the model's config.pbtxt, and from the engine's config.json or, in
    the llmapi repository, from model.yaml.

    Attributes:
        backend: `python` or `tensorrtllm`.
        engine_dir: the engine's folder in config.pbtxt; "" for the llmapi repository.
        participants: value of the parameter participant_ids, the ranks of the model's workers; ""
            if unset.
        world_size: number of the engine's ranks; None if config.json cannot be read here.
        is_llmapi: True for the llmapi repository's model, which runs its engine itself.
        instances: number of engines that an llmapi model runs.
    """

    name: str
    backend: str
    engine_dir: str
    participants: str
    world_size: int | None
    is_llmapi: bool = False
    instances: int = 1


def read_core_models(launch: Launch, llm_config: str | None = None) -> list[CoreModel]:
    """Return the properties of the models in `launch.core_models`, which have an engine.

    `llm_config` is the value of LLM_CONFIG_PATH in Triton's environment.

    Raises LaunchError if the config.pbtxt or model.yaml of a model is missing or wrong.
    """
    found, problems = [], []
    for name in launch.core_models:
        path = Path(launch.model_repo) / name / "config.pbtxt"
        try:
            found.append(_read(name, path, llm_config))
        except LlmapiYamlError as error:
            problems.append(f"--tensorrt-llm-model-name: {name}: {error}")
        except PbtxtError as error:
            problems.append(f"--tensorrt-llm-model-name: {name}: {path} cannot be read: {error}")
    if problems:
        raise LaunchError("\n".join(problems))
    return found


def resolve_mode(launch: Launch, models: Sequence[CoreModel], *, is_llmapi: bool) -> Launch:
    """Return `launch`, with the mode `Mode.LLMAPI` if its models are from the llmapi repository.

    Args:
        launch: the launch, in the mode that the options select.
        models: the models with an engine; empty if they cannot be read on this machine.
        is_llmapi: True if the option --llmapi is given. Used only if `models` is empty.

    Raises LaunchError if the models contradict an option or each other.
    """
    kinds = {model.is_llmapi for model in models} or {is_llmapi}
    if len(kinds) > 1:
        raise LaunchError(
            "--tensorrt-llm-model-name: models of the llmapi repository and others: start each "
            "kind in a Triton of its own"
        )
    if is_llmapi and True not in kinds:
        raise LaunchError(f"--llmapi: {models[0].name} is not a model of the llmapi repository")
    if False in kinds:
        return launch
    if launch.mode != Mode.LEADER:
        raise LaunchError(
            "--multi-model: not with the llmapi repository, which has no orchestrator; several "
            "engines are instances of its model, with gpu_device_ids, or Tritons of their own"
        )
    return replace(launch, mode=Mode.LLMAPI)


def warnings(launch: Launch) -> list[str]:
    """Return warnings about packages on this machine that may prevent a model from loading."""
    if launch.mode != Mode.LLMAPI:
        return []
    try:
        version("tensorrt_llm")
        openai = version("openai")
    except PackageNotFoundError:
        return []
    numbers = tuple(int(part) for part in openai.split(".") if part.isdecimal())
    if numbers > _OLD_OPENAI:
        return []
    return [
        f"openai {openai} is here, with which TensorRT-LLM 1.2's import fails in NVIDIA's "
        "containers: put a newer one in front of it, by PYTHONPATH"
    ]


def check(launch: Launch, models: Sequence[CoreModel]) -> None:
    """Raise LaunchError if the launch cannot work.

    The message lists all wrong options with reasons.
    """
    if problems := [*_option_problems(launch), *_model_problems(launch, models)]:
        raise LaunchError("\n".join(problems))


def _option_problems(launch: Launch) -> list[str]:
    size = launch.world_size
    ports = (launch.http_port, launch.grpc_port, launch.metrics_port)
    problems = {
        f"--world-size: found {size}, allowed 1 or more": size < 1,
        f"--world-size: found {size}, allowed with --multi-model: 1, since the orchestrator starts "
        "the workers itself; or add --disable-spawn-processes": launch.mode == Mode.SPAWN
        and size > 1,
        f"--world-size: found {size}, allowed with --no-mpi: 1": not launch.mpi and size > 1,
        "--oversubscribe: it is an option of mpirun, which --no-mpi leaves out": not launch.mpi
        and launch.oversubscribe,
        f"--exit-timeout: found {launch.exit_timeout}, allowed 1 or more": (
            launch.exit_timeout is not None and launch.exit_timeout < 1
        ),
        f"--multimodal-gpu0-cuda-mem-pool-bytes: found {launch.multimodal_pool}, allowed 0 or "
        "more": launch.multimodal_pool < 0,
        f"--http-port, --grpc-port, --metrics-port: found {ports}, allowed: three different": (
            len(set(ports)) < 3
        ),
    }
    return [text for text, is_wrong in problems.items() if is_wrong]


def _llmapi_problems(launch: Launch, models: Sequence[CoreModel], here: Path) -> list[str]:
    problems = []
    if launch.oversubscribe and launch.world_size == 1 and launch.mpi:
        problems.append(
            "--oversubscribe: it is an option of mpirun, and the LLM API starts its workers "
            "itself; with --world-size mpirun starts them"
        )
    # Refuse to start in a folder with a package tensorrt_llm. Python searches the working directory
    # first, so the engine's workers would import that package.
    if (package := here / "tensorrt_llm" / "__init__.py").exists():
        problems.append(
            f"{package.parent}: Python would import it in place of TensorRT-LLM; start from "
            "another folder"
        )
    for model in models:
        if model.instances > 1 and launch.world_size > 1:
            problems.append(
                f"--world-size: found {launch.world_size}; {model.name} has {model.instances} "
                "instances, which start their workers themselves, and MPI does not let them: leave "
                "--world-size (and --slurm) out"
            )
        elif launch.world_size not in (1, model.world_size):
            problems.append(
                f"--world-size: found {launch.world_size}, allowed {model.world_size}: model.yaml "
                f"of {model.name} has so many ranks (tensor_parallel_size times "
                "pipeline_parallel_size)"
            )
    return problems


def _model_problems(launch: Launch, models: Sequence[CoreModel]) -> list[str]:
    if launch.mode == Mode.LLMAPI:
        return _llmapi_problems(launch, models, Path.cwd())
    if launch.mode == Mode.LEADER:
        return [
            f"--world-size: found {launch.world_size}, allowed {model.world_size}: the engine "
            f"{model.engine_dir} of {model.name} has so many ranks"
            for model in models
            if model.world_size not in (None, launch.world_size)
        ]
    if launch.mode == Mode.SPAWN:
        return []
    problems = []
    for model in models:
        if model.backend == "python":
            problems.append(
                f"--disable-spawn-processes: {model.name} has the backend python, which cannot "
                "use workers that were started for it; allowed: the backend tensorrtllm"
            )
        if not model.participants:
            problems.append(
                f"--disable-spawn-processes: {model.name} has no parameter participant_ids, "
                "which names the ranks of its workers"
            )
    sizes = [model.world_size for model in models if model.world_size is not None]
    if len(sizes) == len(models) and launch.world_size != 1 + sum(sizes):
        each = ", ".join(f"{model.name} {model.world_size}" for model in models)
        problems.append(
            f"--world-size: found {launch.world_size}, allowed {1 + sum(sizes)}: the "
            f"orchestrator and the engines' ranks ({each})"
        )
    return problems


def _read(name: str, path: Path, llm_config: str | None) -> CoreModel:
    model = read_pbtxt(path)
    found = RepositoryModel(name, path.parent, model)
    if found.is_llmapi and found.versions:
        return CoreModel(
            name=name,
            backend=model.backend,
            engine_dir="",
            participants="",
            world_size=read_llmapi_yaml(found.versions[-1], llm_config).world_size,
            is_llmapi=True,
            instances=model.instance_count,
        )
    # Try both names of the parameter with the engine's folder: it is engine_dir in the GPT
    # repository, and gpt_model_path in inflight_batcher_llm.
    engine_dir = _get_parameter(model.parameters, "gpt_model_path") or _get_parameter(
        model.parameters, "engine_dir"
    )
    try:
        world_size = read_engine_config(Path(engine_dir)).world_size if engine_dir else None
    # Ignore the error: with Slurm, the engine may be readable only on the machines that run the
    # ranks. If these machines cannot read the engine either, the ranks report the error.
    except ConfigError:
        world_size = None
    return CoreModel(
        name=name,
        backend=model.backend,
        engine_dir=engine_dir,
        participants=_get_parameter(model.parameters, "participant_ids"),
        world_size=world_size,
    )


def _get_parameter(parameters: Mapping[str, str], name: str) -> str:
    """Return a parameter's value; "" if it is unset or an unfilled placeholder `${...}`."""
    value = parameters.get(name, "")
    return "" if value.startswith("${") else value
