"""Anthropic's Messages API. Its requests are converted to chat requests of OpenAI's protocol."""
