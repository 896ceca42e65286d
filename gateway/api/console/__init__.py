"""Endpoints for the web consoles: the gateway's state, changes of this state, admins' actions."""
