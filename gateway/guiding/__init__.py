"""Validation of guides (JSON schemas, regular expressions, grammars) before an engine receives
them.
"""
