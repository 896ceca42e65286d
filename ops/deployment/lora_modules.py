"""Translation of PEFT's LoRA module names to TensorRT-LLM's, which an engine is built with."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from adapters.adapter import MODULE_IDS
from adapters.base_model import BaseModel
from adapters.modules import Projection, family

ALL = "all"
_ATTENTION = ("attn_q", "attn_k", "attn_v")


def engine_modules(names: Sequence[str], base: BaseModel) -> tuple[str, ...]:
    """Return the TensorRT-LLM modules to build the engine with, in the order of their ids.

    Any of attn_q, attn_k and attn_v selects all three, because TensorRT-LLM requires all or none.

    Args:
        names: names as in PEFT's `target_modules` (`q_proj`), which may each select several
            modules; TensorRT-LLM's names (`attn_q`); or only `all`.
        base: the model; its `architecture` determines the allowed names.

    Raises ValueError for unknown names; the message lists the allowed ones.
    """
    projections = family(base).projections
    # Allow the modules of fused projections and of their parts.
    by_module = {module for projection in projections.values() for module in _modules(projection)}
    if list(names) == [ALL]:
        return _in_order(projection.module for projection in projections.values())
    found: set[str] = set()
    unknown = []
    for name in names:
        matching = [
            projection.module
            for path, projection in projections.items()
            if path == name or path.endswith(f".{name}")
        ]
        if name in by_module:
            found.add(name)
        elif matching:
            found.update(matching)
        else:
            unknown.append(name)
    if unknown:
        paths = sorted({path.rpartition(".")[2] for path in projections})
        raise ValueError(
            f"--lora-modules: found {', '.join(unknown)}; allowed for {base.architecture}: {ALL}, "
            f"{', '.join(paths)}, {', '.join(_in_order(by_module))}"
        )
    if found & set(_ATTENTION):
        found.update(_ATTENTION)
    return _in_order(found)


def _modules(projection: Projection) -> tuple[str, ...]:
    return (projection.module, *projection.parts)


def _in_order(modules: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(set(modules), key=MODULE_IDS.__getitem__))
