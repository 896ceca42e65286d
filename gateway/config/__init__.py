"""Settings and the configuration file."""
