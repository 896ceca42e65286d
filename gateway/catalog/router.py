"""Model name to what answers it: the base model, or one version of an adapter on it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from adapters.chat_template import ChatTemplate
from adapters.record import selector
from gateway.catalog.adapters import Adapters
from gateway.generation import Lora


@dataclass(slots=True)
class Route:
    """`name` labels metrics (an adapter's without its version); `version` is exact, for headers.

    `chat_template` is the version's own, None for the base model's.
    """

    name: str
    lora: Lora | None = None
    version: str | None = None
    chat_template: ChatTemplate | None = None


class Router:
    """Resolves names against the adapters known at that moment."""

    def __init__(
        self, base: str, adapters: Adapters, refuse: Callable[[str], None] = lambda _: None
    ) -> None:
        """`refuse` raises InvalidRequest for a name that other endpoints serve."""
        self._base = base
        self._adapters = adapters
        self._refuse = refuse

    def resolve(self, model: str) -> Route:
        """Raises ModelNotFound for a name that is not served, InvalidRequest for one that is, and
        generates nothing."""
        if model == self._base:
            return Route(self._base)
        self._refuse(model)
        lora, version = self._adapters.resolve(model)
        exact = selector(lora.name, version.digest)
        return Route(lora.name, lora, exact, version.chat_template)
