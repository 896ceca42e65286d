"""The model's text, read as a message: reasoning, tool calls, content."""
