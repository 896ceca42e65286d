"""Tenants: their keys, their limits, and the usage that they are charged for."""
