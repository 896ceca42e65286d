"""Catalog of the models that clients can use: LoRA adapters, embedding and ranking models."""
