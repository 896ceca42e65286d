"""`gateway up`: runs the local stack in the foreground until a signal, or until a server dies."""

from __future__ import annotations

import errno
import os
import signal
from dataclasses import dataclass

from ops.local_stack.errors import StackError, StopRequested
from ops.local_stack.ports import PortClaims
from ops.local_stack.servers import Ports
from ops.local_stack.stack import Stack, StackOptions, pages, print_status
from ops.local_stack.state import StateLock

OWNER_ONLY_UMASK = 0o077
"""Umask for all files that the stack writes."""


@dataclass(frozen=True)
class RequestedPorts:
    """Ports from the command line; 0 selects a free port."""

    gateway: int
    redis: int = 0
    triton_http: int = 0
    triton_grpc: int = 0
    triton_metrics: int = 0

    def claim(self, claims: PortClaims) -> Ports:
        """Claim the ports and return them. Raises StackError if a port is in use."""

        def one(wanted: int) -> int:
            return claims.take(wanted) if wanted else claims.take_free()

        return Ports(
            gateway=one(self.gateway),
            redis=one(self.redis),
            triton_http=one(self.triton_http),
            triton_grpc=one(self.triton_grpc),
            triton_metrics=one(self.triton_metrics),
        )


class _StopFlag:
    """Flag that is set by SIGINT, SIGTERM and SIGHUP.

    The state is a plain bool, because a signal handler can set a bool safely.
    """

    def __init__(self) -> None:
        self._is_set = False
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._set)

    def _set(self, *_: object) -> None:
        self._is_set = True

    def __call__(self) -> bool:
        return self._is_set


def up(options: StackOptions, wanted: RequestedPorts) -> int:
    """Run the stack. Return the exit code: 0 after a signal, 1 if it cannot start or continue.

    When the function returns, all processes of the stack have ended. Only the line `ready: URL` is
    written to stdout.
    """
    # Restrict the servers' files to the owner: Redis' data and Triton's logs may contain prompts.
    os.umask(OWNER_ONLY_UMASK)
    stop_requested = _StopFlag()
    try:
        with (
            StateLock(options.state_dir),
            PortClaims() as claims,
            Stack(options, wanted.claim(claims), stop_requested) as stack,
        ):
            state = stack.start()
            for page in pages(state.gateway, options.state_dir):
                print_status(page)
            print(f"ready: {state.gateway}", flush=True)
            stack.watch()
    except StopRequested:
        print_status("stopped")
        return 0
    except StackError as error:
        print_status(f"error: {error}")
        return 1
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        print_status(f"error: {error}" + f"; is --state-dir, {options.state_dir}, full?" * full)
        return 1
