"""Routing of a model name to the base model, or to one version of an adapter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from adapters.chat_template import ChatTemplate
from adapters.record import selector
from gateway.catalog.adapters import AdapterCatalog
from gateway.generation.lora import Lora


@dataclass(slots=True)
class Route:
    """The target of a model name.

    `name` labels metrics (an adapter's without its version); `version` is exact, for headers.
    `chat_template` is the version's own, None for the base model's.
    """

    name: str
    lora: Lora | None = None
    version: str | None = None
    chat_template: ChatTemplate | None = None


class ModelRouter:
    """Resolves names against the adapters known at that moment."""

    def __init__(
        self, base: str, adapters: AdapterCatalog, refuse: Callable[[str], None] = lambda _: None
    ) -> None:
        """Route to `base` and `adapters`; `refuse` raises InvalidRequest for other endpoints'
        models.
        """
        self._base = base
        self._adapters = adapters
        self._refuse = refuse

    def resolve(self, model: str) -> Route:
        """Return the route of a model name.

        Raises:
            ModelNotFound: no model has this name.
            InvalidRequest: the model does not generate text.
        """
        if model == self._base:
            return Route(self._base)
        self._refuse(model)
        lora, version = self._adapters.resolve(model)
        exact = selector(lora.name, version.digest)
        return Route(lora.name, lora, exact, version.chat_template)
