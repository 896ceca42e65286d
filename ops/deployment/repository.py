"""Renderer of a model repository from a description and the engine's config.json."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from adapters.config_json import ConfigError
from adapters.engine_config import EngineConfig, read_engine_config
from gateway.config.marked_yaml import MarkedYaml, YamlProblem
from ops.deployment.check_engine import DATA_TYPES, engine_findings
from ops.deployment.release import OLDEST_TEMPLATES, ReleaseError, parse_release, read_sets
from triton_repo.parameters import CORE, MODELS, Value
from triton_repo.releases import DEFAULT
from triton_repo.render import RenderError, filled_values, render

# Fields of `DeploymentDescription` (keys) whose template parameter (value) has another name.
_TEMPLATE_NAMES = {"decoupled": "decoupled_mode"}
_NOT_RENDERED = ("release", "parameters", "local_engine_dir", "local_tokenizer_dir")
_PATHS = (
    "engine_dir",
    "local_engine_dir",
    "tokenizer_dir",
    "local_tokenizer_dir",
    "xgrammar_tokenizer_info_path",
)
_INFLIGHT = "inflight_fused_batching"


class DescriptionError(ValueError):
    """The description contradicts itself, the engine or the templates.

    The message has one line per problem.
    """


class DeploymentDescription(BaseModel):
    """A deployment of a TensorRT-LLM engine behind Triton.

    `ops.deployment.fields` documents each field. All fields except `release`, `decoupled` and the
    two local folders have the name of a template parameter. `parameters` holds any other template
    parameters. If a field is None, the value in the engine's config.json is used. If config.json
    has no such value, the server's default is used.

    Paths are absolute after validation. Relative paths start at the YAML file's folder or, without
    a file, at the working directory.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    release: str | None = None
    engine_dir: Path
    local_engine_dir: Path | None = None
    tokenizer_dir: Path
    local_tokenizer_dir: Path | None = None
    triton_backend: Literal["tensorrtllm", "python"] = "tensorrtllm"
    decoupled: bool = True
    batching_strategy: Literal["inflight", "V1", "inflight_fused_batching", "inflight_batching"] = (
        "inflight"
    )
    triton_max_batch_size: int | None = Field(None, ge=1)
    max_beam_width: int | None = Field(None, ge=1)
    max_queue_size: int = Field(0, ge=0)
    max_queue_delay_microseconds: int = Field(0, ge=0)
    batch_scheduler_policy: Literal["guaranteed_no_evict", "max_utilization"] | None = None
    enable_chunked_context: bool | None = None
    enable_kv_cache_reuse: bool | None = None
    kv_cache_free_gpu_mem_fraction: float | None = Field(None, gt=0, le=1)
    max_tokens_in_paged_kv_cache: int | None = Field(None, ge=1)
    kv_cache_host_memory_bytes: int | None = Field(None, ge=0)
    lora_cache_optimal_adapter_size: int | None = Field(None, ge=1)
    lora_cache_max_adapter_size: int | None = Field(None, ge=1)
    lora_cache_gpu_memory_fraction: float | None = Field(None, gt=0, le=1)
    lora_cache_host_memory_bytes: int | None = Field(None, ge=1)
    guided_decoding_backend: Literal["xgrammar", "llguidance"] | None = None
    xgrammar_tokenizer_info_path: Path | None = None
    # Default to two processes of about 100 MB each. With a single process, requests of the text
    # interface would wait for each other.
    preprocessing_instance_count: int = Field(2, ge=1)
    # Default to one process: two could decode parts of a streamed answer in parallel, and reorder
    # the parts.
    postprocessing_instance_count: int = Field(1, ge=1)
    bls_instance_count: int = Field(4, ge=1)
    parameters: dict[str, Value] = Field({})

    _locations: dict[str, str] = PrivateAttr(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _fields_first(cls, raw: Any) -> Any:
        return _own_fields(raw) if isinstance(raw, Mapping) else raw

    @field_validator("release", mode="before")
    @classmethod
    def _release(cls, found: object) -> str | None:
        """Return the name of the template set for the release or container in the field `release`.

        YAML parses 0.20 and 25.10 as the numbers 0.2 and 25.1. Such a number is first converted
        back to text with two decimals.
        """
        if found is None:
            return None
        text = str(found)
        if isinstance(found, float) and (found < 0.9 or found >= 23):
            text = f"{found:.2f}"
        if parse_release(text, "release") < OLDEST_TEMPLATES:
            raise ValueError(f"allowed: {OLDEST_TEMPLATES} and later, and containers since 25.01")
        return read_sets(text, "release")[0]

    @field_validator(*_PATHS)
    @classmethod
    def _absolute(cls, path: Path | None, info: ValidationInfo) -> Path | None:
        folder: Path = (info.context or {}).get("folder", Path.cwd())
        return None if path is None else folder.absolute() / path

    def locate(self, field: str) -> str:
        """Return the prefix `FILE:LINE: ` for messages about a field.

        The line is that of the field in the YAML file. Return "" if the field is not from a file.
        """
        return self._locations.get(field, "")


def _template_name(field: str) -> str:
    return _TEMPLATE_NAMES.get(field, field)


def _own_fields(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of `raw` without entries of `parameters` that have their own field.

    The value of such an entry becomes the value of the field. Raises ValueError if the field is
    given, too.
    """
    parameters, data = raw.get("parameters"), dict(raw)
    if not isinstance(parameters, Mapping):
        return data
    fields = {_template_name(name): name for name in DeploymentDescription.model_fields}
    data["parameters"] = {name: value for name, value in parameters.items() if name not in fields}
    for name in parameters.keys() & fields.keys():
        if fields[name] in raw:
            raise ValueError(f"parameters.{name}: {fields[name]} is given too; keep one")
        data[fields[name]] = parameters[name]
    return data


def from_yaml(path: Path, overrides: Mapping[str, Any] | None = None) -> DeploymentDescription:
    """Read a description from a YAML file.

    Args:
        path: the file.
        overrides: fields and `parameters` that replace those of the file.

    Raises DescriptionError with file, line and field of every problem.
    """
    try:
        document = MarkedYaml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DescriptionError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise DescriptionError(f"{path}: not UTF-8") from error
    except YamlProblem as problem:
        raise DescriptionError(f"{path}:{problem.line}: {problem.message}") from problem
    data = document.data
    if not isinstance(data, dict):
        raise DescriptionError(f"{path}: found {type(data).__name__}; allowed: names with values")
    places = _find_locations(document, path)
    try:
        data, changes = _own_fields(data), _own_fields(overrides or {})
    except ValueError as error:
        raise DescriptionError(f"{path}: {error}") from error
    for name in changes.keys() & set(_PATHS):
        changes[name] = Path(changes[name]).absolute()
    own = data.get("parameters")
    if isinstance(own, Mapping) and "parameters" in changes:
        changes["parameters"] = {**own, **changes["parameters"]}
    places = {name: place for name, place in places.items() if name not in changes}
    return _build_description({**data, **changes}, path.parent, places)


def from_fields(fields: Mapping[str, Any]) -> DeploymentDescription:
    """Return a description with these fields.

    Raises DescriptionError that lists all wrong fields.
    """
    return _build_description(fields, Path.cwd(), {})


def _build_description(
    fields: Mapping[str, Any], folder: Path, places: Mapping[str, str]
) -> DeploymentDescription:
    try:
        description = DeploymentDescription.model_validate(fields, context={"folder": folder})
    except ValidationError as error:
        lines = dict.fromkeys(_problem(dict(problem), places) for problem in error.errors())
        raise DescriptionError("\n".join(lines)) from error
    description._locations.update(places)
    return description


def _problem(problem: Mapping[str, Any], places: Mapping[str, str]) -> str:
    """Return the error message for a problem that pydantic found."""
    # Use only two parts of the error's location, such as `parameters` and the entry's name. The
    # third part would be an allowed type: pydantic reports the error once for each of these types.
    parts = [str(part) for part in problem["loc"]][:2]
    name = ".".join(parts)
    where = places.get(name) or places.get(parts[0] if parts else "", "")
    if parts and parts[0] == "parameters":
        return f"{where}{name}: allowed: text, a number, true or false"
    if problem["type"] == "missing":
        return f"{name}: not given; it is needed"
    if problem["type"] == "extra_forbidden":
        return (
            f"{where}{name}: unknown name; allowed: "
            f"{', '.join(DeploymentDescription.model_fields)}; "
            "other template parameters go under parameters"
        )
    return (
        f"{where}{parts[0]}: found {problem['input']!r}; "
        f"{problem['msg'].removeprefix('Value error, ')}"
        if parts
        else str(problem["msg"])
    )


def _find_locations(document: MarkedYaml, path: Path) -> dict[str, str]:
    """Return the location of each field, and of each entry of `parameters`, as `FILE:LINE: `."""
    names: list[tuple[Any, ...]] = [(name,) for name in document.data]
    parameters = document.data.get("parameters")
    if isinstance(parameters, dict):
        names += [("parameters", name) for name in parameters]
    return {".".join(map(str, name)): f"{path}:{document.find_line(name)}: " for name in names}


def template_parameters(
    description: DeploymentDescription, engine: EngineConfig | None = None
) -> dict[str, Value]:
    """Return the template parameters for this description.

    Args:
        description: the description.
        engine: configuration of an engine that is not built yet; None reads the config.json in
            `local_engine_dir` or, if that is None, in `engine_dir`.

    Raises DescriptionError, which lists all contradictions to the engine and the templates.
    """
    engine_dir = description.local_engine_dir or description.engine_dir
    engine = engine or _read_engine(description)
    values = _list_given_values(description) | dict(description.parameters)
    if "triton_max_batch_size" not in values and engine.max_batch_size is None:
        raise DescriptionError(
            f"triton_max_batch_size: {engine_dir} does not say how large a batch may be; give it"
        )
    values = _from_engine(engine, values) | values
    written = {name: _as_text(value) for name, value in values.items()}
    problems = []
    for finding in engine_findings(written, engine, engine_dir):
        if finding.severity == "error":
            field = next(
                (own for own, name in _TEMPLATE_NAMES.items() if name == finding.field),
                finding.field,
            )
            where = description.locate(field) or description.locate(f"parameters.{field}")
            problems.append(f"{where}{field}: {finding.problem}. Fix: {finding.fix}.")
    try:
        filled_values(values, MODELS, template_set(description.release, engine))
    except RenderError as error:
        for line in str(error).splitlines():
            name = line.partition(":")[0]
            problems.append(f"{description.locate(f'parameters.{name}')}{line}")
    if problems:
        raise DescriptionError("\n".join(problems))
    return values


def write(
    description: DeploymentDescription,
    destination: Path,
    engine: EngineConfig | None = None,
    core_name: str = CORE,
) -> dict[str, Value]:
    """Write the repository's five models. Return the template parameters that were filled in.

    Args:
        description: the description.
        destination: folder of the new repository.
        engine: configuration of an engine that is not built yet, as in `template_parameters`.
        core_name: the name that the model with the engine gets in Triton.

    Raises DescriptionError before anything is written.
    """
    engine = engine or _read_engine(description)
    values = template_parameters(description, engine)
    templates = template_set(description.release, engine)
    render(destination, values, release=templates, core_name=core_name)
    return values


def template_set(release: str | None, engine: EngineConfig) -> str:
    """Return the name of the template set to render.

    This is `release` if it is not None, else the set for the TensorRT-LLM release that built the
    engine. If the engine's release is not known, return `DEFAULT`.
    """
    if release is not None or engine.version is None:
        return release or DEFAULT
    try:
        return read_sets(engine.version)[0]
    except ReleaseError:
        return DEFAULT


def _read_engine(description: DeploymentDescription) -> EngineConfig:
    try:
        return read_engine_config(description.local_engine_dir or description.engine_dir)
    except ConfigError as error:
        raise DescriptionError(
            f"{description.locate('engine_dir')}engine_dir: {error}; where Triton sees the "
            "engine under another path, say with local_engine_dir where it is here"
        ) from error


def _list_given_values(description: DeploymentDescription) -> dict[str, Value]:
    values: dict[str, Value] = {}
    for field in type(description).model_fields:
        value = getattr(description, field)
        if field not in _NOT_RENDERED and value is not None:
            values[_template_name(field)] = str(value) if isinstance(value, Path) else value
    if values["batching_strategy"] == "inflight":
        values["batching_strategy"] = _INFLIGHT
    return values


def _from_engine(engine: EngineConfig, values: Mapping[str, Value]) -> dict[str, Value]:
    """Return the template parameters that follow from the engine, to be used as defaults."""
    inflight = values["batching_strategy"] != "V1"
    decided: dict[str, Value] = {
        # Use float32, TensorRT-LLM's default, if the engine does not state the type.
        "logits_datatype": DATA_TYPES.get(engine.logits_dtype or "", "TYPE_FP32"),
        "encoder_input_features_data_type": "TYPE_FP16",
        # Always set the parameter, because its default differs between releases.
        "enable_kv_cache_reuse": inflight and engine.can_reuse_kv_cache is True,
    }
    if engine.max_batch_size is not None:
        decided["triton_max_batch_size"] = engine.max_batch_size
    if engine.lora_dtype in DATA_TYPES:
        decided["lora_weights_data_type"] = DATA_TYPES[engine.lora_dtype]
    return decided


def _as_text(value: Value) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
