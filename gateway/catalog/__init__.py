"""Model names, and the adapters and models that serve them."""
