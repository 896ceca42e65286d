"""Chaos tests: everything that can break is broken under load; see `__main__`."""
