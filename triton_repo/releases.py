"""The releases of `inflight_batcher_llm` that one set of templates is written for.

As it lies here a template is that of v0.17, so that upstream's `fill_template.py` fills it. What
v0.19 alone has is a comment that begins with `#0.19 `; lines of v0.17 alone end with ` #0.17`.
"""

import re

V0_17 = "0.17"
V0_19 = "0.19"
RELEASES = (V0_17, V0_19)
DEFAULT = V0_17


def template_of(release: str, template: str) -> str:
    """The template of one release, without the marks of either."""
    if release == V0_17:
        template = re.sub(rf"(?m)^ *#{V0_19} .*\n", "", template)
        return re.sub(rf"(?m) #{V0_17}$", "", template)
    template = re.sub(rf"(?m)^.* #{V0_17}\n", "", template)
    return re.sub(rf"(?m)^( *)#{V0_19} ", r"\1", template)
