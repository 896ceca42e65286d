"""Ids of tool calls: new ones, and those that clients send back as a chat template wants them."""

from __future__ import annotations

import hashlib
import secrets
import string

from gateway.parsers.tools.forms import Form

_ALPHANUMERICS = string.digits + string.ascii_letters
_MISTRAL_LENGTH = 9


def new_id(form: Form) -> str:
    """A random id: `call_` and 24 alphanumerics as at OpenAI, but 9 alphanumerics for Mistral.

    Mistral's templates refuse, or cut, any other (mistral-common, `InvalidFunctionCallException`).
    """
    length = _MISTRAL_LENGTH if form == "mistral" else 24
    text = "".join(secrets.choice(_ALPHANUMERICS) for _ in range(length))
    return text if form == "mistral" else f"call_{text}"


def template_id(form: Form, call_id: str) -> str:
    """The id as the form's template takes it; equal ids stay equal, so calls and answers match."""
    if form != "mistral" or _is_mistral(call_id):
        return call_id
    number = int.from_bytes(hashlib.sha256(call_id.encode()).digest())
    digits = []
    for _ in range(_MISTRAL_LENGTH):
        number, digit = divmod(number, len(_ALPHANUMERICS))
        digits.append(_ALPHANUMERICS[digit])
    return "".join(digits)


def _is_mistral(call_id: str) -> bool:
    return len(call_id) == _MISTRAL_LENGTH and call_id.isascii() and call_id.isalnum()
