"""Model names, and what serves them."""
