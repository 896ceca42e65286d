"""API keys that admins create over the API, in addition to the keys in the configuration file.

See decision 091 in docs/decisions.
"""
