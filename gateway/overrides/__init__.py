"""What admins say of replicas while gateways run: kept for all workers, and for all gateways."""
