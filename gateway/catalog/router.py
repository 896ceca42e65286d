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
    """The base model or adapter version that a model name selects.

    `name` is the label in metrics, without the version. `version` is ``NAME@DIGEST`` of an adapter,
    for headers. `chat_template` is that of the adapter version; None if the base model's template
    applies.
    """

    name: str
    lora: Lora | None = None
    version: str | None = None
    chat_template: ChatTemplate | None = None


class ModelRouter:
    """Resolver of model names, by the adapters that exist at the time of the call."""

    def __init__(
        self, base: str, adapters: AdapterCatalog, refuse: Callable[[str], None] = lambda _: None
    ) -> None:
        """Route to the model named `base` and to `adapters`.

        `refuse` raises InvalidRequest for a model of another endpoint.
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
