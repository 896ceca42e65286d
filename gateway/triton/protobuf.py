"""Triton's protobuf messages: the two generated modules of tritonclient, without its client.

Importing their package, `tritonclient.grpc`, loads grpcio and numpy: 25 MiB in each process. The
transport `http2` needs neither, so the two modules are imported without running the package's
`__init__`. A later import of the package runs it and finds the two modules already loaded. They
must not be loaded twice, because protobuf accepts only one definition of a message.

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
    # A stand-in for the package, with nothing but its search path: `service_pb2` imports the other
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
