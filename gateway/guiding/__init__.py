"""Check of guides before they are sent to an engine.

A guide is a JSON schema, regular expression or grammar for guided decoding.
"""
