"""Who asks, how much they may, and what it cost."""
