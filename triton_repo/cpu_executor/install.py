"""Offer the CPU executor under the import names of TensorRT-LLM.

Then upstream's own ``model.py`` runs on it: ``import tensorrt_llm.bindings.executor`` and
``import tensorrt_llm.logger`` find these modules. A real installation is never shadowed.
"""

from __future__ import annotations

import importlib.util
import logging
import sys
from types import ModuleType
from typing import Any

from triton_repo.cpu_executor import bindings
from triton_repo.cpu_executor.tokenizer_info import xgrammar_tokenizer_info


def install() -> bool:
    """Register the modules in ``sys.modules``; False if TensorRT-LLM is there already."""
    if "tensorrt_llm" in sys.modules or importlib.util.find_spec("tensorrt_llm") is not None:
        return False
    log = logging.getLogger("tensorrt_llm")
    levels = ("debug", "info", "warning", "error", "critical")
    logger = _module("tensorrt_llm.logger", **{name: getattr(log, name) for name in levels})
    tokenizer = _module(
        "tensorrt_llm.llmapi.tokenizer", _xgrammar_tokenizer_info=xgrammar_tokenizer_info
    )
    llmapi = _module("tensorrt_llm.llmapi", tokenizer=tokenizer)
    package = _module("tensorrt_llm.bindings", executor=bindings)
    sys.modules["tensorrt_llm.bindings.executor"] = bindings
    _module(
        "tensorrt_llm",
        __version__=bindings.__version__,
        logger=logger,
        bindings=package,
        llmapi=llmapi,
    )
    return True


def _module(name: str, **attributes: Any) -> ModuleType:
    module = ModuleType(name)
    # Marks it as a package, so that "import a.b.c" accepts it as a parent.
    module.__path__ = []
    vars(module).update(attributes)
    sys.modules[name] = module
    return module
