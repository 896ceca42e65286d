"""Fields of tokenizer_config.json that transformers writes in several formats."""

from __future__ import annotations

from typing import Any

FILE = "tokenizer_config.json"


def token_text(token: Any) -> Any:
    """Return the text of a special token, which is either a text or an object with `content`.

    Raise KeyError for an object without `content`. Return any other value unchanged.
    """
    return token["content"] if isinstance(token, dict) else token


def default_template(templates: Any) -> Any:
    """Return the default chat template in a value of the field `chat_template`.

    If the field is a list, this is the template with the name `default`, or None if there is none.
    Return any other value unchanged.
    """
    if not isinstance(templates, list):
        return templates
    named = [each for each in templates if isinstance(each, dict)]
    return next((each.get("template") for each in named if each.get("name") == "default"), None)
