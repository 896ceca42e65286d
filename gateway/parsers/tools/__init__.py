"""Tool calls in a model's text: one parser per form, ids, and guides of forced calls.

Text in, events out; nothing here knows HTTP, the engine or a tokenizer.
"""
