"""Triton's protobuf messages: two generated modules of the package `tritonclient.grpc`.

Importing this package would load grpcio and numpy, which take 25 MiB of memory in each process. The
transport `http2` needs neither, so the two modules are imported without running the package's
`__init__`. If another module imports the package later, its `__init__` uses the two modules that
are already loaded. This matters, because protobuf does not allow a message to be defined twice.

See decision 046 in docs/decisions.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import tritonclient

_PACKAGE = "tritonclient.grpc"


def _import_generated(name: str) -> ModuleType:
    if _PACKAGE in sys.modules:
        return import_module(f"{_PACKAGE}.{name}")
    # Register an empty package with the right search path, because `service_pb2` imports the other
    # module by the package's name.
    package = ModuleType(_PACKAGE)
    package.__path__ = [str(Path(folder, "grpc")) for folder in tritonclient.__path__]
    sys.modules[_PACKAGE] = package
    try:
        return import_module(f"{_PACKAGE}.{name}")
    finally:
        del sys.modules[_PACKAGE]


if TYPE_CHECKING:
    from tritonclient.grpc import model_config_pb2
    from tritonclient.grpc import service_pb2 as pb
else:
    model_config_pb2, pb = _import_generated("model_config_pb2"), _import_generated("service_pb2")

__all__ = ["model_config_pb2", "pb"]
