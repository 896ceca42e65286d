"""Why a guide is none, in words that a client may read."""

from __future__ import annotations

import re

NOTHING_FITS = "there is no token that it allows"


def reason(error: str) -> str:
    """What llguidance says is wrong, in one line and without the drawing of where."""
    if error.startswith("NoExtension"):
        return NOTHING_FITS
    if error.startswith("panic"):
        return "it is too large"
    text = re.split(r"\n\s*\d+ \| |<non-verbose/>", error)[0]
    return " ".join(re.sub(r"^(at )?\d+\(\d+\): ", "", text).split())
