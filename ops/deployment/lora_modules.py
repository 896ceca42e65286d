"""Translation of LoRA module names from PEFT's to TensorRT-LLM's, for building an engine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from adapters.adapter import MODULE_IDS
from adapters.base_model import BaseModel
from adapters.modules import Projection, family

ALL = "all"
_ATTENTION = ("attn_q", "attn_k", "attn_v")


def engine_modules(names: Sequence[str], base: BaseModel) -> tuple[str, ...]:
    """Return the TensorRT-LLM modules to build the engine with, in the order of their ids.

    If attn_q, attn_k or attn_v is requested, all three are returned: TensorRT-LLM requires all or
    none.

    Args:
        names: PEFT's names (`q_proj`) or TensorRT-LLM's names (`attn_q`), or `all` as the only
            name. One of PEFT's names may stand for several TensorRT-LLM modules.
        base: the model; its `architecture` determines the allowed names.

    Raises ValueError for unknown names. The message lists the allowed names.
    """
    projections = family(base).projections
    # Allow both modules for a fused projection (attn_qkv), and modules for its parts (attn_q).
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
