"""Routing of a model name to the base model, or to one version of a LoRA adapter."""

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

    Attributes:
        name: the model's name without the version, as a label in metrics.
        lora: the adapter version; None for the base model.
        version: ``NAME@DIGEST`` of the adapter version, for a response header; None for the base
            model.
        chat_template: the adapter version's chat template; None to use the base model's template.
    """

    name: str
    lora: Lora | None = None
    version: str | None = None
    chat_template: ChatTemplate | None = None


class ModelRouter:
    """Lookup of the base model or a LoRA adapter by the model name in a request."""

    def __init__(
        self, base: str, adapters: AdapterCatalog, refuse: Callable[[str], None] = lambda _: None
    ) -> None:
        """Create the router.

        Args:
            base: name of the base model.
            adapters: the catalog of adapters.
            refuse: called with each model name that is not `base`; raises InvalidRequest if the
                model does not generate text.
        """
        self._base = base
        self._adapters = adapters
        self._refuse = refuse

    def resolve(self, model: str) -> Route:
        """Return the base model or adapter version for a model name.

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
