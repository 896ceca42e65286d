"""The `gateway` command run in the tests' own process, which has imported it already."""

from __future__ import annotations

import io
import signal
import subprocess
import threading
from contextlib import redirect_stderr, redirect_stdout

from ops.cli import main

Answer = subprocess.CompletedProcess[str]
_ENDED_WITHIN_S = 60.0


def gateway(*arguments: object) -> Answer:
    """Return the exit code and output. A command that serves is interrupted after a time limit."""
    here = threading.get_ident()
    interrupt = threading.Timer(_ENDED_WITHIN_S, signal.pthread_kill, (here, signal.SIGINT))
    words = [str(argument) for argument in arguments]
    interrupt.start()
    try:
        with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
            code = main(words)
    except SystemExit as error:  # the exit code as the interpreter would set it
        code = 1 if isinstance(error.code, str) else int(error.code or 0)
        err.write(f"{error.code}\n" if isinstance(error.code, str) else "")
    finally:
        interrupt.cancel()
    return subprocess.CompletedProcess(words, code, out.getvalue(), err.getvalue())
