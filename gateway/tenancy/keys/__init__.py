"""Keys that admins make over the API, beside those of the configuration file.

See decisions 026 and 091 in docs/decisions.
"""
