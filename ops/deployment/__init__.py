"""Tools that turn a checkpoint into a running deployment."""
