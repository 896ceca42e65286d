"""Health, version and metrics of the gateway."""
