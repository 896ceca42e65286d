"""Anthropic's Messages API: endpoints, requests and answers.

Each request is converted to a chat request in OpenAI's format.
"""
