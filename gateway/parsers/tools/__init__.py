"""Tool calls in a model's text: one parser per form, ids, and what a forced choice must match.

Text in, events out; nothing here knows HTTP, the engine or a tokenizer.
"""
