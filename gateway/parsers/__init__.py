"""Parsing of a model's output into reasoning, tool calls and content."""
