"""Anthropic's Messages API: another writing of the requests and answers of a chat."""
