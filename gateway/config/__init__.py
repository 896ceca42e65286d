"""Configuration of a gateway: settings from environment variables, and the configuration file."""
