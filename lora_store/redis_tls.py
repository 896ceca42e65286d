"""Function that copies the certificate files of a Redis URL to in-memory files.

redis-py reads the certificate files for each new connection, possibly while they are being
replaced. The in-memory copies are always complete.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from urllib.parse import parse_qsl, urlencode

from certificates.contexts import ClientFiles
from certificates.memory_files import copy_to_memory

_NAME = "certificates of the connections to Redis"
_OPTIONS = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
_PASSWORD = "ssl_password"


def with_memory_files(url: str) -> str:
    """Replace the paths of certificate files in a server's URL by paths of in-memory copies.

    A URL without certificate files is returned unchanged. The URL is also returned unchanged if the
    files cannot be read: redis-py then fails with an error that names the file.
    """
    before, mark, query = url.partition("?")
    options = dict(parse_qsl(query, keep_blank_values=True))
    if not url.startswith("rediss:") or not any(options.get(name) for name in _OPTIONS):
        return url
    named = [Path(options[name]) if options.get(name) else None for name in _OPTIONS]
    try:
        # Use redis-py to decode the password, because its releases differ: some decode it twice.
        password = import_module("redis.connection").parse_url(url).get(_PASSWORD)
        copies = copy_to_memory(_NAME, ClientFiles(*named), password)
    except OSError:
        return url
    paths = {name: str(path) for name, path in zip(_OPTIONS, copies, strict=True) if path}
    return f"{before}{mark}{urlencode(options | paths)}"
