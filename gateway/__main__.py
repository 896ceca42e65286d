"""Entry point of `python -m gateway`, which reads its settings from the GATEWAY_* variables."""

from __future__ import annotations

import signal

from gateway.config.environment import settings_from_environment
from gateway.config.file import ConfigurationError
from gateway.http.workers import report_bad_settings
from gateway.server import serve


def main() -> int:
    """Serve until SIGTERM or SIGINT. Return the exit code, which is 2 if a setting is wrong."""
    try:
        return serve(settings_from_environment())
    except ConfigurationError as error:
        return report_bad_settings(error)
    except KeyboardInterrupt:  # after its shutdown, uvicorn raises SIGINT again
        return 128 + signal.SIGINT


if __name__ == "__main__":
    raise SystemExit(main())
