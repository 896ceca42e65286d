"""TLS contexts that are rebuilt from certificate files while connections run."""
