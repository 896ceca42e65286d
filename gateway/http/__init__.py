"""HTTP server: the only package that uses the server library, uvicorn."""
