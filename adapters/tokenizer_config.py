"""Fields of tokenizer_config.json that transformers writes in more than one form."""

from __future__ import annotations

from typing import Any

FILE = "tokenizer_config.json"


def token_text(token: Any) -> Any:
    """Return the text of a special token, which is given as text or as an object with `content`.

    Raise KeyError for an object without `content`. Any other value is returned unchanged.
    """
    return token["content"] if isinstance(token, dict) else token


def default_template(templates: Any) -> Any:
    """Return the default chat template from the field `chat_template`.

    If the field is a list, this is the template named `default`, or None if the list has none. Any
    other value is returned unchanged.
    """
    if not isinstance(templates, list):
        return templates
    named = [each for each in templates if isinstance(each, dict)]
    return next((each.get("template") for each in named if each.get("name") == "default"), None)
