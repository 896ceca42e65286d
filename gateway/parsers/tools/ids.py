"""Ids of tool calls: creation, and conversion to ids that a chat template accepts."""

from __future__ import annotations

import hashlib
import secrets
import string

from gateway.parsers.tools.forms import Form

_ALPHANUMERICS = string.digits + string.ascii_letters
_MISTRAL_LENGTH = 9


def new_id(form: Form) -> str:
    """Return a random id: `call_` and 24 alphanumeric characters, as in the OpenAI API.

    For Mistral, return 9 alphanumeric characters: Mistral's templates refuse or truncate all other
    ids (mistral-common, `InvalidFunctionCallException`).
    """
    length = _MISTRAL_LENGTH if form == "mistral" else 24
    text = "".join(secrets.choice(_ALPHANUMERICS) for _ in range(length))
    return text if form == "mistral" else f"call_{text}"


class TemplateIds:
    """Converter of the call ids of one conversation to ids that the chat template accepts.

    Equal ids stay equal, so each tool result still has the id of its call. For Kimi, all ids are
    replaced: an id must contain the function's name and the number of earlier calls (model card of
    Kimi-K2, section on tool calls). Kimi's template writes the function's name only in the id.
    """

    def __init__(self, form: Form | None) -> None:
        self.form = form
        self._numbered: dict[str, str] = {}
        self._calls = 0

    def of_call(self, call_id: str, function: str) -> str:
        """Return the converted id of the next tool call of the conversation.

        Call this once for each tool call, in their order in the conversation.
        """
        if self.form == "kimi_k2":
            self._numbered[call_id] = f"functions.{function}:{self._calls}"
            self._calls += 1
        return self.of_answer(call_id)

    def of_answer(self, call_id: str) -> str:
        """Return the converted id of a tool result. The converted id of its call is the same."""
        if self.form == "mistral" and not _is_mistral(call_id):
            return _mistral(call_id)
        return self._numbered.get(call_id, call_id)


def _mistral(call_id: str) -> str:
    number = int.from_bytes(hashlib.sha256(call_id.encode()).digest())
    digits = []
    for _ in range(_MISTRAL_LENGTH):
        number, digit = divmod(number, len(_ALPHANUMERICS))
        digits.append(_ALPHANUMERICS[digit])
    return "".join(digits)


def _is_mistral(call_id: str) -> bool:
    return len(call_id) == _MISTRAL_LENGTH and call_id.isascii() and call_id.isalnum()
