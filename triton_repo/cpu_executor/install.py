"""Installer of the CPU executor into a folder under the import names of TensorRT-LLM.

    python -m triton_repo.cpu_executor.install FOLDER

Upstream's own ``model.py`` in that folder, or any program with it on PYTHONPATH, then finds
``tensorrt_llm.bindings.executor``, ``tensorrt_llm.logger``, the LLM API with
``tensorrt_llm.llmapi.tokenizer``, and, if torch is missing, a ``torch`` with the names of
``torch_tensors``. A real installation is never shadowed.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

TENSORRT_LLM = "tensorrt_llm"
TORCH = "torch"
_INIT = '''"""{name} of triton_repo.cpu_executor; see `python -m {module} --help`."""

import sys

from {module} import {function}

{function}(sys.modules[__name__])
'''
_MODULE = "triton_repo.cpu_executor.install"


def fill_tensorrt_llm(package: ModuleType) -> None:
    """Fill an empty package with the names and modules of `tensorrt_llm` that upstream imports."""
    from triton_repo.cpu_executor import bindings  # noqa: PLC0415
    from triton_repo.cpu_executor.llmapi import (  # noqa: PLC0415
        llm,
        llm_args,
        lora,
        outputs,
        ranks,
        sampling_params,
    )
    from triton_repo.cpu_executor.tokenizer_info import xgrammar_tokenizer_info  # noqa: PLC0415

    log = logging.getLogger(TENSORRT_LLM)
    levels = ("debug", "info", "warning", "error", "critical")
    sys.modules[f"{TENSORRT_LLM}.bindings.executor"] = bindings
    package.__dict__.update(
        __version__=bindings.__version__,
        logger=_module(f"{TENSORRT_LLM}.logger", **{name: getattr(log, name) for name in levels}),
        bindings=_module(f"{TENSORRT_LLM}.bindings", executor=bindings),
        LLM=llm.LLM,
        SamplingParams=sampling_params.SamplingParams,
        _utils=_module(
            f"{TENSORRT_LLM}._utils",
            global_mpi_rank=ranks.global_mpi_rank,
            global_mpi_size=ranks.global_mpi_size,
        ),
        executor=_module(
            f"{TENSORRT_LLM}.executor",
            RequestError=outputs.RequestError,
            request=_module(f"{TENSORRT_LLM}.executor.request", LoRARequest=lora.LoRARequest),
        ),
        llmapi=_module(
            f"{TENSORRT_LLM}.llmapi",
            llm=_module(f"{TENSORRT_LLM}.llmapi.llm", RequestOutput=outputs.RequestOutput),
            llm_utils=_module(
                f"{TENSORRT_LLM}.llmapi.llm_utils",
                update_llm_args_with_extra_dict=llm_args.update_llm_args_with_extra_dict,
            ),
            tokenizer=_module(
                f"{TENSORRT_LLM}.llmapi.tokenizer",
                _xgrammar_tokenizer_info=xgrammar_tokenizer_info,
            ),
        ),
    )


def fill_torch(package: ModuleType) -> None:
    """Fill an empty package with the names of `torch` that upstream's ``model.py`` uses."""
    from triton_repo.cpu_executor import torch_tensors  # noqa: PLC0415

    moved = {"from_dlpack": torch_tensors.from_dlpack, "to_dlpack": torch_tensors.to_dlpack}
    dlpack = _module(f"{TORCH}.utils.dlpack", **moved)
    utils = _module(f"{TORCH}.utils", dlpack=dlpack)
    package.__dict__.update(torch_tensors.TORCH, utils=utils)


_FILLERS: dict[str, Callable[[ModuleType], None]] = {
    TENSORRT_LLM: fill_tensorrt_llm,
    TORCH: fill_torch,
}


def install(folder: Path) -> list[Path]:
    """Write replacements of the packages `tensorrt_llm` and `torch` into `folder`.

    Return their paths. If torch is installed, it is not replaced. The folder is created if missing.
    Raises FileExistsError if TensorRT-LLM is installed for this Python.
    """
    elsewhere = [entry for entry in sys.path if Path(entry).resolve() != folder.resolve()]
    found = PathFinder.find_spec(TENSORRT_LLM, elsewhere)
    if found is not None:
        raise FileExistsError(f"TensorRT-LLM is installed here: {found.origin}")
    written = []
    for name, fill in _FILLERS.items():
        if PathFinder.find_spec(name, elsewhere) is None:
            package = folder / name
            package.mkdir(parents=True, exist_ok=True)
            text = _INIT.format(name=name, module=_MODULE, function=fill.__name__)
            (package / "__init__.py").write_text(text, encoding="utf-8")
            written.append(package)
    return written


def _module(name: str, **attributes: Any) -> ModuleType:
    module = ModuleType(name)
    # Mark the module as a package, because "import a.b.c" requires packages as parents.
    module.__path__ = []
    vars(module).update(attributes)
    sys.modules[name] = module
    return module


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. Return the exit code: 1 if nothing was written, else 0."""
    parser = argparse.ArgumentParser(prog=f"python -m {_MODULE}", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "folder", type=Path, metavar="FOLDER", help="for PYTHONPATH, or that of a model.py"
    )
    try:
        written = install(parser.parse_args(arguments).folder)
    except OSError as error:
        print(error, file=sys.stderr)
        return 1
    for package in written:
        print(f"wrote {package}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
