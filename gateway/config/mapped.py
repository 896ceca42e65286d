"""Entries of the configuration file for embedding and ranking models that Triton serves.

An entry maps the inputs and outputs of the gateway's requests to the names of the model's tensors.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, model_validator

from gateway.config.adapters import AdapterName, Folder

_Tensor = Annotated[str, Field(min_length=1, max_length=256)]


class MappedModelEntry(BaseModel):
    """Fields that embedding and ranking models have in common.

    The inputs of a model are either texts (BYTES) or token ids (INT32 or INT64). For token ids, the
    folder of the model's `tokenizer` is required. For texts, a tokenizer is optional; it is used to
    count tokens.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
    triton_model: _Tensor | None = Field(
        default=None,
        description="The model's name in Triton, if it differs from the name for clients.",
    )
    input_ids: _Tensor | None = Field(
        default=None,
        description="Input tensor of token ids, INT32 or INT64, padded to the longest of a batch; "
        "instead of tensors of text. It needs `tokenizer`.",
    )
    attention_mask: _Tensor | None = Field(
        default=None, description="Input tensor of the attention mask, with `input_ids`."
    )
    token_type_ids: _Tensor | None = Field(
        default=None, description="Input tensor of the token types, with `input_ids`."
    )
    output: _Tensor = Field(description="Output tensor, FP32, FP16, BF16 or FP64.")
    tokenizer: Folder | None = Field(
        default=None,
        description="Absolute path of a folder with tokenizer.json. Without it, tokens are "
        "neither counted nor limited.",
    )
    max_tokens: Annotated[int, Field(ge=1, le=2**20)] | None = Field(
        default=None,
        description="Tokens of one input; longer ones are refused. It needs `tokenizer`.",
    )

    @property
    @abstractmethod
    def texts(self) -> tuple[str, ...]:
        """Names of the input tensors for text; empty if the model's input is token ids."""

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
    """Entry for an embedding model, with the name of its input tensor.

    The input is either text (`input`) or token ids (`input_ids`).
    """

    input: _Tensor | None = Field(default=None, description="Input tensor of text, BYTES.")
    dimensions: bool = Field(
        default=False,
        description="Whether clients may request shorter vectors, which always have length 1.",
    )
    normalize: bool = Field(default=False, description="Whether vectors are scaled to length 1.")

    @property
    def texts(self) -> tuple[str, ...]:
        return () if self.input is None else (self.input,)

    @model_validator(mode="after")
    def _fits(self) -> EmbeddingModel:
        self._check("input")
        return self


class RerankModel(MappedModelEntry):
    """Entry for a ranking model, with the names of its input tensors.

    The input is either text (`query` and `document`) or token ids (`input_ids`).
    """

    query: _Tensor | None = Field(
        default=None, description="Input tensor of the query's text, BYTES."
    )
    document: _Tensor | None = Field(
        default=None, description="Input tensor of the document's text, BYTES."
    )
    sigmoid: bool = Field(
        default=False, description="Whether the model's logits are converted to scores from 0 to 1."
    )

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
"""Entries of ranking models, by the name that clients use for the model."""
