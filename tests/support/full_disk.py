"""A full disk for this process: files stop growing, like with ENOSPC."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator


@contextlib.contextmanager
def full_disk(largest_file: int) -> Iterator[None]:
    """Fail writes beyond `largest_file` bytes inside the context: OSError(EFBIG).

    Python ignores SIGXFSZ from its start; after restoring the default, the next full disk would
    kill the process.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
