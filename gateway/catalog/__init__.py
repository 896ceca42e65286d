"""Catalog of models for clients: adapters of the base model, embedding and ranking models."""
