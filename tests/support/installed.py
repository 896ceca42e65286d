"""Packages installed in the gateway's image, and the SBOM documents that list them."""

from __future__ import annotations

import json
from pathlib import Path

from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.support.locks import read_lock, version

PROJECT = "triton-openai-gateway"
PACKAGES = ("gateway", "adapters", "certificates", "guides", "lora_store", "ops", "triton_repo")
EVERY_MODULE = Path(__file__).with_name("every_module.py").read_text(encoding="utf-8")


def assert_lists_installed_packages(file: Path, python: str) -> None:
    """Check that a CycloneDX document lists the project and the lock file's versions.

    `python` is the Python version whose packages are expected.
    """
    told = json.loads(file.read_text(encoding="utf-8"))
    assert (told["bomFormat"], told["metadata"]["component"]["name"]) == ("CycloneDX", PROJECT)
    found = {
        canonicalize_name(part["name"]): Version(part["version"]) for part in told["components"]
    }
    assert found == {
        name: version(pin)
        for name, pins in read_lock("gateway").items()
        for pin, _ in pins
        if pin.marker is None or pin.marker.evaluate({"python_full_version": python})
    }
    assert all(part["purl"].startswith("pkg:pypi/") for part in told["components"])
