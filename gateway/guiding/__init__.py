"""Whether a guide is one, found out before the engine is given it."""
