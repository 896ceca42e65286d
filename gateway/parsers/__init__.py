"""Parsing of the model's text as a message: reasoning, tool calls, content."""
