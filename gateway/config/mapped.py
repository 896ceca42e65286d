"""Embedding and ranking models of the same Triton, and the tensors that they have."""

from __future__ import annotations

from abc import abstractmethod
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, model_validator

from gateway.config.adapters import AdapterName, Folder

_Tensor = Annotated[str, Field(min_length=1, max_length=256)]


class MappedModelEntry(BaseModel):
    """Common fields: either tensors of text (BYTES) or of token ids (INT32 or INT64).

    Token ids need the folder of the model's `tokenizer`; with a tokenizer, texts are counted in
    tokens.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
    triton_model: _Tensor | None = None
    """The model's name in Triton, if it differs from the entry's."""
    input_ids: _Tensor | None = None
    attention_mask: _Tensor | None = None
    token_type_ids: _Tensor | None = None
    output: _Tensor
    tokenizer: Folder | None = None
    max_tokens: Annotated[int, Field(ge=1, le=2**20)] | None = None
    """Maximum number of tokens of one input."""

    @property
    @abstractmethod
    def texts(self) -> tuple[str, ...]:
        """The tensors of text."""

    def _check(self, names: str) -> None:
        if bool(self.texts) is (self.input_ids is not None):
            raise ValueError(f"must have either {names} or input_ids")
        if self.input_ids is None and (self.attention_mask or self.token_type_ids):
            raise ValueError("attention_mask and token_type_ids are of use with input_ids only")
        if self.tokenizer is None and self.input_ids is not None:
            raise ValueError("input_ids need the folder of a tokenizer")
        if self.tokenizer is None and self.max_tokens is not None:
            raise ValueError("max_tokens needs the folder of a tokenizer")


class EmbeddingModel(MappedModelEntry):
    """`dimensions` lets clients request shorter vectors; `normalize` scales all vectors to length
    1.

    Shortened vectors always have length 1.
    """

    input: _Tensor | None = None
    dimensions: bool = False
    normalize: bool = False

    @property
    def texts(self) -> tuple[str, ...]:
        return () if self.input is None else (self.input,)

    @model_validator(mode="after")
    def _fits(self) -> EmbeddingModel:
        self._check("input")
        return self


class RerankModel(MappedModelEntry):
    """A ranking model. `sigmoid` maps a model's logits to scores between 0 and 1."""

    query: _Tensor | None = None
    document: _Tensor | None = None
    sigmoid: bool = False

    @property
    def texts(self) -> tuple[str, ...]:
        return tuple(name for name in (self.query, self.document) if name is not None)

    @model_validator(mode="after")
    def _fits(self) -> RerankModel:
        self._check("query and document")
        if len(self.texts) == 1:
            raise ValueError("must have both query and document")
        return self


EmbeddingModels = dict[AdapterName, EmbeddingModel]
RerankModels = dict[AdapterName, RerankModel]
"""Models by their names for clients."""
