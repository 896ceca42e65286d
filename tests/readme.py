"""Writes the parts of README.md that come from the code: ``python -m tests.readme``.

`test_readme.py` fails when the file is not what this would write.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from gateway.api.schemas import (
    HARMLESS,
    NOT_SERVED,
    ChatCompletionRequest,
    CompletionRequest,
    GenerationRequest,
)
from gateway.settings import Settings

README = Path(__file__).parent.parent / "README.md"


def sections() -> dict[str, str]:
    return {
        "settings": _settings(),
        "parameters": _parameters(),
    }


def updated(text: str) -> str:
    """`text` with the marked sections written anew."""
    for name, body in sections().items():
        pattern = rf"(<!-- begin: {name} -->\n).*?(<!-- end: {name} -->)"
        match = re.search(pattern, text, flags=re.DOTALL)
        assert match is not None, f"README.md has no section {name}"
        text = text[: match.start()] + match[1] + body + match[2] + text[match.end() :]
    return text


def _settings() -> str:
    lines = ["| variable | default | |", "|---|---|---|"]
    for name, field in Settings.model_fields.items():
        default = (
            "required" if field.is_required() else field.get_default(call_default_factory=True)
        )
        shown = "" if default in (None, {}) else f"`{default}`"
        shown = "required" if default == "required" else shown
        lines.append(f"| `GATEWAY_{name.upper()}` | {shown} | {field.description} |")
    return "\n".join(lines) + "\n"


def _parameters() -> str:
    chat = set(ChatCompletionRequest.model_fields) - set(GenerationRequest.model_fields)
    completions = set(CompletionRequest.model_fields) - set(GenerationRequest.model_fields)
    both = (chat & completions) | set(GenerationRequest.model_fields)
    rows = dict.fromkeys(both, "served")
    rows |= dict.fromkeys(chat - both, "served by /v1/chat/completions")
    rows |= dict.fromkeys(completions - both, "served by /v1/completions")
    rows |= dict.fromkeys(HARMLESS, "accepted without effect: there is no meaning to lose")
    rows |= {name: _refused(NOT_SERVED[name]) for name in NOT_SERVED}
    lines = ["| parameter | |", "|---|---|"]
    lines += [f"| `{name}` | {rows[name]} |" for name in sorted(rows)]
    return "\n".join(lines) + "\n"


def _refused(neutral: tuple[object, ...]) -> str:
    """Values that ask for nothing are accepted; equal ones of two types are shown once."""
    shown = list(dict.fromkeys(json.dumps(value) for value in neutral))
    return "refused" + (f", unless {' or '.join(f'`{value}`' for value in shown)}" * bool(shown))


if __name__ == "__main__":
    README.write_text(updated(README.read_text(encoding="utf-8")), encoding="utf-8")
