"""Guides for users, and `docs.rerun`, which runs every command that they show."""
