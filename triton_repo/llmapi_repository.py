"""Renderer of the llmapi model repository, whose only model runs both the tokenizer and the engine.

TensorRT-LLM's Triton backend includes the llmapi repository since release 1.0. In July 2026,
upstream removed all other repositories.
"""

import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from string import Template

from triton_repo.parameters import (
    CORE,
    Parameter,
    ParameterKind,
    Value,
    boolean,
    fraction,
    integer,
    matching,
    one_of,
    text,
)
from triton_repo.render import TEMPLATES, values

MAIN, V1_3, V1_2 = "main", "1.3", "1.2"
# Maps each release to a regular expression for inputs that upstream's config.pbtxt of this release
# lacks. `render_llmapi` removes these inputs from this project's template.
_LACKS = {MAIN: "", V1_3: "image_url", V1_2: r"image_url|lora_\w+"}
_OWN = (CORE,)


def _quoted_text() -> ParameterKind:
    plain = text()

    def write(value: Value) -> str | None:
        found = plain.write(value)
        return None if found is None else f'"{found}"'

    return ParameterKind(plain.allowed, write)


_LORA = (
    Parameter(
        *("lora_target_modules", _OWN),
        matching(r"\w+(,\w+)*", "names of modules joined by commas, such as attn_q,attn_v"),
    ),
    Parameter("max_lora_rank", _OWN, integer(1)),
    Parameter("max_loras", _OWN, integer(1)),
    Parameter("max_cpu_loras", _OWN, integer(1)),
)
PARAMETERS = (
    Parameter("model", _OWN, _quoted_text(), mandatory=True),
    Parameter("tokenizer", _OWN, _quoted_text(), default="null"),
    Parameter("decoupled", _OWN, boolean(), default="true"),
    # Release of upstream's model that this project's model imitates. The parameter exists only in
    # this project.
    Parameter("behaves_as", _OWN, one_of(*_LACKS), default=MAIN),
    Parameter("polls_ended_requests", _OWN, boolean(), default="false"),
    Parameter("cancellation_check_period_ms", _OWN, integer(1), default="100"),
    Parameter("dtype", _OWN, one_of("auto", "float16", "bfloat16"), default="null"),
    Parameter("tensor_parallel_size", _OWN, integer(1), default="1"),
    Parameter("pipeline_parallel_size", _OWN, integer(1), default="1"),
    Parameter("max_batch_size", _OWN, integer(1), default="null"),
    Parameter("max_num_tokens", _OWN, integer(1), default="8192"),
    Parameter("max_seq_len", _OWN, integer(1), default="null"),
    Parameter("enable_chunked_prefill", _OWN, boolean(), default="null"),
    Parameter("enable_block_reuse", _OWN, boolean(), default="true"),
    # Write the LLM API's default explicitly, because the API may not accept null.
    Parameter("free_gpu_memory_fraction", _OWN, fraction(), default="0.9"),
    Parameter("max_tokens_in_kv_cache", _OWN, integer(1), default="null"),
    # Parameters of LoRA. If none of them is given, the model is loaded without adapters.
    *_LORA,
)


def render_llmapi(destination: Path, parameters: Mapping[str, Value], *, model: str = CORE) -> None:
    """Write the repository, which has one model, into `destination`.

    Nothing is written unless all parameters are valid. Existing files are replaced.

    Args:
        destination: the model repository; created with its parents.
        parameters: values by name, for the names in `PARAMETERS`.
        model: the model's name in Triton.

    Raises:
        RenderError: a parameter is unknown, missing or not allowed. The message lists all problems.
    """
    written = values({entry.name: entry for entry in PARAMETERS}, parameters, _OWN)
    source, version = TEMPLATES / "llmapi" / CORE, destination / model / "1"
    tokenizer = written["model" if written["tokenizer"] == "null" else "tokenizer"]
    config = Template((source / "config.pbtxt").read_text("utf-8")).substitute(
        written, tokenizer_dir=tokenizer
    )
    config = config.replace(f'name: "{CORE}"', f'name: "{model}"', 1)
    if lacks := _LACKS[written["behaves_as"]]:
        config = re.sub(rf'(?m)^  {{ name: "({lacks})" .*\n', "", config)
        # Remove the comma after the last input: pbtxt does not allow one.
        config = re.sub(r",\n\]", "\n]", config)
    arguments = Template((source / "1" / "model.yaml").read_text("utf-8"))
    version.mkdir(parents=True, exist_ok=True)
    (destination / model / "config.pbtxt").write_text(config, "utf-8")
    (version / "model.yaml").write_text(
        arguments.substitute(written, lora_config=_lora_config(written)), "utf-8"
    )
    for module in (source / "1").glob("*.py"):
        shutil.copyfile(module, version / module.name)


def _lora_config(written: Mapping[str, str]) -> str:
    given = {entry.name: written[entry.name] for entry in _LORA if written[entry.name]}
    if names := given.get("lora_target_modules"):
        given["lora_target_modules"] = f"[{names}]"
    fields = ", ".join(f"{name}: {value}" for name, value in given.items())
    return f"{{{fields}}}" if given else "null"
