"""Imports every module of the packages that are named; a ``__main__`` would start something.

A program of its own, also in an image: ``python -c "$(cat every_module.py)" gateway adapters``.
"""

import importlib
import pkgutil
import sys

# Module -> what it takes of an extra, which the image does not have.
EXTRAS = {"gateway.observability.tracing": "opentelemetry"}

for package in sys.argv[1:]:
    root = importlib.import_module(package)
    for module in pkgutil.walk_packages(root.__path__, f"{package}."):
        if module.name.endswith("__main__"):
            continue
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            if EXTRAS.get(module.name) != str(error.name).partition(".")[0]:
                raise
