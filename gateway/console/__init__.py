"""Data that the web console shows: replicas, adapters, tenants and requests of one gateway.

A gateway may have several workers, so the data of all workers are merged.
"""
