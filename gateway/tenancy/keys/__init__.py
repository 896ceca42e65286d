"""Keys that admins make over the API, beside those of the configuration file."""
