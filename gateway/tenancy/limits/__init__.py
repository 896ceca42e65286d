"""Limits of tenants: requests and tokens per minute, concurrent requests, and budgets."""
