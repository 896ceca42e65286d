"""The database of a gateway or of a fleet: SQLite by default, PostgreSQL for several gateways."""
