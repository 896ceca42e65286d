"""API keys that admins create over the API, in addition to the keys in the configuration file.

See decisions 026 and 091 in docs/decisions.
"""
