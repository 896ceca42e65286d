"""Reader of a model repository on disk."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gateway.triton.pbtxt import ModelFile, PbtxtError, read_pbtxt
from ops.deployment.check_engine import Values
from ops.deployment.llmapi_yaml import MODEL_YAML

CONFIG = "config.pbtxt"
# Parameters of config.pbtxt (keys) whose template parameter (value) has another name.
_TEMPLATE_NAMES = {
    "gpt_model_type": "batching_strategy",
    "gpt_model_path": "engine_dir",
    "encoder_model_path": "encoder_engine_dir",
}
_UNKNOWN_TYPE = "TYPE_INVALID"


class RepositoryError(ValueError):
    """The folder is not a model repository, or an option applies to none of its models."""


@dataclass(frozen=True, slots=True)
class RepositoryModel:
    """A model, which is one folder of the repository.

    `file` is the parsed config.pbtxt. If config.pbtxt cannot be used, `file` is None, and `problem`
    is the reason.
    """

    name: str
    path: Path
    file: ModelFile | None
    problem: str = ""

    @property
    def runs_engine(self) -> bool:
        """True for a core model, which takes token ids: `tensorrt_llm` or a draft model."""
        return self.file is not None and {"input_ids", "request_output_len"} <= (
            self.file.inputs.keys()
        )

    @property
    def is_gpt(self) -> bool:
        """True for the model of the GPT repository that runs the engine.

        The model's config.pbtxt has the engine's folder in the parameter `engine_dir`. Other
        repositories name the parameter `gpt_model_path`.
        """
        return self.runs_engine and self.file is not None and "engine_dir" in self.file.parameters

    @property
    def is_llmapi(self) -> bool:
        """True for the llmapi repository's model, which runs both tokenizer and engine."""
        if self.file is None or self.runs_engine:
            return False
        # Also accept a model with a model.yaml, because other releases of TensorRT-LLM may have
        # other input names.
        return {"text_input", "sampling_param_max_tokens"} <= self.file.inputs.keys() or any(
            (version / MODEL_YAML).is_file() for version in self.versions
        )

    @property
    def engine_dir(self) -> str:
        """Path of the engine's folder in the model's config.pbtxt; "" if unset."""
        return self.parameter("engine_dir" if self.is_gpt else "gpt_model_path")

    @property
    def versions(self) -> list[Path]:
        """The model's version folders, such as `1`, in ascending order of their numbers."""
        found = [path for path in self.path.iterdir() if path.is_dir() and path.name.isdecimal()]
        return sorted((path for path in found if int(path.name) > 0), key=lambda p: int(p.name))

    def parameter(self, name: str) -> str:
        """Return a string parameter; "" if it is missing, empty, or an unfilled `${...}`."""
        value = "" if self.file is None else self.file.parameters.get(name, "")
        return "" if value.startswith("${") else value

    @property
    def unset_parameters(self) -> list[str]:
        """Names of the parameters whose value is still an unfilled placeholder `${...}`."""
        parameters = {} if self.file is None else self.file.parameters
        return sorted(name for name, value in parameters.items() if value.startswith("${"))

    def values(self) -> Values:
        """Return the settings in the model's config.pbtxt, by the template parameters' names.

        The model must be one that runs an engine.
        """
        if self.file is None:
            return {}
        values = {template_name(name): self.parameter(name) for name in self.file.parameters}
        logits = self.file.outputs.get("generation_logits")
        lora = self.file.inputs.get("lora_weights")
        values |= {
            "triton_backend": self.file.backend,
            # Do not check max_batch_size of the GPT repository. It may exceed the engine's limit:
            # the engine then starts the rows above its limit later.
            "triton_max_batch_size": "" if self.is_gpt else str(self.file.max_batch_size),
            "decoupled_mode": str(self.file.decoupled).lower(),
            "logits_datatype": logits.data_type if logits else "",
            "lora_weights_data_type": lora.data_type if lora else "",
        }
        return {name: value for name, value in values.items() if value and value != _UNKNOWN_TYPE}


@dataclass(frozen=True, slots=True)
class LocalFolders:
    """Paths of the engine's and the tokenizer's folder on this machine, where the checks run.

    A path is None if the path in config.pbtxt is valid on this machine, too.
    """

    engine_dir: Path | None = None
    tokenizer_dir: Path | None = None

    def engine(self, core: RepositoryModel) -> Path | None:
        """Return the engine's folder on this machine, or None if config.pbtxt has no folder."""
        if self.engine_dir is not None:
            return self.engine_dir
        return Path(core.engine_dir) if core.engine_dir else None


@dataclass(frozen=True, slots=True)
class Repository:
    """A model repository: its path, and its models by the names of their folders."""

    path: Path
    models: Mapping[str, RepositoryModel]

    @property
    def cores(self) -> list[RepositoryModel]:
        return [model for model in self.models.values() if model.runs_engine]

    @property
    def llmapi_models(self) -> list[RepositoryModel]:
        return [model for model in self.models.values() if model.is_llmapi]

    @property
    def ensembles(self) -> list[RepositoryModel]:
        return [model for model in self.models.values() if model.file and model.file.steps]

    @property
    def bls_models(self) -> list[RepositoryModel]:
        """The text models that call other models from Python (BLS)."""
        return [
            model
            for model in self.models.values()
            if model.file
            and not model.file.steps
            and not model.is_llmapi
            and {"text_input", "max_tokens"} <= model.file.inputs.keys()
        ]


def template_name(parameter: str) -> str:
    """Return the template parameter whose value becomes `parameter` in a config.pbtxt."""
    return _TEMPLATE_NAMES.get(parameter, parameter)


def read_repository(path: Path) -> Repository:
    """Read a model repository. Each folder in `path` is a model, except hidden folders.

    Raises RepositoryError if no folder in `path` has a config.pbtxt.
    """
    if not path.is_dir():
        raise RepositoryError(f"{path}: no such folder")
    folders = sorted(
        folder for folder in path.iterdir() if folder.is_dir() and not folder.name.startswith(".")
    )
    if not any((folder / CONFIG).is_file() for folder in folders):
        raise RepositoryError(f"{path}: no folder in it has a {CONFIG}")
    return Repository(path, {folder.name: _read_model(folder) for folder in folders})


def _read_model(folder: Path) -> RepositoryModel:
    if not (folder / CONFIG).is_file():
        return RepositoryModel(folder.name, folder, None, "the file is missing")
    try:
        return RepositoryModel(folder.name, folder, read_pbtxt(folder / CONFIG))
    except PbtxtError as error:
        return RepositoryModel(folder.name, folder, None, str(error))
