"""Management of adapters and keys by operators."""
