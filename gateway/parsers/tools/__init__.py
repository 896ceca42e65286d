"""Tool calls in a model's text: a parser for each form, call ids, and guides of forced calls.

Parsers take text and return events. Nothing here depends on HTTP, the engine or a tokenizer.
"""
