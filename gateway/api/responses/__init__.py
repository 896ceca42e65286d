"""OpenAI's Responses API: a second syntax for chat requests and answers."""
