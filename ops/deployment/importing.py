"""Import of a Hugging Face folder: engine, model repository and gateway settings.

An import writes these files into one folder:

    build_engine.sh: the commands that build the engine on a machine with TensorRT-LLM. Not written
        for the CPU executor, whose engine is built immediately.
    engine/: the engine.
    repository/: the model repository for Triton.
    gateway.env: the gateway's settings, NAME=VALUE lines for a shell, Docker or systemd.

An import for the llmapi repository has neither engine nor script.
"""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adapters.model_files import is_incomplete, tokenizer_problems, weight_problems
from gateway.config.settings import Settings
from ops.deployment import repository
from ops.deployment.checkpoint import Checkpoint
from ops.deployment.engine_plan import EnginePlan, shell_lines, template_parameters
from ops.deployment.intent import Intent, planned_engine
from ops.deployment.llmapi_plan import LLMAPI, llmapi_parameters, llmapi_settings
from ops.deployment.llmapi_repository import write_llmapi
from ops.deployment.memory import kv_bytes_per_token, largest_request
from ops.deployment.release import OLDEST_TEMPLATES, parse_release
from triton_repo.parameters import CORE, MODELS

ENV_FILE = "gateway.env"
REPOSITORY = "repository"
BUILD_SCRIPT = "build_engine.sh"
_TOKENIZER = "tokenizer.json"
_TRITON_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]*")
# Size of a value in the CPU executor's KV cache, which is float32, and the maximum size of this
# cache. The cache exceeds the maximum only if a single request needs more.
_CPU_KV_ITEM_BYTES = 4
_CPU_KV_BYTES = 400_000_000


class ImportingError(ValueError):
    """The model cannot be imported. The message has one line per problem."""


@dataclass(frozen=True, slots=True)
class ImportedModel:
    """An imported model.

    Attributes:
        name: the model's name for clients.
        tokenizer_dir: the Hugging Face folder.
        folder: the folder with the files that the import wrote.
        max_seq_len: limit of prompt plus output in tokens. Set only for the llmapi repository,
            which has no engine to read the limit from.
        triton_name: the name that the model with the engine has in Triton.
    """

    name: str
    tokenizer_dir: Path
    folder: Path
    max_seq_len: int | None = None
    triton_name: str = CORE

    @property
    def own_triton_name(self) -> str | None:
        """Name that the model with the engine has in Triton; None for the default name."""
        return None if self.triton_name == CORE else self.triton_name

    @property
    def engine_dir(self) -> Path:
        return self.folder / "engine"

    @property
    def repository(self) -> Path:
        return self.folder / REPOSITORY


def import_for_gpu(
    plan: EnginePlan, name: str, folder: Path, release: str, triton_name: str = CORE
) -> ImportedModel:
    """Write the repository, the settings, and the script that builds the engine.

    An engine from an earlier import is not removed.

    Args:
        plan: the engine's plan.
        name: the model's name for clients.
        folder: folder to write into.
        release: the TensorRT-LLM release, or the container's tag, that serves the repository.
        triton_name: the name that the model with the engine gets in Triton.

    Raises ImportingError before anything is written.
    """
    imported = _validate(plan.checkpoint, name, folder, triton_name, on_cpu=False)
    fields: dict[str, Any] = {"engine_dir": plan.engine_dir, "triton_backend": "tensorrtllm"}
    if plan.tokenizer_info is not None:
        fields["guided_decoding_backend"] = "xgrammar"
        fields["xgrammar_tokenizer_info_path"] = plan.tokenizer_info
    engine = planned_engine(plan.checkpoint, plan.intent, plan.release)
    try:
        description = _description(imported, fields, template_parameters(plan), release)
        repository.template_parameters(description, engine)
        _clear_outputs(imported, plan.intent)
        repository.write(description, imported.repository, engine, triton_name)
    except repository.DescriptionError as error:
        raise ImportingError(str(error)) from error
    script = imported.folder / BUILD_SCRIPT
    commands = "\n\n".join(f"# {step.name}\n{shell_lines(step)}" for step in plan.steps)
    script.write_text(f"#!/bin/sh\nset -eu\n\n{commands}\n", encoding="utf-8")
    script.chmod(0o755)
    return imported


def import_for_cpu(
    plan: EnginePlan, name: str, folder: Path, release: str, triton_name: str = CORE
) -> ImportedModel:
    """Write the repository and the settings, and build an engine for the CPU executor.

    Arguments are those of `import_for_gpu`. The steps of `plan` are not used.

    Raises ImportingError for wrong arguments before anything is written. Raises it, too, if writing
    the engine or the repository fails, for example because the weights cannot be read. Files may
    then be incomplete.
    """
    # Import here: the other commands start faster without numpy.
    from triton_repo.cpu_executor import engine as cpu_engine  # noqa: PLC0415

    checkpoint, intent = plan.checkpoint, plan.intent
    imported = _validate(checkpoint, name, folder, triton_name, on_cpu=True)
    _refuse_ranks(intent)
    fields: dict[str, Any] = {"engine_dir": imported.engine_dir, "triton_backend": "python"}
    fields["max_tokens_in_paged_kv_cache"] = _cpu_kv_tokens(checkpoint, intent)
    if intent.guided_decoding:
        fields["guided_decoding_backend"] = "xgrammar"
    try:
        description = _description(imported, fields, template_parameters(plan), release)
        repository.template_parameters(
            description, planned_engine(checkpoint, intent, plan.release)
        )
        _clear_outputs(imported, intent)
        cpu_engine.build(
            checkpoint.folder,
            imported.engine_dir,
            dtype=intent.dtype,
            max_batch_size=intent.max_batch_size,
            max_input_len=intent.max_input_len,
            max_seq_len=intent.max_seq_len,
            max_num_tokens=intent.max_num_tokens,
            max_beam_width=intent.max_beam_width,
            gather_context_logits=intent.gather_context_logits,
            gather_generation_logits=intent.gather_generation_logits,
            lora_target_modules=intent.lora_modules,
            max_lora_rank=intent.max_lora_rank,
        )
        repository.write(description, imported.repository, core_name=triton_name)
    except (OSError, ValueError) as error:
        raise ImportingError(str(error)) from error
    return imported


def import_llmapi(
    plan: EnginePlan, name: str, folder: Path, triton_name: str = CORE, *, on_cpu: bool
) -> ImportedModel:
    """Write settings and an llmapi repository that serves the Hugging Face folder of `plan`.

    Args:
        plan: the plan for the model, without build commands, because no engine is built.
        name: the model's name for clients.
        folder: folder to write into.
        triton_name: the name that the repository's model gets in Triton.
        on_cpu: True to serve with the CPU executor.

    Raises ImportingError before anything is written.
    """
    imported = _validate(plan.checkpoint, name, folder, triton_name, on_cpu=on_cpu)
    values = llmapi_parameters(plan)
    if on_cpu:
        # Import here: the other commands start faster without numpy.
        from triton_repo.cpu_executor.engine import load_config  # noqa: PLC0415

        try:
            load_config(plan.checkpoint.folder)
        except ValueError as error:
            raise ImportingError(str(error)) from error
        _refuse_ranks(plan.intent)
        values["max_tokens_in_kv_cache"] = _cpu_kv_tokens(plan.checkpoint, plan.intent)
    _clear_outputs(imported, plan.intent, llmapi_settings(plan.intent))
    fields = {"model": str(imported.tokenizer_dir), "parameters": values}
    write_llmapi(fields, imported.repository, triton_name)
    return imported


def read_imported(folder: Path) -> ImportedModel:
    """Return the model that was imported into `folder`.

    Raises ImportingError if there is no import in `folder`, or the import has no engine yet.
    """
    path = folder / ENV_FILE
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ImportingError(
            f"{path}: {error.strerror}; name a folder that `gateway import` made"
        ) from error
    values = dict(line.split("=", 1) for line in lines if "=" in line and line[0] != "#")
    missing = [
        name for name in ("GATEWAY_MODEL_NAME", "GATEWAY_TOKENIZER_DIR") if not values.get(name)
    ]
    if missing:
        raise ImportingError(f"{path}: {', '.join(missing)}: not there")
    is_llmapi = values.get("GATEWAY_TRITON_MODE") == LLMAPI
    imported = ImportedModel(
        *(values["GATEWAY_MODEL_NAME"], Path(values["GATEWAY_TOKENIZER_DIR"]), folder.absolute()),
        int(values["GATEWAY_MAX_SEQ_LEN"]) if is_llmapi else None,
        values.get("GATEWAY_TRITON_MODEL", CORE),
    )
    if not is_llmapi and not (imported.engine_dir / "config.json").exists():
        raise ImportingError(
            f"{imported.engine_dir} holds no engine yet; make it with {folder / BUILD_SCRIPT}"
        )
    return imported


def _validate(
    checkpoint: Checkpoint, name: str, folder: Path, triton_name: str, *, on_cpu: bool
) -> ImportedModel:
    folders = (checkpoint.folder.absolute(), folder.absolute())
    imported = ImportedModel(name, *folders, triton_name=triton_name)
    problems = []
    if not _NAME.fullmatch(name):
        problems.append(f"--name: found {name!r}; allowed: letters, digits and ._/-")
    others = [model for model in MODELS if model != CORE]
    if not _TRITON_NAME.fullmatch(triton_name) or triton_name in others:
        problems.append(
            f"--triton-name: found {triton_name!r}; allowed: letters, digits and ._-, and none of "
            f"{', '.join(others)}"
        )
    if not (checkpoint.folder / _TOKENIZER).exists():
        problems.append(
            f"{checkpoint.folder / _TOKENIZER} does not exist; download the model's tokenizer, too"
        )
    problems += map(str, tokenizer_problems(checkpoint.folder))
    # For a GPU, accept a folder without any weights: operators may download them later.
    if on_cpu or is_incomplete(checkpoint.folder):
        problems += map(str, weight_problems(checkpoint.folder))
    problems += [
        f"{path}: allowed: a path without spaces and quotes"
        for path in (imported.tokenizer_dir, imported.folder)
        # Refuse paths that need quotes: shell, Docker and systemd parse quotes differently.
        if shlex.quote(str(path)) != str(path)
    ]
    if folder.exists() and not (folder / ENV_FILE).exists() and any(folder.iterdir()):
        problems.append(f"{folder}: not empty, and not of an earlier import")
    if problems:
        raise ImportingError("\n".join(problems))
    return imported


def _refuse_ranks(intent: Intent) -> None:
    if (ranks := intent.tp * intent.pp) > 1:
        raise ImportingError(f"--tp, --pp: found {ranks} ranks; allowed with --cpu: 1")


def _clear_outputs(
    imported: ImportedModel, intent: Intent, more: Mapping[str, str] | None = None
) -> None:
    """Remove the model repository of an earlier import, and write the settings to gateway.env.

    Later commands recognize the folder of an import by its gateway.env.
    """
    imported.folder.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(imported.repository, ignore_errors=True)
    _write_settings(imported, intent, more or {})


def _description(
    imported: ImportedModel, fields: Mapping[str, Any], parameters: Mapping[str, Any], release: str
) -> repository.DeploymentDescription:
    own = {"tokenizer_dir": imported.tokenizer_dir, "release": _rendered_release(release)}
    return repository.from_fields({**parameters, **fields, **own})


def _rendered_release(release: str) -> str:
    """Return the release whose templates are rendered.

    If `release` is older than all releases with templates, the oldest of these is returned.
    """
    return release if parse_release(release) >= OLDEST_TEMPLATES else str(OLDEST_TEMPLATES)


def _cpu_kv_tokens(checkpoint: Checkpoint, intent: Intent) -> int:
    affordable = _CPU_KV_BYTES // kv_bytes_per_token(checkpoint, intent, _CPU_KV_ITEM_BYTES)
    tokens = intent.max_batch_size * largest_request(intent)
    return max(largest_request(intent), min(tokens, affordable))


def _write_settings(imported: ImportedModel, intent: Intent, more: Mapping[str, str]) -> None:
    """Write gateway.env with the settings of the import and those in `more`.

    A setting in `more` with the value "" is written as a comment, which the operator completes.
    """
    values = {
        "model_name": imported.name,
        "tokenizer_dir": str(imported.tokenizer_dir),
        "triton_grpc": "127.0.0.1:8001",
        **({"triton_model": imported.own_triton_name} if imported.own_triton_name else {}),
        "max_seq_len": str(intent.max_seq_len),
        "store_dir": str(imported.folder / "adapters"),
        **more,
    }
    lines = [f"# Settings of `gateway serve` for {imported.name}. Other ones may be added."]
    for name, value in values.items():
        lines += ["", f"# {Settings.model_fields[name].description}"]
        lines.append(f"{'' if value else '#'}GATEWAY_{name.upper()}={value}")
    (imported.folder / ENV_FILE).write_text("\n".join(lines) + "\n", encoding="utf-8")
