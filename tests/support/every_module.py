"""Imports each module of the named packages, except ``__main__``, which would start a program.

The file is also run in images: ``python -c "$(cat every_module.py)" gateway adapters``.
"""

import importlib
import pkgutil
import sys

# Module -> the optional package that the module needs and the image lacks.
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
