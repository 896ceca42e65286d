"""Endpoints for the web consoles.

The endpoints return the current replicas, tenants and requests, and stream their changes. Admins
can also cancel requests and drain replicas.
"""
