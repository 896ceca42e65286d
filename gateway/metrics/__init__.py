"""What Prometheus is told of this process."""
