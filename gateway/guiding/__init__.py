"""Validation of guides, before an engine receives them.

A guide is a JSON schema, regular expression or grammar for guided decoding.
"""
