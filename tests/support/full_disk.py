"""A disk that is full, for this process: files stop growing, as with ENOSPC."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator


@contextlib.contextmanager
def full_disk(largest_file: int) -> Iterator[None]:
    """Inside, no file can be written beyond `largest_file` bytes: OSError(EFBIG).

    Python ignores SIGXFSZ from its start on; whoever sets the default again lets the next full disk
    kill the process.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
