"""TLS contexts that are rebuilt when their certificate files change."""
