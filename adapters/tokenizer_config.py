"""Fields of tokenizer_config.json that transformers writes in more than one form."""

from __future__ import annotations

from typing import Any

FILE = "tokenizer_config.json"


def token_text(token: Any) -> Any:
    """Return the text of a special token, given as text or as an object with `content`.

    Raises KeyError for an object without `content`. Any other value is returned unchanged.
    """
    return token["content"] if isinstance(token, dict) else token


def default_template(templates: Any) -> Any:
    """Return the chat template: `templates` itself, or the entry named `default` of a list.

    None if there is none. A value that is not text is returned unchanged.
    """
    if not isinstance(templates, list):
        return templates
    named = [each for each in templates if isinstance(each, dict)]
    return next((each.get("template") for each in named if each.get("name") == "default"), None)
