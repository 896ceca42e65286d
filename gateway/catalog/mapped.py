"""Mapped models: embedding and ranking models that the configuration maps to Triton models."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from gateway.catalog.router import ModelRouter
from gateway.config import mapped
from gateway.config.file import Configuration, FieldPath
from gateway.errors import InvalidRequest, ModelNotFound
from gateway.tokenization.inputs import InputTokenizer
from gateway.triton.tensor_mapping import TensorMapping as TritonMapping

C = TypeVar("C", mapped.EmbeddingModel, mapped.RerankModel)

_ENDPOINTS: Mapping[type[mapped.MappedModelEntry], str] = {
    mapped.EmbeddingModel: "makes embeddings: ask /v1/embeddings",
    mapped.RerankModel: "ranks documents: ask /v1/rerank",
}


@dataclass(frozen=True, slots=True)
class ServedModel(Generic[C]):
    """An embedding or ranking model.

    Attributes:
        name: the model's name for clients.
        entry: the model's entry in the configuration file.
        mapping: the names of the Triton model and of its input and output tensors.
        tokenizer: the model's tokenizer; None if texts are sent to Triton without counting tokens.
    """

    name: str
    entry: C
    mapping: TritonMapping
    tokenizer: InputTokenizer | None


AnyModel = ServedModel[mapped.EmbeddingModel] | ServedModel[mapped.RerankModel]


class MappedModels:
    """The embedding and ranking models of the current configuration."""

    def __init__(self) -> None:
        self._models: Mapping[str, AnyModel] = {}
        self._tokenizers: dict[str, InputTokenizer] = {}
        """Tokenizers of the last checked configuration. The key is the tokenizer's folder."""
        self.adapters: Callable[[], Iterable[str]] = tuple
        """Function that returns the names of registered adapters."""

    def __contains__(self, name: object) -> bool:
        return name in self._models

    @property
    def all(self) -> list[AnyModel]:
        """The models, sorted by name."""
        return [self._models[name] for name in sorted(self._models)]

    def get(self, name: str) -> AnyModel | None:
        return self._models.get(name)

    def resolve(self, name: str) -> AnyModel:
        """Return the embedding or ranking model named `name`.

        Raise ModelNotFound for an unknown name.
        """
        if name not in self._models:
            raise ModelNotFound(name)
        return self._models[name]

    def refuse(self, name: str) -> None:
        """Raise InvalidRequest if `name` is the name of an embedding or ranking model.

        Endpoints that generate text call this method, because such a model generates no text. The
        error message names the endpoint that serves the model.
        """
        found = self._models.get(name)
        if found is not None:
            does = _ENDPOINTS[type(found.entry)]
            raise InvalidRequest(f"The model `{name}` {does}.", param="model")

    def check(self, configuration: Configuration) -> tuple[FieldPath, str] | None:
        """Check the embedding and ranking models of a new configuration, and load their tokenizers.

        Return (field, reason) for the first model that cannot be served. Return None if all models
        can be served. This method blocks, so call it in a thread.
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
        """Serve the models of a new configuration. Call `check` with this configuration first."""
        found: dict[str, AnyModel] = {}
        for name, embedding in configuration.embedding_models.items():
            found[name] = self._build_model(name, embedding)
        for name, rerank in configuration.rerank_models.items():
            found[name] = self._build_model(name, rerank)
        self._models = found

    def _build_model(self, name: str, entry: C) -> ServedModel[C]:
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
        return ServedModel(name, entry, mapping, tokenizer)


class MappedRouter(Generic[C]):
    """Lookup of models by name, for an endpoint that serves only one type of model.

    The type is either embedding models or ranking models.
    """

    def __init__(self, models: MappedModels, router: ModelRouter, kind: type[C]) -> None:
        self._models = models
        self._router = router
        self._kind: type[C] = kind

    def resolve(self, model: str) -> ServedModel[C]:
        """Return the embedding or ranking model named `model`.

        Raises:
            ModelNotFound: no model has this name.
            InvalidRequest: the model is of another type.
        """
        found = self._models.get(model)
        if found is None:
            self._router.resolve(model)
            raise InvalidRequest(
                f"The model `{model}` generates text: ask /v1/chat/completions.", param="model"
            )
        if not isinstance(found.entry, self._kind):
            self._models.refuse(model)
        return found  # type: ignore[return-value]  # mypy does not narrow by the entry
