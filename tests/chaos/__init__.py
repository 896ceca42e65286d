"""Everything that can break is broken under load, and nothing may be wrong: see `__main__`."""
