"""OpenAI's chats and completions: requests, their parameters, and answers."""
