"""Anthropic's Messages API: another syntax for chat requests and answers."""
