"""Endpoints with which operators manage adapters and the API keys of tenants."""
