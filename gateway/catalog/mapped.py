"""The models for embeddings and for ranking that the configuration file names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from gateway.catalog.router import Router
from gateway.config import mapped
from gateway.config.file import Configuration, Place
from gateway.errors import InvalidRequest, ModelNotFound
from gateway.tokenization.inputs import InputTokenizer
from gateway.triton.tensor_mapping import TensorMapping as TritonMapping

C = TypeVar("C", mapped.EmbeddingModel, mapped.RerankModel)

_ENDPOINTS: Mapping[type[mapped.MappedModel], str] = {
    mapped.EmbeddingModel: "makes embeddings: ask /v1/embeddings",
    mapped.RerankModel: "ranks documents: ask /v1/rerank",
}


@dataclass(frozen=True, slots=True)
class MappedModel(Generic[C]):
    """A model by the name that clients know it by; `tokenizer` is None where texts are sent that
    are not counted."""

    name: str
    entry: C
    mapping: TritonMapping
    tokenizer: InputTokenizer | None


AnyModel = MappedModel[mapped.EmbeddingModel] | MappedModel[mapped.RerankModel]


class MappedModels:
    """Those in force."""

    def __init__(self) -> None:
        self._models: Mapping[str, AnyModel] = {}
        self._tokenizers: dict[str, InputTokenizer] = {}
        """By folder, those of the last configuration that was looked at."""
        self.adapters: Callable[[], Iterable[str]] = tuple
        """The names of those that are registered."""

    def __contains__(self, name: object) -> bool:
        return name in self._models

    @property
    def all(self) -> list[AnyModel]:
        """Sorted by name."""
        return [self._models[name] for name in sorted(self._models)]

    def get(self, name: str) -> AnyModel | None:
        return self._models.get(name)

    def resolve(self, name: str) -> AnyModel:
        """Of either kind. Raises ModelNotFound."""
        if name not in self._models:
            raise ModelNotFound(name)
        return self._models[name]

    def refuse(self, name: str) -> None:
        """Raises InvalidRequest where it is one of these, of a request for something else."""
        found = self._models.get(name)
        if found is not None:
            does = _ENDPOINTS[type(found.entry)]
            raise InvalidRequest(f"The model `{name}` {does}.", param="model")

    def check(self, configuration: Configuration) -> tuple[Place, str] | None:
        """What of a configuration cannot be served, and why. It reads tokenizers anew.

        In a thread, beside the event loop.
        """
        tokenizers: dict[str, InputTokenizer] = {}
        adapters = set(self.adapters())
        for section in ("embedding_models", "rerank_models"):
            for name, entry in getattr(configuration, section).items():
                if name in adapters:
                    return (section, name), "an adapter has this name"
                if entry.tokenizer is not None and entry.tokenizer not in tokenizers:
                    try:
                        found = InputTokenizer.load(Path(entry.tokenizer))
                    except ValueError as error:
                        return (section, name, "tokenizer"), str(error)
                    tokenizers[entry.tokenizer] = found
        self._tokenizers = tokenizers
        return None

    def update(self, configuration: Configuration) -> None:
        """To be told of every configuration that comes into force, after `check`."""
        found: dict[str, AnyModel] = {}
        for name, embedding in configuration.embedding_models.items():
            found[name] = self._made(name, embedding)
        for name, rerank in configuration.rerank_models.items():
            found[name] = self._made(name, rerank)
        self._models = found

    def _made(self, name: str, entry: C) -> MappedModel[C]:
        tokenizer = None if entry.tokenizer is None else self._tokenizers[entry.tokenizer]
        mapping = TritonMapping(
            model=entry.triton_model or name,
            output=entry.output,
            texts=entry.texts,
            input_ids=entry.input_ids,
            attention_mask=entry.attention_mask,
            token_type_ids=entry.token_type_ids,
            pad_id=0 if tokenizer is None else tokenizer.pad_id,
        )
        return MappedModel(name, entry, mapping, tokenizer)


class MappedRouter(Generic[C]):
    """Resolves the names of one kind."""

    def __init__(self, models: MappedModels, router: Router, kind: type[C]) -> None:
        self._models = models
        self._router = router
        self._kind: type[C] = kind

    def resolve(self, model: str) -> MappedModel[C]:
        """Raises ModelNotFound for a name that is not served, InvalidRequest for one that is, and
        does something else."""
        found = self._models.get(model)
        if found is None:
            self._router.resolve(model)
            raise InvalidRequest(
                f"The model `{model}` generates text: ask /v1/chat/completions.", param="model"
            )
        if not isinstance(found.entry, self._kind):
            self._models.refuse(model)
        return found  # type: ignore[return-value]  # mypy does not see it through the entry
