"""The demo model: its corpus, its training and its measurement."""
