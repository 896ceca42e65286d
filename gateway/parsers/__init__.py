"""Parsing of a model's text into the parts of a message: reasoning, tool calls, content."""
