"""Guides for users, and `docs.rerun`, which runs the commands in the guides."""
