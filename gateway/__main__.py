"""`python -m gateway`: the service alone, as the GATEWAY_* variables say."""

from __future__ import annotations

import signal

from gateway.config.environment import settings_from_environment
from gateway.config.file import ConfigurationError
from gateway.http.workers import report_bad_settings
from gateway.server import serve


def main() -> int:
    """Blocks until SIGTERM or SIGINT; returns the exit code, 2 after naming wrong settings."""
    try:
        return serve(settings_from_environment())
    except ConfigurationError as error:
        return report_bad_settings(error)
    except KeyboardInterrupt:  # uvicorn raises it again when all has ended
        return 128 + signal.SIGINT


if __name__ == "__main__":
    raise SystemExit(main())
