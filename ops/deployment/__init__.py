"""From a checkpoint to a running deployment."""
