"""A simulated full disk: files of this process stop growing, as with ENOSPC."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator


@contextlib.contextmanager
def full_disk(largest_file: int) -> Iterator[None]:
    """Make writes that exceed `largest_file` bytes fail with OSError(EFBIG) in this context.

    Python ignores SIGXFSZ from its start, and this must stay so: the default action would kill the
    process at its next full disk.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
