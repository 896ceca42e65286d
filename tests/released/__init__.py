"""State on disk and in Redis that earlier releases wrote and this release must read."""
