"""Variants of the `inflight_batcher_llm` templates for different releases of TensorRT-LLM.

A template set is one variant of all templates. It is named after the first release that uses it.
One file has all variants of a template. Without any processing, the file is a valid template for
v0.17, and upstream's `fill_template.py` can fill it. Marks say to which template sets a line
belongs:
- A comment that begins with `#0.19 ` contains a line for the sets since v0.19.
- A line that ends with ` #0.17` belongs only to the sets up to v0.17.

In Python files, a line for the sets since v0.19 ends with `# since 0.19`. A line for the sets up to
v0.17 ends with `# until 0.17`.

V0_19 is for upstream's tag v0.19.0. V0_20 is for NVIDIA's containers since 25.05. The container
25.05 has TensorRT-LLM 0.19.0, but other input names than upstream's tag v0.19.0. A backend silently
ignores an input whose name belongs to another template set.

See decision 050 in docs/decisions.
"""

import re

V0_17 = "0.17"
V0_19 = "0.19"
V0_20 = "0.20"
RELEASES = (V0_17, V0_19, V0_20)
DEFAULT = V0_17

_LINE = re.compile(r"(?m)^( *)(?:#(0\.\d+) )?(.*?)(?: #(0\.\d+))?\n")
_MARKED_LINE = re.compile(r"(?m)^(.*)  # (since|until) (0\.\d+)\n")


def template_of(release: str, template: str) -> str:
    """Return the text of a template file for the template set `release`, without marks."""

    def select(line: re.Match[str]) -> str:
        indent, since, text, until = line.groups()
        return f"{indent}{text}\n" if _has(release, since, until) else ""

    return _LINE.sub(select, template)


def module_of(release: str, module: str) -> str:
    """Return the text of a Python module for the template set `release`, without marks."""

    def select(line: re.Match[str]) -> str:
        text, word, named = line.groups()
        since, until = (named, None) if word == "since" else (None, named)
        return f"{text}\n" if _has(release, since, until) else ""

    return _MARKED_LINE.sub(select, module)


def _has(release: str, since: str | None, until: str | None) -> bool:
    """Return True if a line belongs to the template set `release`.

    `since` and `until` are the first and last template set of the line; None without this mark.
    """
    at = RELEASES.index(release)
    first = RELEASES.index(since) if since else 0
    last = RELEASES.index(until) if until else len(RELEASES)
    return first <= at <= last
