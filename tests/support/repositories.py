"""A repository of five models as `gateway repo render` writes it, which tests damage."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ops.deployment import repository
from ops.deployment.check import check
from tests.support.triton_server import MODEL

FindingKey = tuple[str, str, str]
"""A finding's severity, model and field."""

CORE, BLS, ENSEMBLE = "tensorrt_llm", "tensorrt_llm_bls", "ensemble"


@dataclass(frozen=True)
class RenderedRepository:
    """A rendered repository with its engine and its tokenizer."""

    folder: Path

    @property
    def repository(self) -> Path:
        return self.folder / "repository"

    @property
    def engine(self) -> Path:
        return self.folder / "engine"

    @property
    def tokenizer(self) -> Path:
        return self.folder / "tokenizer"

    def edit(self, model: str, old: str, new: str) -> None:
        """Replace text in a config.pbtxt. Fail if the text is missing."""
        path = self.repository / model / "config.pbtxt"
        text = path.read_text()
        assert old in text, old
        path.write_text(text.replace(old, new))

    def rename(self, model: str, old: str, new: str) -> None:
        """Rename an input in the configuration and in model.py, like another release."""
        self.edit(model, f'"{old}"', f'"{new}"')
        for module in (self.repository / model / "1").glob("*.py"):
            module.write_text(module.read_text().replace(f'"{old}":', f'"{new}":'))

    def set(self, model: str, key: str, value: str) -> None:
        """Set a parameter that the config.pbtxt already has."""
        head = f'parameters {{ key: "{key}" value {{ string_value: "'
        path = self.repository / model / "config.pbtxt"
        before, found, after = path.read_text().partition(head)
        assert found, key
        path.write_text(before + head + value + '"' + after.partition('"')[2])

    def add(self, model: str, key: str, value: str) -> None:
        """Add a parameter that this release lacks."""
        with (self.repository / model / "config.pbtxt").open("a") as file:
            file.write(f'\nparameters {{ key: "{key}" value {{ string_value: "{value}" }} }}\n')

    def build(self, section: str, **changes: Any) -> None:
        """Change fields in a section of the engine's config.json, such as `build_config`.

        The section "" is the top level.
        """
        path = self.engine / "config.json"
        config = json.loads(path.read_text())
        part = config
        for name in filter(None, section.split(".")):
            part = part[name]
        part.update(changes)
        path.write_text(json.dumps(config))

    def drop_lora_from_ensemble(self) -> None:
        for name in ("lora_task_id", "lora_weights", "lora_config"):
            path = self.repository / ENSEMBLE / "config.pbtxt"
            lines = [line for line in path.read_text().splitlines() if f'"{name}"' not in line]
            path.write_text("\n".join(lines))

    def drop_chat_template(self) -> None:
        path = self.tokenizer / "tokenizer_config.json"
        config = json.loads(path.read_text())
        assert config.pop("chat_template")
        path.write_text(json.dumps(config))


def render_repository(folder: Path, built: Path) -> RenderedRepository:
    """Render a repository in `folder` with a copy of the engine `built`. Weights are a symlink."""
    made = RenderedRepository(folder)
    made.engine.mkdir()
    shutil.copyfile(built / "config.json", made.engine / "config.json")
    (made.engine / "model.safetensors").symlink_to(built / "model.safetensors")
    shutil.copytree(MODEL, made.tokenizer, ignore=shutil.ignore_patterns("*.safetensors"))
    description = repository.from_fields(
        {
            "engine_dir": made.engine,
            "tokenizer_dir": made.tokenizer,
            "triton_backend": "python",
            "max_beam_width": 4,
            "max_queue_size": 64,
            "guided_decoding_backend": "xgrammar",
            "parameters": {"exclude_input_in_output": False},
        }
    )
    repository.write(description, made.repository)
    return made


def list_findings(place: RenderedRepository, **where: Path) -> set[FindingKey]:
    return {(one.severity, one.model, one.field) for one in check(place.repository, **where)}


def error(model: str, field: str) -> FindingKey:
    return ("error", model, field)


def warning(model: str, field: str) -> FindingKey:
    return ("warning", model, field)


def note(model: str, field: str) -> FindingKey:
    return ("note", model, field)
