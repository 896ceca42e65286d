"""Endpoints for consoles: the state of this gateway, its changes, and admins' actions."""
