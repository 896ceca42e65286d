"""`gateway serve`: the gateway alone, as `python -m gateway` runs it."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Runs the gateway against the Triton that the GATEWAY_* variables name."


def run(parsed: argparse.Namespace) -> int:
    """Blocks until SIGTERM; 2 after naming wrong settings."""
    from gateway.__main__ import main

    return main()
