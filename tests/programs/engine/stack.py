"""A real Triton with the scripted engine, and a real gateway."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from ops.commands.up import DEMO_MODEL
from tests.programs.engine.script import Form, Script
from tests.support.cluster import core_repository, tritons_of
from tests.support.gateway_process import GatewayProcess
from triton_repo.cpu_executor import synthetic

MODEL = "demo"
MAX_SEQ_LEN = 131_072
_CONTENT = "'<|im_start|>assistant\\n' + (message.content or '') }}"
_THOUGHTS_AND_CONTENT = (
    "'<|im_start|>assistant\\n' }}{%- if message.reasoning_content %}"
    "{{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}{%- endif %}"
    "{{- message.content or '' }}"
)
_MODEL_PY = """\
from pathlib import Path

from tests.programs.engine import loop

loop.install(Path({script!r}))

from core_model import TritonPythonModel
"""


@dataclass(frozen=True)
class ScriptedStack:
    """A running gateway whose engine follows the latest given script."""

    gateway: GatewayProcess
    script_file: Path
    form: Form

    def use(self, script: Script) -> None:
        replace(script, form=self.form).save(self.script_file)


@contextlib.contextmanager
def scripted_stack(
    folder: Path, form: Form = "hermes", **settings: object
) -> Iterator[ScriptedStack]:
    """Start a gateway, and Triton with a model that writes tool calls in the given format.

    `settings` become GATEWAY_ variables.
    """
    script_file = folder / "script.json"
    Script().save(script_file)
    engine = synthetic.build(
        folder / "engine",
        vocab_size=4096,
        tokens_per_second=2000.0,
        first_token_ms=0,
        max_batch_size=32,
        max_seq_len=MAX_SEQ_LEN,
    )
    _gather_logits(engine)
    render_core = core_repository(engine, max_tokens_in_paged_kv_cache=32 * MAX_SEQ_LEN)

    def write_repository(repository: Path) -> None:
        render_core(repository)
        model = repository / "tensorrt_llm" / "1" / "model.py"
        model.rename(model.with_name("core_model.py"))
        model.write_text(_MODEL_PY.format(script=str(script_file)), encoding="utf-8")

    settings["tool_form"] = form
    settings = {"tokenizer_dir": _thinking_tokenizer(folder / "tokenizer")} | settings
    with (
        tritons_of(folder, write_repository, 1) as tritons,
        GatewayProcess(folder / "gateway", tritons, **settings) as gateway,
    ):
        yield ScriptedStack(gateway, script_file, form)


def _gather_logits(engine: Path) -> None:
    """Declare in the engine's config.json the logits that the scripted loop sends."""
    path = engine / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    names = ("gather_context_logits", "gather_generation_logits")
    config["build_config"] |= dict.fromkeys(names, True)
    path.write_text(json.dumps(config), encoding="utf-8")


def _thinking_tokenizer(folder: Path) -> Path:
    """Write the demo model's tokenizer with a chat template for reasoning in tags."""
    folder.mkdir()
    shutil.copy(DEMO_MODEL / "tokenizer.json", folder)
    configuration = json.loads((DEMO_MODEL / "tokenizer_config.json").read_text(encoding="utf-8"))
    template = configuration["chat_template"]
    assert _CONTENT in template
    configuration["chat_template"] = template.replace(_CONTENT, _THOUGHTS_AND_CONTENT)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(configuration), encoding="utf-8")
    return folder
