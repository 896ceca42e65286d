"""Validation of guides before an engine receives them."""
