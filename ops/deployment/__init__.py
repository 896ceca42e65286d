"""Tools for deploying a checkpoint: engine plans, model repositories, checks, and launches."""
