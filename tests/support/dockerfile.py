"""A parser for the Dockerfile, and the steps of a target's stages in order."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path

DOCKERFILE = Path(__file__).parents[2] / "Dockerfile"


@dataclass(frozen=True)
class Step:
    """An instruction. `flags` such as ``--from=build`` are not part of `text`."""

    instruction: str
    text: str
    flags: dict[str, str]

    def words(self) -> list[str]:
        """Return the list of an instruction in exec form, or else the words."""
        return json.loads(self.text) if self.text.startswith("[") else self.text.split()


@dataclass(frozen=True)
class Stage:
    name: str
    base: str
    steps: list[Step] = field(default_factory=list)


def stages(text: str) -> dict[str, Stage]:
    """Return the stages by name, in the file's order, without comments."""
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    found: dict[str, Stage] = {}
    arguments: dict[str, str] = {}  # arguments before the first stage
    for line in re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines():
        instruction, _, rest = line.strip().partition(" ")
        if instruction == "ARG" and not found:
            name, _, value = rest.partition("=")
            arguments[f"${{{name}}}"] = value
            continue
        if instruction == "FROM":
            base, _, name = rest.split()
            stage = found[name] = Stage(name, arguments.get(base, base))
            continue
        if instruction == "ARG" and "=" not in rest:
            rest = f"{rest}={arguments[f'${{{rest}}}']}"
        flags = re.match(r"(--[a-z-]+=\S+\s+)*", rest)
        assert flags is not None
        pairs = (flag.removeprefix("--").split("=", 1) for flag in flags[0].split())
        stage.steps.append(Step(instruction, rest[flags.end() :], dict(pairs)))
    return found


def steps(stages_: dict[str, Stage], target: str) -> list[Step]:
    """Return the steps of `target` after those of its base stages."""
    stage = stages_[target]
    return (steps(stages_, stage.base) if stage.base in stages_ else []) + stage.steps
