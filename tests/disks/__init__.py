"""Tritons with disks of their own, agents that are killed, and a Redis that forgets."""
