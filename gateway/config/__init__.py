"""Settings from environment variables, and the configuration file."""
