"""Certificates that are renewed while connections run: contexts, made anew from files."""
