"""Tool calls in a model's text: parsers, call ids, and JSON schemas for guided decoding.

Parsers take text and return events. Nothing here depends on HTTP, the engine or a tokenizer.
"""
