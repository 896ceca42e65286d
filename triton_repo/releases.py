"""The sets of templates of `inflight_batcher_llm`, named after the first release of each.

A template is stored in the form of v0.17, so that upstream's `fill_template.py` can fill it. Where
a comment begins with `#0.19 `, the rest is a line since v0.19. A line that ends with ` #0.17` is
last in v0.17. In Python such lines end with `# since 0.19` and `# until 0.17`.

V0_20 is the set of NVIDIA's containers since 25.05, whose TensorRT-LLM is 0.19.0; the tag v0.19.0
of upstream's repository still has the older names of V0_19. Each backend reads only the names of
its own set and silently ignores others.

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
    """Return the template of one set, without the marks of any."""

    def select(line: re.Match[str]) -> str:
        indent, since, text, until = line.groups()
        return f"{indent}{text}\n" if _has(release, since, until) else ""

    return _LINE.sub(select, template)


def module_of(release: str, module: str) -> str:
    """Return the module that reads the names of one set alone, without the marks of any."""

    def select(line: re.Match[str]) -> str:
        text, word, named = line.groups()
        since, until = (named, None) if word == "since" else (None, named)
        return f"{text}\n" if _has(release, since, until) else ""

    return _MARKED_LINE.sub(select, module)


def _has(release: str, since: str | None, until: str | None) -> bool:
    """Return True if a line of these marks belongs to the set."""
    at = RELEASES.index(release)
    first = RELEASES.index(since) if since else 0
    last = RELEASES.index(until) if until else len(RELEASES)
    return first <= at <= last
