"""Fields of tokenizer_config.json that transformers writes in more than one form."""

from __future__ import annotations

from typing import Any

FILE = "tokenizer_config.json"


def token_text(token: Any) -> Any:
    """The text of a special token, which stands there alone or as an object with its `content`.

    Raises KeyError for an object without it. What is neither is given back as it is.
    """
    return token["content"] if isinstance(token, dict) else token


def default_template(templates: Any) -> Any:
    """The chat template: `templates` itself, or of a list of several the one named `default`.

    None where there is none; what is no text is given back as it is.
    """
    if not isinstance(templates, list):
        return templates
    named = [each for each in templates if isinstance(each, dict)]
    return next((each.get("template") for each in named if each.get("name") == "default"), None)
