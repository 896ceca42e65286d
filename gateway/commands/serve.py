"""`gateway serve`: the gateway alone."""

from __future__ import annotations

import argparse
import sys


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Runs the gateway against the Triton that the GATEWAY_* variables name."


def run(parsed: argparse.Namespace) -> int:
    """Blocks until SIGTERM; 2 after naming wrong settings."""
    from pydantic import ValidationError
    from pydantic_settings import SettingsError

    from gateway.configuration import ConfigurationError
    from gateway.server import serve
    from gateway.settings import Settings

    try:
        settings = Settings()  # type: ignore[call-arg]  # pydantic reads the environment
    except SettingsError as error:  # names the field; what is no JSON there may be secret
        print(f"gateway serve: {error}", file=sys.stderr)
        return 2
    except ValidationError as error:
        problems = (
            f"GATEWAY_{'_'.join(str(part) for part in problem['loc']).upper()}: {problem['msg']}"
            for problem in error.errors()
        )
        print("gateway serve: " + "\n".join(problems), file=sys.stderr)
        return 2
    try:
        return serve(settings)
    except ConfigurationError as error:
        print(f"gateway serve: {error}", file=sys.stderr)
        return 2
