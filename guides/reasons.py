"""Conversion of llguidance's error messages to messages for clients."""

from __future__ import annotations

import re

NOTHING_FITS = "there is no token that it allows"


def reason(error: str) -> str:
    """Return llguidance's error message as one line, without its excerpt of the guide."""
    if error.startswith("NoExtension"):
        return NOTHING_FITS
    if error.startswith("panic"):
        return "it is too large"
    text = re.split(r"\n\s*\d+ \| |<non-verbose/>", error)[0]
    return " ".join(re.sub(r"^(at )?\d+\(\d+\): ", "", text).split())
