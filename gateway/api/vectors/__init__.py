"""Requests to embedding and rerank models."""
