"""`gateway serve`: runs only the gateway, like `python -m gateway`."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Runs the gateway in front of the Triton that GATEWAY_TRITON_GRPC names."
    parser.epilog = (
        "Settings are environment variables: GATEWAY_ and the setting's name in capitals, such as "
        "GATEWAY_PORT; GATEWAY_TOKENIZER_DIR is required. docs/settings.md of the source tree "
        "describes all of them."
    )


def run(parsed: argparse.Namespace) -> int:
    """Run the gateway until SIGTERM. Return the exit code, which is 2 for wrong settings."""
    from gateway.__main__ import main

    return main()
