"""Renderer of the GPT model repository, which corresponds to `all_models/gpt` of upstream.

The repository has neither in-flight batching nor streaming. Its model `tensorrt_llm` runs one
static batch after another, and sends complete responses. Every version of upstream's
`fill_template.py` can fill the templates in `gpt`, because all their placeholders stand for string
values.
"""

from collections.abc import Mapping
from pathlib import Path
from string import Template

from triton_repo.parameters import (
    CORE,
    ENSEMBLE,
    POSTPROCESSING,
    PREPROCESSING,
    Parameter,
    Value,
    boolean,
    integer,
    text,
)
from triton_repo.releases import DEFAULT, RELEASES, template_of
from triton_repo.render import TEMPLATES, RenderError, values, write_module

MODELS = (PREPROCESSING, CORE, POSTPROCESSING, ENSEMBLE)
PARAMETERS = (
    Parameter("engine_dir", (CORE,), text(), mandatory=True),
    Parameter("tokenizer_dir", (PREPROCESSING, POSTPROCESSING), text(), mandatory=True),
    # Set both parameters explicitly, because their defaults differ between releases.
    Parameter("add_special_tokens", (PREPROCESSING,), boolean(), default="true"),
    Parameter("skip_special_tokens", (POSTPROCESSING,), boolean(), default="true"),
    Parameter("trust_remote_code", (PREPROCESSING, POSTPROCESSING), boolean()),
    # Polling interval for disconnected clients, in milliseconds. Upstream's GPT repository does not
    # have this parameter; inflight_batcher_llm does.
    Parameter("cancellation_check_period_ms", (CORE,), integer(1), default="100"),
)

# The Python files of each model, as paths below `TEMPLATES`. The GPT repository has its own
# model.py of `tensorrt_llm`, and shares all other files with inflight_batcher_llm.
_MODULES = {
    PREPROCESSING: ("preprocessing/1/model.py", "booleans.py"),
    CORE: (
        "gpt/tensorrt_llm/1/model.py",
        "tensorrt_llm/1/executor_api.py",
        "tensorrt_llm/1/executor_request.py",
    ),
    POSTPROCESSING: ("postprocessing/1/model.py", "booleans.py"),
    ENSEMBLE: (),
}


def render_gpt(
    destination: Path, parameters: Mapping[str, Value], *, release: str = DEFAULT
) -> None:
    """Write the four models into `destination`, each with its config.pbtxt and version folder.

    Nothing is written unless all parameters are valid. Existing files are replaced.

    Args:
        destination: the model repository; created with its parents.
        parameters: values by name, for the names in `PARAMETERS`.
        release: one of `triton_repo.releases.RELEASES`. In this repository, the releases differ
            only in the names of some inputs.

    Raises:
        RenderError: the release is unknown, or a parameter is unknown, missing or not allowed. The
            message lists all problems.
    """
    if release not in RELEASES:
        raise RenderError(f"release: found {release}; allowed: {', '.join(RELEASES)}")
    written = values({entry.name: entry for entry in PARAMETERS}, parameters, MODELS)
    for model in MODELS:
        version = destination / model / "1"
        version.mkdir(parents=True, exist_ok=True)
        template = (TEMPLATES / "gpt" / model / "config.pbtxt").read_text("utf-8")
        config = Template(template_of(release, template)).substitute(written)
        (destination / model / "config.pbtxt").write_text(config, "utf-8")
        for module in _MODULES[model]:
            write_module(TEMPLATES / module, version / Path(module).name, release)
