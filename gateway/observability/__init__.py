"""What is told of a request: log lines, spans."""
